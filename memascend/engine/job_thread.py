"""A thread that runs jobs in order during backward, and whose failure the training thread raises."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

from memascend.storage import interrupts
from memascend.storage.interrupts import whole

Job = Callable[[], None]


class JobThread:
    """Runs jobs one by one in a thread that the first job starts. After a failure it runs none until `abandon`.

    All methods are for the training thread, except `let_go`. `begin`: what the thread runs first; it must not refer to
    the owner. `clean_up`: called after a job has failed, in the thread in which it failed. Between jobs the thread
    refers neither to this object nor to its owner, so that it ends when they are dropped without `close`.
    """

    def __init__(self, name: str, begin: Job, clean_up: Job, most_waiting_bytes: int) -> None:
        self._name, self._begin, self._clean_up = name, begin, clean_up
        self._most_waiting_bytes = most_waiting_bytes
        self._thread: threading.Thread | None = None
        self._shared = _Shared()
        self._finalizer = weakref.finalize(self, self._shared.jobs.put, None)
        self._finalizer.atexit = False
        self.failure_was_raised = False

    @whole
    def submit(self, job: Job) -> None:
        """Queue a job after those submitted before. Raises the first failure of these."""
        self.raise_failure()
        if self._thread is None:
            work = self._shared.work
            self._thread = threading.Thread(target=work, args=(self._begin,), name=self._name, daemon=True)
            self._thread.start()
        with self._shared.changed:
            self._shared.queued += 1
        self._shared.jobs.put((job, self._clean_up))

    @whole
    def run(self, job: Job) -> None:
        """Run a job in the calling thread once all submitted jobs are done. Raises the first failure."""
        self.drain()
        error = _tried(job, self._clean_up)
        self._shared.failure = self._shared.failure or error
        self.raise_failure()

    @whole
    def drain(self) -> None:
        """Wait until all submitted jobs are done. Raises the first failure."""
        self._await_all()
        self.raise_failure()

    def _await_all(self) -> None:
        """Wait until every submitted job is done or discarded."""
        with self._shared.changed:
            while self._shared.queued:
                interrupts.wait(self._shared.changed.wait)

    def raise_failure(self) -> None:
        """Raise the failure that has occurred first since the start or the last `abandon`, if any."""
        if self._shared.failure is not None:
            self.failure_was_raised = True
            raise self._shared.failure

    @whole
    def abandon(self) -> None:
        """Discard the jobs that are still queued, and forget failures. No job is running on return."""
        shared = self._shared
        with shared.changed:
            shared.failure = shared.failure or RuntimeError("the step was given up")
        self._await_all()
        shared.failure, self.failure_was_raised, shared.waiting_bytes = None, False, 0

    @whole
    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            self._shared.jobs.put(None)
            while self._thread.is_alive():
                interrupts.check()
                self._thread.join(interrupts.SLICE_S)
            self._thread = None

    # -- memory that jobs have not used yet ----------------------------------------------------------------------------

    @whole
    def hold_back(self, more_bytes: int) -> None:
        """Count memory that jobs will use, after waiting while the limit is exceeded. Raises the first failure."""
        shared = self._shared
        with shared.changed:
            while shared.waiting_bytes > self._most_waiting_bytes and shared.queued and shared.failure is None:
                interrupts.wait(shared.changed.wait)
            shared.waiting_bytes += more_bytes
        self.raise_failure()

    @whole
    def let_go(self, nbytes: int) -> None:
        """Subtract bytes that `hold_back` has counted. Any thread may call this."""
        with self._shared.changed:
            self._shared.waiting_bytes -= nbytes
            self._shared.changed.notify_all()


class _Shared:
    """The state that the thread and the `JobThread` share."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Job, Job] | None] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.queued = 0
        self.waiting_bytes = 0
        self.failure: BaseException | None = None

    def work(self, begin: Job) -> None:
        """The thread's target: run `begin`, then queued jobs until None comes; after a failure, discard them."""
        error = _tried(begin, lambda: None)
        with self.changed:
            self.failure = self.failure or error
        while (entry := self.jobs.get()) is not None:
            error = _tried(*entry) if self.failure is None else None
            del entry
            with self.changed:
                self.failure = self.failure or error
                self.queued -= 1
                self.changed.notify_all()
            del error


def _tried(job: Job, clean_up: Job) -> BaseException | None:
    """Run a job. Return its error, after `clean_up`, or None."""
    try:
        job()
    except BaseException as error:
        clean_up()
        return error
    return None
