"""What this machine can do, what is missing, and the exact fix. Read-only but for one temporary file of its own."""
