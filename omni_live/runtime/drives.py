"""What runs a runner: the event loop itself, or a thread.

On the loop a message costs no thread switch, but nothing else moves while an engine steps, so that is for engines
whose steps take microseconds. On a thread, what arrives together crosses over together, and so does what leaves.
"""

import logging
import threading
import time
from asyncio import AbstractEventLoop, TimerHandle
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from omni_live.runtime.outbox import Outbox
from omni_live.runtime.runner import NS_PER_S, Runner
from omni_live.runtime.wire import Message

_SLICE_NS: Final = 1_000_000
"""On the loop, sockets get their turn after so much stepping."""
_INBOX_BYTES: Final = 64 * 2**20
"""What may wait for a runner's thread; above it the sockets are not read until it has caught up."""
_JOIN_S: Final = 2.0

log = logging.getLogger(__name__)


class Shell(Protocol):
    """The part of a worker that owns sockets. Called on the event loop only."""

    def post(self, said: Sequence[tuple[int, Message]]) -> None: ...
    def loaded(self) -> None: ...
    def drained(self) -> None: ...
    def crashed(self) -> None: ...
    def hold(self, full: bool) -> None:
        """Stop or go on reading."""


class Drive(Protocol):
    def start(self) -> None:
        """Load the engines, then run; `Shell.loaded` follows."""

    def receive(self, source: int, messages: Sequence[Message], nbytes: int) -> None: ...
    def lost(self, worker: int, receiver: bool) -> None:
        """A link to another worker is gone: the one our chunks take (`receiver`), or the one that brought chunks."""

    def wake(self) -> None:
        """From any thread: step again."""

    def stop(self) -> None: ...


Build = Callable[[Callable[[], None]], Runner]
"""Makes the runner, given what its engines call to be stepped again."""


class InlineDrive:
    """Runs the runner on the event loop."""

    def __init__(self, loop: AbstractEventLoop, shell: Shell, outbox: Outbox, build: Build) -> None:
        self._loop = loop
        self._shell = shell
        self._outbox = outbox
        self._runner = build(self.wake)
        self._alarm: TimerHandle | None = None
        self._alarm_ns = 0
        self._goes_on = False
        self._over = False

    def start(self) -> None:
        self._guard(self._load)

    def receive(self, source: int, messages: Sequence[Message], nbytes: int) -> None:
        if self._over:
            return
        try:
            receive = self._runner.receive
            for message in messages:
                receive(source, message)
            self._run()
        except Exception:
            log.exception("event=engine_crashed")
            self._crash()

    def lost(self, worker: int, receiver: bool) -> None:
        self._guard(self._lost, worker, receiver)

    def wake(self) -> None:
        self._loop.call_soon_threadsafe(self._guard, self._run)

    def stop(self) -> None:
        self._over = True
        self._runner.shut()

    def _guard(self, call: Callable[..., None], *arguments: object) -> None:
        """The edge of the worker: what an engine raises that names no turn ends the process, with its traceback."""
        if self._over:
            return
        try:
            call(*arguments)
        except Exception:
            log.exception("event=engine_crashed")
            self._crash()

    def _crash(self) -> None:
        self._over = True
        self._shell.crashed()

    def _load(self) -> None:
        self._runner.load()
        self._shell.loaded()
        self._run()

    def _lost(self, worker: int, receiver: bool) -> None:
        _tell_lost(self._runner, worker, receiver)
        self._run()

    def _go_on(self) -> None:
        self._goes_on = False
        self._run()

    def _run(self) -> None:
        runner = self._runner
        if runner.step():
            until_ns = time.monotonic_ns() + _SLICE_NS
            while runner.step():
                if time.monotonic_ns() > until_ns:
                    if not self._goes_on:
                        self._goes_on = True
                        self._loop.call_soon(self._guard, self._go_on)
                    self._flush()
                    return
        at_ns = runner.settle()
        self._flush()
        if at_ns is not None and (self._alarm is None or at_ns < self._alarm_ns):
            self._arm(at_ns)
        if runner.is_draining and runner.is_drained:
            self._shell.drained()

    def _flush(self) -> None:
        said = self._outbox.take()
        if said:
            self._shell.post(said)

    def _arm(self, at_ns: int) -> None:
        """Come back when something falls due; an alarm that rings too early finds the later time by itself."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_ns = at_ns
        wait_s = max(0, at_ns - time.monotonic_ns()) / NS_PER_S
        self._alarm = self._loop.call_later(wait_s, self._guard, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._run()


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one read of a socket brought."""

    source: int
    messages: Sequence[Message]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Lost:
    worker: int
    receiver: bool


class ThreadedDrive:
    """Runs the runner on a thread of its own."""

    def __init__(self, loop: AbstractEventLoop, shell: Shell, outbox: Outbox, build: Build) -> None:
        self._loop = loop
        self._shell = shell
        self._outbox = outbox
        self._runner = build(self.wake)
        self._inbox: SimpleQueue[_Batch | _Lost | None] = SimpleQueue()
        """None only wakes."""
        self._bytes_in = 0  # written by the loop
        self._bytes_done = 0  # written by the thread
        self._is_full = False
        self._said: deque[tuple[int, Message]] = deque()
        self._scheduled = False
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="runner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def receive(self, source: int, messages: Sequence[Message], nbytes: int) -> None:
        self._bytes_in += nbytes
        if not self._is_full and self._bytes_in - self._bytes_done > _INBOX_BYTES:
            self._is_full = True
            self._shell.hold(True)
        self._inbox.put(_Batch(source, messages, nbytes))

    def lost(self, worker: int, receiver: bool) -> None:
        self._inbox.put(_Lost(worker, receiver))

    def wake(self) -> None:
        self._inbox.put(None)

    def stop(self) -> None:
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(_JOIN_S)

    # -- on the thread

    def _main(self) -> None:
        try:
            self._runner.load()
            self._call(self._shell.loaded)
            while not self._stopping:
                self._turn()
            self._runner.shut()
        except Exception:  # as InlineDrive._guard
            log.exception("event=engine_crashed")
            self._call(self._shell.crashed)

    def _turn(self) -> None:
        """Take everything that has arrived, then do one step; wait only where there is nothing to do."""
        if self._runner.step():
            self._flush()
            if not self._inbox.empty():
                self._take(self._inbox.get())
            return
        at_ns = self._runner.settle()
        self._flush()
        if self._runner.is_drained:
            self._call(self._shell.drained)
            self._stopping = True
            return
        wait_s = None if at_ns is None else max(0, at_ns - time.monotonic_ns()) / NS_PER_S
        with suppress(Empty):
            self._take(self._inbox.get(timeout=wait_s))

    def _take(self, item: _Batch | _Lost | None) -> None:
        while True:
            match item:
                case _Batch(source, messages, nbytes):
                    for message in messages:
                        self._runner.receive(source, message)
                    self._bytes_done += nbytes
                case _Lost(worker, receiver):
                    _tell_lost(self._runner, worker, receiver)
                case None:
                    pass
            if self._inbox.empty():
                break
            item = self._inbox.get()
        self._flush()  # what opens a receiver does not wait for the step of its producer

    def _flush(self) -> None:
        said = self._outbox.take()
        if not said and not self._is_full:
            return
        self._said.extend(said)
        if not self._scheduled:
            self._scheduled = True
            self._call(self._post)

    def _call(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process is about to end
            self._loop.call_soon_threadsafe(call)

    # -- on the loop

    def _post(self) -> None:
        # Before the messages are taken: what is said from here on schedules another call.
        self._scheduled = False
        said: list[tuple[int, Message]] = []
        while self._said:
            said.append(self._said.popleft())
        self._shell.post(said)
        if self._is_full and self._bytes_in - self._bytes_done <= _INBOX_BYTES // 2:
            self._is_full = False
            self._shell.hold(False)


def _tell_lost(runner: Runner, worker: int, receiver: bool) -> None:
    if receiver:
        runner.lost_receiver(worker)
    else:
        runner.lost_producer(worker)
