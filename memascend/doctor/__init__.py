"""Checks of what this machine can do and what is missing, with exact fixes; it writes only one temporary file."""
