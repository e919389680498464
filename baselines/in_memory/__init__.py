"""See system.yaml."""
