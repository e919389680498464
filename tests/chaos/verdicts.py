"""Verdicts on a seed. The first two are what the library promises."""

EQUAL, NAMED = "equal", "named error, then equal"
FAILURES = ("wrong bits", "silent continuation", "lost steps", "leak", "hang", "crash without a line")
REFUSED, NOT_RUN = "refused before it began", "not run here"
VERDICTS = (EQUAL, NAMED, *FAILURES, REFUSED, NOT_RUN)
