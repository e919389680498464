"""One thread that works beside backward, in order, and whose failure the training thread raises."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from memascend.storage import interrupts
from memascend.storage.interrupts import whole

Job = Callable[[], None]


class JobThread:
    """Runs jobs one by one, in a thread that the first one starts. After a failure it runs none until `abandon`.

    All methods are the training thread's, but for `let_go`. `begin`: what the thread does first. `clean_up`: called
    where a job has failed, in the thread that it failed in.
    """

    def __init__(self, name: str, begin: Job, clean_up: Job, most_waiting_bytes: int) -> None:
        self._name, self._begin, self._clean_up = name, begin, clean_up
        self._most_waiting_bytes = most_waiting_bytes
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._queued = 0
        self._waiting_bytes = 0
        self._failure: BaseException | None = None
        self.failure_was_raised = False

    @whole
    def submit(self, job: Job) -> None:
        """Run it after those before it. Raises the first failure of these."""
        self.raise_failure()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        with self._changed:
            self._queued += 1
        self._jobs.put(job)

    @whole
    def run(self, job: Job) -> None:
        """Run it in the calling thread when all that was submitted is done. Raises the first failure."""
        self.drain()
        error = self._tried(job)
        self._failure = self._failure or error
        self.raise_failure()

    @whole
    def drain(self) -> None:
        """Until all that was submitted is done. Raises the first failure."""
        self._await_all()
        self.raise_failure()

    def _await_all(self) -> None:
        with self._changed:
            while self._queued:
                interrupts.wait(self._changed.wait)

    def raise_failure(self) -> None:
        if self._failure is not None:
            self.failure_was_raised = True
            raise self._failure

    @whole
    def abandon(self) -> None:
        """Run nothing of what is still queued, and forget failures. Nothing runs any more on return."""
        with self._changed:
            self._failure = self._failure or RuntimeError("the step was given up")
        self._await_all()
        self._failure, self.failure_was_raised, self._waiting_bytes = None, False, 0

    @whole
    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            while self._thread.is_alive():
                interrupts.check()
                self._thread.join(interrupts.SLICE_S)
            self._thread = None

    # -- memory that jobs have not used yet ----------------------------------------------------------------------------

    @whole
    def hold_back(self, more_bytes: int) -> None:
        """Count memory that jobs will use; wait first while there is more than may be. Raises the first failure."""
        with self._changed:
            while self._waiting_bytes > self._most_waiting_bytes and self._queued and self._failure is None:
                interrupts.wait(self._changed.wait)
            self._waiting_bytes += more_bytes
        self.raise_failure()

    @whole
    def let_go(self, nbytes: int) -> None:
        """Of what `hold_back` has counted. Any thread."""
        with self._changed:
            self._waiting_bytes -= nbytes
            self._changed.notify_all()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        error = self._tried(self._begin)
        with self._changed:
            self._failure = self._failure or error
        while (job := self._jobs.get()) is not None:
            error = self._tried(job) if self._failure is None else None
            del job
            with self._changed:
                self._failure = self._failure or error
                self._queued -= 1
                self._changed.notify_all()

    def _tried(self, job: Job) -> BaseException | None:
        try:
            job()
        except BaseException as error:
            self._clean_up()
            return error
        return None
