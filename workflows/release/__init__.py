"""A release: its lock files, its source distribution and wheel, and a try of both as a stranger."""
