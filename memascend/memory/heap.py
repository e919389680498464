"""The C library's heap in processes that train: settings for the environment that they start with. No torch here."""

# Without these glibc keeps freed blocks of over a gigabyte resident (measured on a 256M-parameter model). With much
# less than 4 MiB every activation on a CPU is a mapping of its own, whose pages are faulted in again: steps of a twin
# took 1.2 to 1.6 times as long with 64 KiB, for 2 to 12 % less resident memory.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4194304", "MALLOC_TRIM_THRESHOLD_": "67108864", "MALLOC_ARENA_MAX": "2"}
