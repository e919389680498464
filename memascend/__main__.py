"""Entry point of `python -m memascend`, which offers the same commands as `memascend`."""

import sys

from memascend.cli import main

sys.exit(main())
