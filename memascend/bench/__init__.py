"""Benchmarks of the parts, each compared with its peers and its limit in the same run: `memascend bench …`."""
