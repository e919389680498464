"""The watch over transfers of a process that is about to end lasts as long as requested, whatever there is to watch."""

import math
import time

from memascend.storage import leaving


def test_watch_without_limit_continues_even_with_no_transfers():
    """`memascend train` of a system without a tier needs this, from its first SIGTERM on."""
    watch = leaving._Watch()
    watch.begin(0.1, math.inf)
    time.sleep(0.3)  # long enough for several checks
    thread = watch._thread
    assert thread is not None
    assert thread.is_alive()
    watch._until = 0.0
    thread.join(20)
    assert not thread.is_alive()
    assert watch._thread is None
