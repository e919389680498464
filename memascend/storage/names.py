"""Names of files that engines make and others look for. No torch here: the parent of a training imports this."""

SCRATCH_PREFIX = "memascend-scratch-"  # of a volatile engine's file (memascend.storage.scratch)
