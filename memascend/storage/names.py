"""Names of files that engines create and others search for. Imports no torch: the parent process of a run uses it."""

SCRATCH_PREFIX = "memascend-scratch-"  # prefix of a volatile engine's file (memascend.storage.scratch)
