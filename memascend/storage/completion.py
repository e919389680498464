"""Completions: handles of operations in flight to wait for or chain, so that no thread blocks between two steps.

    read = tier.read("layer.3", buffer)
    ready = read.then(lambda _: copy_to_device(buffer)).then(lambda event: when(event.query))
    ready.wait()

**Threads.** Callbacks and the functions of `then` run one after another in one dispatcher thread per process, never in
the thread that attached them, even if the completion had already ended. So they must be short and must not block:
`wait` on something that has not ended raises RuntimeError there, since it might wait for itself. A longer step (such as
an optimizer step) goes to an executor by `then(..., on=executor)`. The dispatcher starts when it is first needed and
ends when nothing is left to watch.

**Errors.** The error of a step propagates down its chain, skipping the steps that were to follow, to whoever waits or
to a callback that asks for it. No error is lost: a failed completion that is dropped unobserved is logged.

**Fork and exit.** Nothing that began before a fork ends in the child: `wait` raises RuntimeError there. At interpreter
exit the tiers are closed, which ends their transfers; then the pending callbacks run, then the dispatcher ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any

from memascend.storage import interrupts, leaving
from memascend.storage.engine import RequestCancelled
from memascend.storage.interrupts import whole

__all__ = ["Completion", "Promise", "RequestCancelled", "all_of", "when"]

log = logging.getLogger("memascend")
_POLL_S = 2e-4  # interval between two polls of `when`; copying 1 MiB to a device takes some 100 us
_states = threading.Lock()  # guards the state of all completions; held for a few instructions


class Completion:
    """An operation that ends once, with a value or an error. Made by tiers, `then`, `all_of`, `when`; thread-safe."""

    def __init__(self, what: str) -> None:
        """Create a completion that has not ended. `what` names the operation in messages."""
        self._what = what
        self._done = self._observed = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Completion], None]] = []
        self._ended: threading.Event | None = None  # created by the first waiter
        self._pid = os.getpid()

    def __repr__(self) -> str:
        state = "in flight" if not self._done else "done" if self._error is None else f"failed: {self._error}"
        return f"<{self._what}: {state}>"

    def done(self) -> bool:
        """Return whether it has ended, successfully or not. Does not block."""
        return self._done

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until it has ended, and return its value. Other threads run meanwhile.

        Raises its error (StorageError, RequestCancelled, or what a step raised), on every call; TimeoutError after
        `timeout_s` seconds; RuntimeError in the dispatcher thread and in a forked child.
        """
        if not self._done:
            self._block(timeout_s)
        self._observed = True
        if self._error is not None:
            raise self._error
        return self._value

    def error(self) -> BaseException | None:
        """Return the error of a completion that has ended, or None. Raises RuntimeError if it has not ended."""
        if not self._done:
            raise RuntimeError(f"{self._what} has not ended")
        self._observed = True
        return self._error

    def cancel(self) -> bool:
        """Ask to skip what has not begun; return False if it has ended, or cannot be stopped any more.

        A cancelled operation still ends, with RequestCancelled unless it was too far along. Wait for its end before
        reusing the buffer.
        """
        return False

    @whole
    def add_done_callback(self, function: Callable[[Completion], None]) -> None:
        """Call `function(self)` in the dispatcher thread once this has ended. Exceptions that it raises are logged."""
        with _states:
            if not self._done:
                self._callbacks.append(function)
                self._watched()
                return
        _dispatcher.call(lambda: self._call(function))

    def then(self, function: Callable[[Any], Any], *, on: Executor | None = None) -> Completion:
        """Return the completion of `function(value)`, called once this one has ended well; an error skips the call.

        If `function` returns a completion, the result ends with that one. `function` runs in the dispatcher thread, or
        in the executor `on`.
        """
        stage = _Stage(self, function, on)
        self.add_done_callback(stage.begin)
        return stage

    def _watched(self) -> None:
        """Hook, called under `_states`, when something other than a waiting thread needs to know when this ends."""

    @whole
    def _block(self, timeout_s: float | None) -> None:
        """Wait for the end, without raising the operation's error; see `wait` for the other errors."""
        if self._pid != os.getpid():
            raise RuntimeError(f"{self._what} was started before the fork, in the parent: start it in each process")
        if _dispatcher.is_this_thread():
            raise RuntimeError(f"{self._what} has not ended: a callback must not wait for it; chain it by then()")
        with _states:
            if self._done:
                return
            self._ended = self._ended or threading.Event()
            self._watched()
        leaving.begin_if_asked()
        try:
            ended = interrupts.wait(self._ended.wait, timeout_s)
        except BaseException:  # raised by a signal handler, such as Ctrl-C's
            leaving.begin()
            raise
        if not ended:
            raise TimeoutError(f"{self._what} has not ended after {timeout_s} s")

    @whole
    def _settle(self, value: Any = None, error: BaseException | None = None) -> bool:
        """End it; the first call decides. Return False if it had already ended."""
        with _states:
            if self._done:
                return False
            self._value, self._error, self._done = value, error, True
            callbacks, self._callbacks = self._callbacks, []
        if self._ended is not None:
            self._ended.set()
        for function in callbacks:
            _dispatcher.call(functools.partial(self._call, function))
        return True

    def _give_up(self, error: BaseException) -> None:
        """End it with an error that was already reported, though the operation itself may still be in flight."""
        self._observed = True
        self._settle(error=error)

    def _call(self, function: Callable[[Completion], None]) -> None:
        """Call a callback, and log its exception."""
        try:
            function(self)
        except Exception:
            log.exception("memascend: a callback of %s raised", self._what)

    def __del__(self) -> None:
        if self._error is not None and not self._observed and not isinstance(self._error, RequestCancelled):
            log.error("memascend: %s failed, and its exception was never retrieved: %s", self._what, self._error)


class Promise(Completion):
    """A completion that its creator ends, once."""

    def set_result(self, value: Any = None) -> None:
        """End it with `value`. Raises RuntimeError if it has already ended."""
        if not self._settle(value):
            raise RuntimeError(f"{self._what} has ended already")

    def set_error(self, error: BaseException) -> None:
        """End it with `error`. Raises RuntimeError if it has already ended."""
        if not self._settle(error=error):
            raise RuntimeError(f"{self._what} has ended already")


class _Stage(Completion):
    """A step that follows a completion."""

    def __init__(self, upstream: Completion, function: Callable[[Any], Any], executor: Executor | None) -> None:
        super().__init__(f"{getattr(function, '__name__', 'a step')} after {upstream._what}")
        self._function: Callable[[Any], Any] | None = function
        self._executor = executor
        self._source: Completion | None = upstream  # the upstream, later what the function returned
        self._cancelled = False

    def begin(self, upstream: Completion) -> None:
        """Called when `upstream` has ended: run the step, or end with the error without running it."""
        error, self._source = upstream.error(), None
        if error is not None or self._cancelled:
            self._function = None
            self._settle(error=error or RequestCancelled(f"{self._what} was cancelled"))
        elif self._executor is None:
            self._run(upstream._value)
        else:
            try:
                self._executor.submit(self._run, upstream._value)
            except RuntimeError as refused:  # the executor has been shut down
                self._settle(error=refused)

    def _run(self, value: Any) -> None:
        """Call the function, and end with its result; if that is a completion, end when it does."""
        function, self._function = self._function, None  # drop the references that the function holds
        try:
            if self._cancelled:
                raise RequestCancelled(f"{self._what} was cancelled")
            assert function is not None, "a stage runs once"
            result = function(value)
        except BaseException as error:  # raised again by whoever waits
            self._settle(error=error)
            return
        if isinstance(result, Completion):
            self._source = result
            result.add_done_callback(self._adopt)
        else:
            self._settle(result)

    def _adopt(self, inner: Completion) -> None:
        """End like the completion that the function has returned."""
        self._source = None
        self._settle(inner._value, inner.error())

    def cancel(self) -> bool:
        if self._done:
            return False
        self._cancelled = True
        source = self._source
        return (source is not None and source.cancel()) or self._function is not None


def all_of(completions: Iterable[Completion]) -> Completion:
    """Return a completion that ends when all have ended, with the list of their values or the first one's error."""
    return _All(list(completions))


class _All(Completion):
    """The completion that `all_of` returns."""

    def __init__(self, parts: list[Completion]) -> None:
        super().__init__(f"{len(parts)} operations")
        self._parts = parts
        self._left = len(parts)
        for part in parts:
            part.add_done_callback(self._one_ended)
        if not parts:
            self._settle([])

    def _one_ended(self, _part: Completion) -> None:  # in the dispatcher thread, one at a time
        self._left -= 1
        if self._left == 0:
            errors = [error for part in self._parts if (error := part.error()) is not None]
            self._settle([part._value for part in self._parts], errors[0] if errors else None)
            self._parts = []

    def cancel(self) -> bool:
        return bool([part for part in self._parts if part.cancel()])  # a list, so that every part is cancelled


def when(is_done: Callable[[], bool], what: str = "an event") -> Completion:
    """Return a completion that ends once `is_done()` is true, such as the query of a device's event.

    It fails with what `is_done` raises. The dispatcher thread calls `is_done` every 200 us until then.
    """
    completion = Completion(what)
    _dispatcher.ask(is_done, completion)
    return completion


class _Dispatcher:
    """The one thread per process that waits for the engines' completions and runs callbacks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._epoll: select.epoll | None = None
        self._wake_fd = -1
        self._sources: dict[int, Callable[[], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._questions: list[tuple[Callable[[], bool], Completion]] = []
        self._stopped = False

    def is_this_thread(self) -> bool:
        return self._thread is threading.current_thread()

    @whole
    def call(self, function: Callable[[], None]) -> None:
        """Run `function` in the thread; after `stop`, in the caller."""
        with self._lock:
            if not self._stopped:
                self._calls.append(function)
                self._wake()
                return
        function()

    @whole
    def ask(self, is_done: Callable[[], bool], completion: Completion) -> None:
        """Poll `is_done` in the thread, and end `completion` when it is true or raises."""
        with self._lock:
            self._questions.append((is_done, completion))
            self._wake()

    @whole
    def watch(self, fd: int, take: Callable[[], None]) -> None:
        """Call `take` whenever the eventfd `fd` is signalled, until `unwatch`."""
        with self._lock:
            self._sources[fd] = take
            epoll = self._wake()
            # Edge-triggered: an outcome claimed by a waiting thread leaves the descriptor readable until it is taken.
            epoll.register(fd, select.EPOLLIN | select.EPOLLET)

    @whole
    def unwatch(self, fd: int, take: Callable[[], None]) -> None:
        """Stop watching `fd`; a no-op if it belongs to another `take` by now."""
        with self._lock:
            if self._sources.get(fd) is take:
                del self._sources[fd]
                if self._epoll is not None:
                    with contextlib.suppress(OSError):
                        self._epoll.unregister(fd)
                    self._wake()

    def unwatch_soon(self, fd: int, take: Callable[[], None]) -> None:
        """Call `unwatch` in the thread. Takes no lock, since a finalizer may interrupt its holder."""
        if self._sources.get(fd) is take:  # then the thread exists
            self._calls.append(functools.partial(self.unwatch, fd, take))
            os.eventfd_write(self._wake_fd, 1)

    def _wake(self) -> select.epoll:
        """Start the thread if necessary, wake it, and return its epoll object. Requires `_lock`."""
        epoll = self._epoll
        if self._thread is None or epoll is None:
            epoll, self._wake_fd = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            epoll.register(self._wake_fd, select.EPOLLIN)
            self._epoll = epoll
            self._thread = threading.Thread(
                target=self._run, args=(epoll, self._wake_fd), name="memascend-dispatch", daemon=True
            )
            self._thread.start()
        if not self.is_this_thread():
            os.eventfd_write(self._wake_fd, 1)
        return epoll

    def _run(self, epoll: select.epoll, wake_fd: int) -> None:
        """The thread's target: serve eventfds, calls and polls until none is left."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals belong to the main thread
        while True:
            if self._questions:
                time.sleep(_POLL_S)
            for fd, _ in epoll.poll(0 if self._questions or self._calls else None):
                if fd == wake_fd:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(wake_fd)
                elif (take := self._sources.get(fd)) is not None:
                    self._run_one(take)
            while self._calls:
                self._run_one(self._calls.popleft())
            self._ask()
            with self._lock:
                if not (self._sources or self._calls or self._questions):
                    epoll.close()
                    os.close(wake_fd)
                    self._thread = self._epoll = None
                    return

    def _run_one(self, function: Callable[[], None]) -> None:
        """Call a function, and log its exception."""
        try:
            function()
        except Exception:
            log.exception("memascend: internal error in the callback thread, which continues")

    def _ask(self) -> None:
        """Poll all pending questions once, and end the completions of those that have an answer."""
        for question in list(self._questions):
            is_done, completion = question
            try:
                ended, error = bool(is_done()), None
            except Exception as raised:
                ended, error = True, raised
            if ended:
                self._questions.remove(question)
                completion._settle(error=error)

    def abandon(self) -> None:
        """Close descriptors in a forked child: they are copies of the parent's, and the thread does not exist here."""
        if self._epoll is not None:
            self._epoll.close()
            os.close(self._wake_fd)

    def stop(self) -> None:
        """Run what is pending, then end; called at interpreter exit, after the tiers are closed."""
        with self._lock:
            self._stopped = True
            self._sources.clear()
            unanswered, self._questions = self._questions, []
            thread = self._thread
            if thread is not None:
                self._wake()
        for _, completion in unanswered:
            completion._settle(error=RequestCancelled(f"{completion._what}: the interpreter ends"))
        if thread is not None and not self.is_this_thread():
            thread.join(5)


_dispatcher = _Dispatcher()


def in_dispatcher() -> bool:
    """Return whether the caller runs in the thread that runs callbacks."""
    return _dispatcher.is_this_thread()


def call(function: Callable[[], None]) -> None:
    """Run `function` in the dispatcher thread."""
    _dispatcher.call(function)


def watch(fd: int, take: Callable[[], None]) -> None:
    """Call `take` in the dispatcher thread whenever the eventfd `fd` is signalled, until :func:`unwatch`."""
    _dispatcher.watch(fd, take)


def unwatch(fd: int, take: Callable[[], None]) -> None:
    """Stop watching `fd`; call it before closing `fd`, with the same `take` object that was passed to `watch`."""
    _dispatcher.unwatch(fd, take)


def unwatch_soon(fd: int, take: Callable[[], None]) -> None:
    """Variant of `unwatch` for finalizers, which may run at any point of any thread."""
    _dispatcher.unwatch_soon(fd, take)


def _begin_anew_in_child() -> None:
    """Start with a new dispatcher in a forked child.

    The parent's thread does not exist there, its locks may be taken, and its descriptors are the parent's.
    """
    global _dispatcher, _states
    _dispatcher.abandon()
    _states, _dispatcher = threading.Lock(), _Dispatcher()


os.register_at_fork(after_in_child=_begin_anew_in_child)
atexit.register(lambda: _dispatcher.stop())
