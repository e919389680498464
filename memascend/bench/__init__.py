"""Benchmarks of the parts, each against its peers and its limit in the same run: `memascend bench …`."""
