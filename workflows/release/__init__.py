"""A release: its lock files, its source distribution and wheel, and a test of both in a new environment."""
