"""Where worker processes come from: `python -m omni_live.runtime.nursery FD SERVER_PID`, a process that forks them.

A worker that is forked starts with everything imported that all workers need, and lies at the same addresses as its
siblings. The second is worth more than the first: processors predict branches by address, so that processes which
hand a small unit of work from one to the next warm each other up instead of starting cold each time (`bench hops`: a
fifth less time and processor time a hop). Addresses still differ from one server to the next.

The nursery runs nothing but this file: one thread, no event loop, no numpy, whose BLAS would start threads. Requests
and answers are one datagram each; what is forked, and a handle on it, travel beside them.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import selectors
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Self

import msgspec

from omni_live.runtime.memory import keep_freed_memory
from omni_live.runtime.prctl import die_with, set_title

_MAX_BYTES: Final = 65_536

log = logging.getLogger(__name__)


class Bear(msgspec.Struct, array_like=True, tag=1):
    """Fork a worker; its two lanes come along."""

    serial: int
    environment: dict[str, str]
    """What it has beside the nursery's own."""


class Born(msgspec.Struct, array_like=True, tag=2):
    """It runs; a handle on it comes along."""

    serial: int
    pid: int


class Stillborn(msgspec.Struct, array_like=True, tag=3):
    """It could not be forked."""

    serial: int
    number: int
    """errno of what failed."""


class Died(msgspec.Struct, array_like=True, tag=4):
    serial: int
    status: int
    """Its exit status, or the negative number of the signal that ended it."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_ASKED: Final = msgspec.msgpack.Decoder(Bear)
_TOLD: Final[msgspec.msgpack.Decoder[Born | Stillborn | Died]] = msgspec.msgpack.Decoder(Born | Stillborn | Died)


# -- the server's side -------------------------------------------------------------------------------------------


class Child:
    """A worker process."""

    def __init__(self, pid: int, handle: int) -> None:
        self.pid = pid
        self.status: int | None = None
        """How it ended, as `Died.status`; None while it runs."""
        self._handle = handle
        self._over = asyncio.Event()

    def kill(self) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    async def wait(self) -> int:
        await self._over.wait()
        assert self.status is not None
        return self.status

    def ended(self, status: int) -> None:
        self.status = status
        os.close(self._handle)
        self._over.set()


class Nursery:
    """The process that forks workers, started when the first one is wanted and again when it is gone.

    None of its children outlives it: the kernel sees to that.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._serial = 0
        self._expected: dict[int, asyncio.Future[Child]] = {}
        self._children: dict[int, Child] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def bear(self, lanes: Sequence[socket.socket], environment: Mapping[str, str]) -> Child:
        """A new worker that has these lanes. Raises OSError where there can be none now."""
        async with self._starting:
            if self._socket is None:
                await self._start()
        line = self._socket
        if line is None:
            raise BrokenPipeError("the nursery is gone")
        self._serial += 1
        serial = self._serial
        future: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._expected[serial] = future
        try:
            asked = _ENCODER.encode(Bear(serial, dict(environment)))
            socket.send_fds(line, [asked], [lane.fileno() for lane in lanes])
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().kill()  # nobody will ever hold it
            raise
        finally:
            self._expected.pop(serial, None)

    async def _start(self) -> None:
        if self._process is not None:
            await self._process.wait()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        # A server that was kept from importing out of its working directory keeps its workers from it, too.
        safe = ["-P"] if sys.flags.safe_path else []
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, *safe, "-m", "omni_live.runtime.nursery", str(theirs.fileno()), str(os.getpid())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.__stderr__ or asyncio.subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._heard)

    def _heard(self) -> None:
        if self._socket is None:
            return
        try:
            data, handles, _, _ = socket.recv_fds(self._socket, _MAX_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            data, handles = b"", []
        if not data:
            log.warning("event=nursery_gone children=%d", len(self._children))
            self._close()
            return
        match _TOLD.decode(data):
            case Born(serial, pid) if handles:
                self._born(serial, Child(pid, handles[0]))
            case Born(serial):
                # We have no descriptor left for it. Its lanes close with the error, and it ends.
                self._failed(serial, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            case Stillborn(serial, number):
                self._failed(serial, OSError(number, os.strerror(number)))
            case Died(serial, status):
                child = self._children.pop(serial, None)
                if child is not None:
                    child.ended(status)

    def _failed(self, serial: int, error: OSError) -> None:
        future = self._expected.get(serial)
        if future is not None and not future.done():
            future.set_exception(error)

    def _born(self, serial: int, child: Child) -> None:
        self._children[serial] = child
        future = self._expected.get(serial)
        if future is None or future.done():
            child.kill()  # whoever wanted it has given up
        else:
            future.set_result(child)

    def _close(self) -> None:
        """There is no nursery any more, and there are no children."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        children, self._children = self._children, {}
        for child in children.values():
            child.kill()
            child.ended(-signal.SIGKILL)
        for future in self._expected.values():
            if not future.done():
                future.set_exception(BrokenPipeError("the nursery is gone"))


# -- the nursery's own side --------------------------------------------------------------------------------------


class _Cradle:
    """Forks, and tells of births and deaths, until the server closes the line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._selector = selectors.DefaultSelector()
        self._selector.register(line, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, int]] = {}
        """Handle -> serial and process."""

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._children:
                    self._bury(key.fd)
                elif not self._asked():
                    return

    def _asked(self) -> bool:
        data, lanes, _, _ = socket.recv_fds(self._line, _MAX_BYTES, 2)
        if not data:
            return False
        bear = _ASKED.decode(data)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(Stillborn(bear.serial, error.errno or 0))
        else:
            if pid == 0:
                self._grow_up(bear, lanes, parent)
            try:
                handle = os.pidfd_open(pid)
            except OSError as error:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._tell(Stillborn(bear.serial, error.errno or 0))
                self._let_go(lanes)
                return True
            self._children[handle] = (bear.serial, pid)
            self._selector.register(handle, selectors.EVENT_READ)
            socket.send_fds(self._line, [_ENCODER.encode(Born(bear.serial, pid))], [handle])
        self._let_go(lanes)
        return True

    @staticmethod
    def _let_go(lanes: Sequence[int]) -> None:
        for lane in lanes:
            os.close(lane)

    def _bury(self, handle: int) -> None:
        self._selector.unregister(handle)
        serial, pid = self._children.pop(handle)
        os.close(handle)
        _, status = os.waitpid(pid, 0)
        self._tell(Died(serial, os.waitstatus_to_exitcode(status)))

    def _tell(self, told: Stillborn | Died) -> None:
        self._line.send(_ENCODER.encode(told))

    def _grow_up(self, bear: Bear, lanes: Sequence[int], parent: int) -> None:
        """This process is the worker; it never comes back."""
        from omni_live.runtime.worker import live

        status = 1
        try:
            die_with(parent)
            self._selector.close()
            self._line.close()
            for handle in self._children:
                os.close(handle)
            os.environ.update(bear.environment)
            status = live(*(socket.socket(fileno=lane) for lane in lanes))
        except Exception:  # the edge of the process
            log.exception("event=worker_failed")
        finally:
            logging.shutdown()
            # A thread that is stuck in an engine's native code must not keep the process.
            os._exit(status)


def main(arguments: Sequence[str]) -> None:
    line, server = (int(argument) for argument in arguments)
    die_with(server)
    set_title("omni:nursery")
    # Ctrl-C in a terminal, and a supervisor's SIGTERM, reach all processes of the group: the server decides what they
    # mean. Children inherit this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="level=%(levelname)s logger=%(name)s %(message)s")
    keep_freed_memory()
    import omni_live.runtime.worker  # noqa: F401 - once, for all children

    gc.collect()
    gc.freeze()  # a collection in a child would write into every page that it shares
    with contextlib.suppress(ConnectionError):
        _Cradle(socket.socket(fileno=line)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
