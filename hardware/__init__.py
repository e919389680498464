"""Descriptions of machines: those of the papers (testbeds/) and this one (probe). Nothing here imports torch."""
