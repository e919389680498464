"""`python -m memascend`: the commands, as `memascend`."""

import sys

from memascend.cli import main

sys.exit(main())
