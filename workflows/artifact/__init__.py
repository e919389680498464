"""The artifact of a profile: one zip with sources, records, tables, pictures and verdicts, and a check of it.

`bundle` makes it, `verify` checks one: it redraws every exhibit and recomputes every verdict from the zip alone
(`redraw`, with the zip's own sources) and compares the bytes.
"""
