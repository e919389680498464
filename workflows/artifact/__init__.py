"""The artifact of a profile: one zip with sources, records, tables, pictures and verdicts, and a check of it.

`bundle` creates it and `verify` checks one. The check redraws every exhibit and recomputes every verdict from the zip
alone (`redraw`, with the zip's own sources) and compares the bytes.
"""
