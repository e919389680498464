"""The seed of what the zoo draws at random: the date in a nightly run, so that nights differ."""

import os
from datetime import UTC, datetime

GIVEN = os.environ.get("MEMASCEND_ZOO_SEED")
SEED = int(GIVEN or f"{datetime.now(UTC):%Y%m%d}")
