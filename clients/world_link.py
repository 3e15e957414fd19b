"""A line to a world's door: one socket after another, and on each the sessions of all rollouts.

When a socket drops, the line comes back by itself and resumes each session with its token and the last number that came
of it; see world_book.py for what is then asked again. Where there is no way back in time, all of them end with
`ConnectionLost`.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from omni_live.clients.clock import Clock, S
from omni_live.clients.dial import TRY_AGAIN_STATUS, Address
from omni_live.clients.duplex import Patience, waits
from omni_live.clients.world_book import CANCEL, RESUME, Ask, Book
from omni_live.clients.world_errors import (
    ConnectFailed,
    ConnectionLost,
    Refused,
    SessionLost,
    TimedOut,
    Unrepeatable,
    WorldError,
)
from omni_live.clients.world_wire import (
    Beat,
    Done,
    Facts,
    Message,
    Missed,
    Opened,
    Other,
    Over,
    Refusal,
    Resumed,
    Shown,
    Snapshotted,
    Told,
    frame,
    read,
    read_greeting,
    write,
)
from omni_live.protocols.fields import Faulty
from omni_live.protocols.world.contract import WorldContract

FIRST_FRAME_S: Final = 10.0
CLOSE_WITHIN_S: Final = 2.0

_STATUS: Final = {401: "invalid_api_key", 403: "forbidden", 404: "not_found"}

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """What happened on the line so far."""

    drops: int = 0
    resumes: int = 0
    asked_again: int = 0
    """Requests of which the server had not said a word when the line was back."""


@dataclass(slots=True, eq=False)
class Opening:
    """An open or a fork on its way: how the sessions that it brings are to be."""

    ask: Ask
    parent: Book | None
    window: int
    form: str
    outputs: tuple[str, ...]


class Line:
    """See the module. `run` keeps it up; whoever asks waits in `settled`."""

    def __init__(
        self, address: Address, patience: Patience, timeout_s: float, clock: Clock, chance: Callable[[], float]
    ) -> None:
        self.counts = Counts()
        self._address = address
        self._patience = patience
        self._timeout_s = timeout_s
        self._clock = clock
        self._chance = chance
        self._facts: Facts | None = None
        self._socket: ClientConnection | None = None
        self._books: dict[str, Book] = {}
        self._openings: dict[str, Opening] = {}
        self._outbox: list[Opening] = []
        self._talkative: dict[Book, None] = {}
        """Books that may have something to say."""
        self._to_send = asyncio.Event()
        self._attached = asyncio.Event()
        """Set while every session is attached, and when that will not be any more."""
        self._parted = asyncio.Event()
        """Set when a session is over, or the socket."""
        self._error: WorldError | None = None
        self._ids = itertools.count(1)
        self._away: _Away | None = None

    @property
    def facts(self) -> Facts:
        """Of the world that a session gets which names none."""
        assert self._facts is not None
        return self._facts

    @property
    def is_up(self) -> bool:
        return self._socket is not None

    def next_id(self) -> str:
        return f"r{next(self._ids)}"

    def check(self) -> None:
        """Raises what ended the line."""
        if self._error is not None:
            raise self._error

    # -- what is asked -------------------------------------------------------------------------------------------

    def open(self, opening: Opening) -> None:
        """Ask for sessions: a fork of its parent's book, else an open. Raises WorldError."""
        self.check()
        if opening.parent is not None:
            opening.parent.put(opening.ask)
            self.wake(opening.parent)
        else:
            self._outbox.append(opening)
            self._to_send.set()
        self._openings[opening.ask.request_id] = opening

    def put(self, book: Book, ask: Ask) -> None:
        """Ask it of a session. Raises WorldError."""
        self.check()
        book.put(ask)
        self.wake(book)

    def wake(self, book: Book) -> None:
        """The book may have something to say."""
        self._talkative[book] = None
        self._to_send.set()

    async def settled(self, ask: Ask, book: Book | None = None) -> None:
        """Until it is over. Raises what it ended with; whoever waits no longer has it cancelled."""
        try:
            while not ask.is_over:
                await self.news(ask)
        except (asyncio.CancelledError, TimedOut):
            self.give_up(ask, book)
            raise
        if ask.error is not None:
            raise ask.error

    async def news(self, ask: Ask) -> None:
        """Until something came of it. Raises TimedOut."""
        ask.news.clear()
        await self._until(ask.news)

    async def clear(self, book: Book) -> None:
        """Until all that was cancelled is gone. Raises TimedOut."""
        while (ask := book.cancelled()) is not None:
            await self._until(ask.gone)

    async def _until(self, event: asyncio.Event) -> None:
        """Raises TimedOut; while there is no socket, the line's own patience counts."""
        while not event.is_set():
            try:
                async with asyncio.timeout(self._timeout_s):
                    await event.wait()
            except TimeoutError:
                if self.is_up:
                    raise TimedOut("timeout", f"nothing came within {self._timeout_s:g} s") from None

    def give_up(self, ask: Ask, book: Book | None) -> None:
        """Nobody waits for it any more. What an open or a fork still brings is closed."""
        if not ask.is_sent:
            self._openings.pop(ask.request_id, None)
            self._outbox = [opening for opening in self._outbox if opening.ask is not ask]
        if book is not None:
            book.give_up(ask)
            self.wake(book)
        ask.is_cancelled = True
        ask.end()
        self._discard(ask.opened)

    def _discard(self, books: list[Book]) -> None:
        """Close sessions that nobody will use."""
        for book in books:
            if book.error is None:
                book.put(Ask(f"close-{book.session_id}", write("session.close", book.session_id)))
                self.wake(book)

    # -- one socket ----------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Connect. Raises ConnectFailed."""
        try:
            await self._greeted(await self._address.dial(self._patience.open_s))
        except InvalidStatus as error:
            raise _turned_away(error) from error
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI, ConnectionClosed) as error:
            raise ConnectFailed("connect_failed", f"no world at {self._address.url}: {error}") from error

    async def _greeted(self, socket: ClientConnection) -> None:
        """Hear what the server begins with. Raises ConnectFailed, ConnectionClosed, TimeoutError."""
        try:
            async with asyncio.timeout(FIRST_FRAME_S):
                self._facts = read_greeting(await socket.recv())
            self._socket = socket
            if self._away is None:
                self._attached.set()
        except Faulty as error:
            raise ConnectFailed(error.fault.code, str(error)) from error
        finally:
            if self._socket is not socket:
                socket.transport.abort()

    async def run(self) -> None:
        """Keeps the line up until it can't be any more, or is closed; what goes wrong, asking raises."""
        try:
            while self._error is None:
                why = await self._serve()
                if self._error is None:
                    await self._come_back(why)
        except WorldError as error:
            self._end(error)

    async def _serve(self) -> str:
        """Use one socket until it is gone; why it is."""
        socket = self._socket
        assert socket is not None
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(socket))
                try:
                    return await self._read(socket)
                finally:
                    writer.cancel()
        finally:
            self._socket = None
            self._attached.clear()
            self._parted.set()
            socket.transport.abort()

    async def _read(self, socket: ClientConnection) -> str:
        try:
            while True:
                told = read(await socket.recv(), self._contract_of)
                if self._error is None:
                    self._heard(told)
        except ConnectionClosed as error:
            return str(error)
        except Faulty as error:  # it would say the same again
            self._end(ConnectionLost("bad_reply", str(error)))
            return str(error)

    async def _write(self, socket: ClientConnection) -> None:
        try:
            while True:
                message = self._next()
                if message is None:
                    self._to_send.clear()
                    await self._to_send.wait()
                else:
                    await socket.send(frame(message))
        except ConnectionClosed:
            return  # the reader hears of it, too

    def _next(self) -> Message | None:
        while self._talkative:
            book = next(iter(self._talkative))
            message = book.next()
            if message is not None:
                return message
            del self._talkative[book]
        if self._outbox and self._away is None:
            ask = self._outbox.pop(0).ask
            ask.is_sent = True
            return ask.message
        return None

    def _contract_of(self, session_id: str) -> WorldContract:
        book = self._books.get(session_id)
        return (self.facts if book is None else book.facts).contract

    # -- what is heard -------------------------------------------------------------------------------------------

    def _heard(self, told: Told) -> None:
        if isinstance(told, Opened):
            self._opened(told)
            return
        book = self._books.get(told.session_id)
        if isinstance(told, Refusal):
            self._refused(told, book)
        elif book is not None:
            self._heard_of(book, told)
            self.wake(book)

    def _heard_of(self, book: Book, told: Resumed | Shown | Snapshotted | Done | Missed | Over | Beat | Other) -> None:
        match told:
            case Resumed(_, token, step):
                book.resumed(token, step)
                self._is_back(book)
            case Shown():
                book.numbered(told.seq)
                book.shown(told)
            case Snapshotted():
                book.numbered(told.seq)
                book.snapshotted(told)
            case Done():
                book.numbered(told.seq)
                book.done(told)
                self._openings.pop(told.request_id, None)
            case Missed():
                book.numbered(told.seq)
                book.missed()
            case Over(_, reason):
                self._over(book, SessionLost(reason, "the session is over"))
            case Beat():
                self.counts.asked_again += book.beaten(told.request_id)
            case Other():
                book.numbered(told.seq)

    def _opened(self, told: Opened) -> None:
        opening = self._openings.get(told.request_id)
        if opening is None:
            return  # no request of ours
        book = Book(told, opening.window, opening.form, opening.outputs)
        self._books[told.session_id] = book
        ask = opening.ask
        ask.is_heard = True
        ask.opened.append(book)
        if opening.parent is None:
            book.asks[ask.request_id] = ask  # the reset that follows ends it
            ask.repeats = True  # it has arrived
        elif len(ask.opened) == ask.forks:
            del self._openings[told.request_id]
            opening.parent.brought(ask)
        ask.news.set()
        if ask.is_cancelled:
            self._discard([book])

    def _refused(self, told: Refusal, book: Book | None) -> None:
        error = Refused(told.code, told.message, told.retry_after_s)
        resuming = self._books.get(told.request_id.removeprefix(RESUME))
        if resuming is not None:
            self._over(resuming, SessionLost(told.code, told.message))
            return
        if book is not None:
            book.numbered(told.seq)
        opening = self._openings.pop(told.request_id, None)
        if opening is not None:
            opening.ask.end(error)
            self._discard(opening.ask.opened)  # a fork is made whole, or not at all
            book = opening.parent or book
        if book is None:
            asked = told.request_id.removeprefix(CANCEL)
            book = next((each for each in self._books.values() if asked in each.asks), None)
        if book is None:
            return
        if told.code == "session_not_found":
            self._over(book, SessionLost(told.code, told.message))
        book.refused(told.request_id, error)
        self.wake(book)

    def _over(self, book: Book, error: WorldError) -> None:
        if self._books.pop(book.session_id, None) is not None:
            for request_id in book.asks:
                self._openings.pop(request_id, None)
            book.over(error)
            self._is_back(book)
            self._parted.set()

    # -- coming back ---------------------------------------------------------------------------------------------

    async def _come_back(self, why: str) -> None:
        """A new socket. Raises ConnectionLost where there is none in time, ConnectFailed."""
        self.counts.drops += 1
        log.info("event=world_dropped sessions=%d reason=%s", len(self._books), why)
        self._dropped()
        away = self._away
        if away is None:
            deadline_ns = self._clock.now_ns() + round(self._patience.grace_s * S)
            away = self._away = _Away(deadline_ns, waits(self._patience, self._chance), set())
        for wait_s in away.waits:
            await self._clock.sleep_until_ns(min(away.deadline_ns, self._clock.now_ns() + round(wait_s * S)))
            left_s = (away.deadline_ns - self._clock.now_ns()) / S
            if left_s <= 0:
                raise ConnectionLost("connection_lost", f"no way back within {self._patience.grace_s:g} s ({why})")
            if await self._has_dialled(min(left_s, self._patience.open_s)):
                break
        away.missing = set(self._books)
        socket = self._socket
        assert socket is not None
        self._is_back(None)
        try:
            for book in tuple(self._books.values()):
                await socket.send(frame(book.resume()))
        except ConnectionClosed:
            return  # the reader hears of it, too

    def _dropped(self) -> None:
        for book in self._books.values():
            book.dropped()
        for request_id, opening in tuple(self._openings.items()):
            ask = opening.ask
            if ask.is_sent and not ask.repeats:
                del self._openings[request_id]
                ask.end(Unrepeatable("connection_lost", "it may have been done, or not"))
                self._discard(ask.opened)

    async def _has_dialled(self, within_s: float) -> bool:
        """One attempt; False where another one may help. Raises ConnectFailed."""
        try:
            await self._greeted(await self._address.dial(within_s))
        except InvalidStatus as error:
            if error.response.status_code in TRY_AGAIN_STATUS:
                return False
            raise _turned_away(error) from error
        except (OSError, TimeoutError, InvalidHandshake, ConnectionClosed):
            return False
        return True

    def _is_back(self, book: Book | None) -> None:
        """The session is, or is no more: when all are, the line is back."""
        away = self._away
        if away is None or self._socket is None:
            return
        if book is not None:
            away.missing.discard(book.session_id)
        if not away.missing:
            self._away = None
            self.counts.resumes += 1
            self._to_send.set()
            self._attached.set()

    # -- the end -------------------------------------------------------------------------------------------------

    def _end(self, error: WorldError) -> None:
        self._error = self._error or error
        for book in self._books.values():
            book.over(error)
        for opening in self._openings.values():
            opening.ask.end(error)
        self._books.clear()
        self._openings.clear()
        self._outbox.clear()
        self._attached.set()
        self._parted.set()

    async def close(self) -> None:
        """Close the sessions and the socket.

        A line that is down is waited for a moment; sessions that it did not bring back stay for their grace.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WITHIN_S):
                while self._books:
                    await self._take_leave()
        socket = self._socket
        self._end(ConnectionLost("closed", "the link was left"))
        if socket is not None:
            await socket.close()

    async def _take_leave(self) -> None:
        """Until the server has closed every session, or the line is lost."""
        await self._attached.wait()
        socket = self._socket
        try:
            for session_id in tuple(self._books):
                if socket is not None:
                    await socket.send(frame(write("session.close", session_id)))
        except ConnectionClosed:
            if self._socket is socket:
                self._attached.clear()  # the reader hears of it, too
            return
        while self._books and self._socket is socket:
            self._parted.clear()
            await self._parted.wait()

    def drop_transport(self) -> None:
        """Lose the socket without a word, as a network does. For tests and demonstrations."""
        if self._socket is not None:
            self._socket.transport.abort()


@dataclass(slots=True)
class _Away:
    """Since the socket was lost, until every session is back."""

    deadline_ns: int
    waits: Iterator[float]
    missing: set[str]


def _turned_away(error: InvalidStatus) -> ConnectFailed:
    status = error.response.status_code
    return ConnectFailed(_STATUS.get(status, "http_status"), f"the server answers with HTTP status {status}")
