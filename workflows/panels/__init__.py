"""Renderers; each draws one panel of a figure from a tidy table and its specification (papers/*/figures.yaml)."""
