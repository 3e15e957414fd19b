from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from omni_live.connectors.contract import Key, Ticket
from omni_live.connectors.shm import Arena, Reader, segment_path
from omni_live.engines.contract import EngineOptions, Host, Load, Turn, TurnError
from omni_live.engines.fake import FakeEcho, FakeFailure
from omni_live.runtime import runner
from omni_live.runtime.fences import FenceTable
from omni_live.runtime.layout import feeder_name, owner_name, producer_name
from omni_live.runtime.outbox import CONTROL, MEDIA, Outbox
from omni_live.runtime.ports import CLIENT, Opening, Route, WorkerId
from omni_live.runtime.runner import NS_PER_S, Runner, RunnerLimits
from omni_live.runtime.wire import (
    SERVER,
    Abort,
    Call,
    Chunk,
    CloseSession,
    Counted,
    Credit,
    Drain,
    End,
    Ended,
    FeedSession,
    FeedTurn,
    Fork,
    Forward,
    Found,
    Free,
    Freed,
    Inline,
    Message,
    OpenSession,
    OpenTurn,
    Ping,
    Pong,
    Report,
    Restore,
    Snapshot,
    Snapshotted,
    Spoke,
    freed,
    inline,
)
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import Fence, SessionKey, Stamp, session_key

HERE, UP, DOWN = 5, 4, 6
"""Our worker, one that produces for it, one that it produces for."""
FENCE = Fence(0, 1)
STAMP = FENCE.stamp(1)
SESSION = STAMP.session
TO_CLIENT = Route(CLIENT, WorkerId(SERVER), 4)
TO_DOWN = Route("c", WorkerId(DOWN), 4)
OPENS_DOWN = TO_DOWN._replace(opens=Opening(7, 2, (TO_CLIENT,)))
OPENED_DOWN = OpenTurn(7, "c", STAMP._replace(stage=2), {}, (TO_CLIENT,), 1)
BIG = b"b" * 10_000


class Scripted:
    """A fake engine whose every step is the test's: it keeps its turns, and does what `do` says."""

    inline = True

    def __init__(self, do: Callable[[Turn], bool] | None = None) -> None:
        self.turns: list[Turn] = []
        self.dropped: list[Turn] = []
        self.closed: list[SessionKey] = []
        self.steps = 0
        self.do = do
        self.host: Host | None = None

    def load(self, host: Host) -> None:
        self.host = host

    def open(self, session: SessionKey, params: Mapping[str, Scalar]) -> None:
        pass

    def close(self, session: SessionKey) -> None:
        self.closed.append(session)

    def begin(self, turn: Turn) -> None:
        self.turns.append(turn)

    def drop(self, turn: Turn) -> None:
        self.dropped.append(turn)
        self.turns.remove(turn)

    def listen(self, session: SessionKey, payload: Payload) -> None:
        pass

    def step(self) -> bool:
        self.steps += 1
        if self.do is None:
            return False
        more = [self.do(turn) for turn in list(self.turns)]  # all of them, also after one that has more to do
        return any(more)

    def fork(self, session: SessionKey, into: SessionKey) -> None:
        pass

    def snapshot(self, session: SessionKey) -> Payload:
        return Payload("none")

    def restore(self, session: SessionKey, payload: Payload) -> None:
        pass

    def load_now(self) -> Load:
        return Load(0, len(self.turns), 0, 0, 0)

    def shut(self) -> None:
        pass


class Stand:
    """A runner on a bench, with what surrounds it in a worker."""

    def __init__(
        self, path: Path, engines: Mapping[str, FakeEcho | Scripted], limits: RunnerLimits, arena: int
    ) -> None:
        self.path = path
        self.now = NS_PER_S
        self.fences = FenceTable.create(path / "fences", 16)
        self.outbox = Outbox(path, HERE, arena, free_wait_ns=0)
        self.runner = Runner(
            HERE, engines, self.fences, self.outbox, wake=lambda: None, limits=limits, now=lambda: self.now
        )
        self.runner.load()
        self.order = 0
        self._counted: Counter[str] = Counter()
        self.fences.write(FENCE)

    def call(self, kind: Callable[..., Call], stage: str, *arguments: object) -> None:
        self.runner.receive(SERVER, kind(self.order, stage, *arguments))
        self.order += 1

    def open(self, stage: str, *routes: Route, stamp: Stamp = STAMP, inputs: int = 1) -> None:
        """A session and a turn of it."""
        self.call(OpenSession, stage, stamp.session, {})
        self.call(OpenTurn, stage, stamp, {}, list(routes), inputs)

    def feed(self, stage: str, body: bytes = b"x", last: bool = False, kind: str = "x", stamp: Stamp = STAMP) -> None:
        self.call(FeedTurn, stage, stamp, Inline(kind, {}, body, ()), last)

    def chunk(self, receiver: str, body: bytes = b"x", stamp: Stamp = STAMP, **fields: object) -> None:
        self.runner.receive(UP, Chunk("a", receiver, stamp, Inline("x", {}, body, ()), **fields))  # type: ignore[arg-type]

    def opened_by_up(self, *routes: Route, after: int = 0, stamp: Stamp = STAMP, first: Chunk | None = None) -> None:
        self.runner.receive(UP, OpenTurn(after, "b", stamp, {}, routes, 1, first))

    def run(self) -> list[tuple[int, Message]]:
        """Step until nothing is left to do; what was said, without reports."""
        while self.runner.step():
            pass
        self.runner.settle()
        said: list[tuple[int, Message]] = []
        for to, message in self.outbox.take():
            if isinstance(message, Counted):
                self._counted.update(message.amounts)
            elif not isinstance(message, Report):
                said.append((to, message))
        return said

    def messages(self) -> list[Message]:
        return [message for _, message in self.run()]

    @property
    def counts(self) -> Counter[str]:
        """All that was counted, reported or not yet."""
        return self._counted + self.outbox.counts


StandMaker = Callable[..., Stand]


@pytest.fixture
def stand(tmp_path: Path) -> StandMaker:
    def make(*, limits: RunnerLimits | None = None, arena: int = 1 << 20, **engines: FakeEcho | Scripted) -> Stand:
        return Stand(tmp_path, engines or {"b": echo()}, limits or RunnerLimits(), arena)

    return make


def echo(**options: Scalar) -> FakeEcho:
    return FakeEcho(EngineOptions(options))


def bodies(messages: list[Message]) -> list[bytes]:
    return [m.body.body for m in messages if isinstance(m, Spoke | Chunk) and isinstance(m.body, Inline)]


# -- the way of a turn


def test_what_comes_in_goes_out_and_the_last_chunk_says_that_it_is_the_last(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_CLIENT)
    on.feed("b", b"one")
    on.feed("b", b"two", last=True)
    said = on.run()
    assert [to for to, _ in said] == [MEDIA, MEDIA]
    assert bodies([message for _, message in said]) == [b"one", b"two"]
    first, last = (message for _, message in said)
    assert isinstance(first, Spoke)
    assert isinstance(last, Spoke)
    assert (first.outcome, last.outcome) == (None, Outcome.DONE)
    assert (first.stamp.seq, last.stamp.seq) == (0, 1)


def test_an_end_that_comes_after_the_last_chunk_has_left_is_a_message_of_its_own(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_CLIENT)
    on.feed("b", b"one")
    on.run()
    on.call(FeedTurn, "b", STAMP, Inline("x", {}, b"two", ()), True)
    assert [type(message) for message in on.messages()] == [Spoke]
    second, third = FENCE.stamp(2), FENCE.stamp(3)
    on.open("b", TO_DOWN, stamp=second, inputs=0)
    on.open("b", TO_CLIENT, stamp=third, inputs=0)
    assert on.run() == [
        (DOWN, Chunk("b", "c", second, None, False, True, Outcome.DONE, "", (End(HERE, "b", Outcome.DONE, ""),))),
        (MEDIA, Ended("b", third, Outcome.DONE, "")),
    ]


def test_chunks_for_another_worker_go_there(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_DOWN)
    on.feed("b", b"one", last=True)
    ((to, chunk),) = on.run()
    assert to == DOWN
    assert isinstance(chunk, Chunk)
    assert (chunk.sender, chunk.receiver, chunk.last, chunk.outcome) == ("b", "c", True, Outcome.DONE)


def test_output_with_two_receivers_goes_to_both(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_DOWN, TO_CLIENT)
    on.feed("b", b"one", last=True)
    assert [(to, type(message)) for to, message in on.run()] == [(DOWN, Chunk), (MEDIA, Spoke)]


def test_a_turn_with_two_producers_ends_when_both_have_said_last(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_CLIENT, inputs=2)
    on.feed("b", b"client", last=True)
    assert bodies(on.messages()) == [b"client"]
    on.chunk("b", b"peer", last=True)
    last = on.messages()[-1]
    assert isinstance(last, Spoke)
    assert last.outcome is Outcome.DONE


def test_fused_stages_hand_payloads_on_by_reference(stand: StandMaker) -> None:
    payload = Payload("x", {}, bytearray(BIG))
    taken: list[Payload | None] = []

    def make(turn: Turn) -> bool:
        turn.emit(payload)
        turn.finish()
        engine.turns.remove(turn)
        return False

    def take(turn: Turn) -> bool:
        if turn.waiting():
            taken.append(turn.take())
        return False

    engine, receiver = Scripted(make), Scripted(take)
    on = stand(b=engine, c=receiver)
    on.open("c", TO_CLIENT)
    on.open("b", Route("c", HERE, 4, False), inputs=0)
    on.run()
    assert taken[0] is payload
    assert receiver.turns[0].exhausted()


def test_what_a_fused_stage_hands_on_outlives_the_shared_memory_it_came_in(stand: StandMaker) -> None:
    on = stand(b=echo(), c=Scripted(lambda turn: False))
    arena = Arena(segment_path(on.path, feeder_name(HERE), 0), 0, 1 << 20)
    on.open("c", TO_CLIENT)
    on.open("b", Route("c", HERE, 4, False))
    ticket = arena.put(Key(SESSION, 1, HERE), Payload("x", {}, BIG))
    on.call(FeedTurn, "b", STAMP, ticket, True)
    assert on.run()[-1] == (CONTROL, Free([freed(ticket)]))
    arena.release(ticket)
    arena.put(Key(SESSION, 1, HERE), Payload("x", {}, b"other" * 2000))
    turn = on.runner._seats["c"].turns[STAMP[:4]]
    got = turn.take()
    assert got is not None
    assert got.body == BIG


def test_incomplete_input_makes_the_output_incomplete_for_the_same_reason(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_DOWN)
    on.chunk("b", last=True, outcome=Outcome.INCOMPLETE, reason="max_output_tokens")
    (chunk,) = on.messages()
    assert isinstance(chunk, Chunk)
    assert (chunk.last, chunk.outcome, chunk.reason) == (True, Outcome.INCOMPLETE, "max_output_tokens")
    assert chunk.through == (End(HERE, "b", Outcome.INCOMPLETE, "max_output_tokens"),)


A_ENDED = End(UP, "a", Outcome.DONE, "")
B_ENDED = End(HERE, "b", Outcome.DONE, "")


def test_the_end_of_a_stage_travels_with_its_last_chunk_to_the_stage_that_reports(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_DOWN)
    on.chunk("b", last=True, through=(A_ENDED,))
    (chunk,) = on.messages()
    assert isinstance(chunk, Chunk)
    assert chunk.through == (A_ENDED, B_ENDED)
    on.open("b", TO_CLIENT, stamp=FENCE.stamp(2))
    on.chunk("b", last=True, through=(A_ENDED,), stamp=FENCE.stamp(2))
    (spoke,) = on.messages()
    assert isinstance(spoke, Spoke)
    assert (spoke.outcome, spoke.through) == (Outcome.DONE, (A_ENDED,))


def test_fused_stages_report_together(stand: StandMaker) -> None:
    on = stand(b=echo(), c=echo())
    on.open("c", TO_CLIENT)
    on.open("b", Route("c", HERE, 4, False))
    on.feed("b", last=True)
    said = on.messages()
    assert [message.through for message in said if isinstance(message, Spoke | Ended)][-1] == (B_ENDED,)


def test_an_end_that_was_handed_on_is_reported_when_the_turn_is_aborted(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_DOWN)
    on.chunk("b", last=True)
    on.run()
    on.runner.receive(SERVER, Abort("b", STAMP))
    assert on.run() == [(CONTROL, Ended("b", STAMP, Outcome.INCOMPLETE, "aborted"))]


def test_an_abort_is_answered_however_long_the_turn_is_over(stand: StandMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_REMEMBERED", 2)
    on = stand()
    for number in range(1, 10):
        on.open("b", TO_DOWN, stamp=FENCE.stamp(number), inputs=0)
    on.run()
    on.runner.receive(SERVER, Abort("b", STAMP))
    assert on.run() == [(CONTROL, Ended("b", STAMP, Outcome.INCOMPLETE, "aborted"))]


def test_the_latest_turns_are_remembered_and_no_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_REMEMBERED", 3)
    memory = runner.Memory()
    keys = [(0, 1, 1, number) for number in range(20)]
    for number, key in enumerate(keys):
        memory.add(key)
        assert all(late in memory for late in keys[max(0, number - 2) : number + 1])
        assert sum(late in memory for late in keys) <= 6


def test_a_stage_that_ends_badly_reports_the_ends_that_came_to_it(stand: StandMaker) -> None:
    on = stand(b=Scripted())
    on.open("b", TO_DOWN)
    on.chunk("b", last=True, through=(A_ENDED,))
    on.run()
    on.runner.receive(SERVER, Abort("b", STAMP))
    assert Ended("b", STAMP, Outcome.INCOMPLETE, "aborted", (A_ENDED,)) in on.messages()


def test_an_engine_may_end_before_its_input_does(stand: StandMaker) -> None:
    on = stand(b=echo(ends_early=1))
    on.open("b", TO_CLIENT)
    on.chunk("b", b"one")
    on.chunk("b", b"two")
    said = on.run()
    assert bodies([message for _, message in said]) == [b"one"]
    on.chunk("b", b"three")
    assert on.run() == [(UP, Credit("a", "b", STAMP, 1))]
    assert on.counts["late_chunks"] == 1


# -- lending


class Lender(Stand):
    """Gets a large payload, which `b` hands on as it is."""

    def get(self, *routes: Route, source: int = UP, owner: int = 0) -> tuple[Freed, list[Ticket]]:
        """What we are to give back for it, and the tickets that `b` sends on."""
        name = owner_name(owner or (-HERE if source == SERVER else source))
        arena = Arena(segment_path(self.path, name, 0), 0, 1 << 20)
        put = arena.put(Key(SESSION, 1, HERE), Payload("x", {}, BIG))
        ticket = Ticket(put.segment, put.offset, put.nbytes, put.generation, put.kind, put.meta, put.arrays, owner)
        self.open("b", *routes)
        self.runner.receive(source, Chunk("a", "b", STAMP, ticket, last=True))
        said = self.messages()
        assert not [message for message in said if isinstance(message, Free)]
        return freed(ticket), [m.body for m in said if isinstance(m, Chunk | Spoke) and isinstance(m.body, Ticket)]

    def give_back(self, holder: int, ticket: Ticket) -> list[tuple[int, Message]]:
        self.runner.receive(holder, Free([freed(ticket)]))
        return self.run()


@pytest.fixture
def lender(tmp_path: Path) -> Lender:
    return Lender(tmp_path, {"b": echo()}, RunnerLimits(), 1 << 20)


@pytest.mark.parametrize(
    ("source", "owner", "lent_as"), [(UP, 0, UP), (SERVER, 0, -HERE), (UP, 42, 42), (UP, -42, -42)]
)
def test_what_is_handed_on_untouched_is_lent_where_it_lies(
    lender: Lender, source: int, owner: int, lent_as: int
) -> None:
    ours, (ticket,) = lender.get(TO_DOWN, source=source, owner=owner)
    assert freed(ticket) == Freed(ours.segment, ours.offset, ours.generation, lent_as)
    assert lender.outbox.stats() == {}
    assert lender.outbox.tickets == 1
    assert lender.give_back(DOWN, ticket) == [(CONTROL if source == SERVER else source, Free([ours]))]
    assert lender.outbox.tickets == 0


def test_what_was_lent_goes_back_when_everybody_is_done_with_it(lender: Lender) -> None:
    ours, (to_c, to_client) = lender.get(TO_DOWN, TO_CLIENT)
    assert lender.give_back(SERVER, to_client) == []
    assert lender.give_back(DOWN, to_c) == [(UP, Free([ours]))]


def test_the_same_worker_gets_one_loan_and_then_a_copy(lender: Lender) -> None:
    _, (lent, copied) = lender.get(TO_DOWN, TO_DOWN._replace(receiver="d"))
    assert (lent.owner, copied.owner) == (UP, 0)


def test_only_who_borrowed_gives_back_and_only_once(lender: Lender) -> None:
    _, (ticket,) = lender.get(TO_DOWN)
    assert lender.give_back(DOWN + 1, ticket) == []
    assert len(lender.give_back(DOWN, ticket)) == 1
    assert lender.give_back(DOWN, ticket) == []
    assert lender.counts["tickets_invalid"] == 2


def test_what_a_borrower_died_with_goes_back_as_spoilt_when_the_others_are_done_with_it(lender: Lender) -> None:
    ours, (_, to_client) = lender.get(TO_DOWN, TO_CLIENT)
    lender.runner.lost_receiver(DOWN)
    assert lender.run() == []
    assert lender.give_back(SERVER, to_client) == [(UP, Free([ours._replace(spoilt=True)]))]
    assert lender.outbox.tickets == 0


def test_that_something_is_spoilt_is_passed_on_to_its_owner(lender: Lender) -> None:
    ours, (ticket,) = lender.get(TO_DOWN)
    lender.runner.receive(DOWN, Free([freed(ticket)._replace(spoilt=True)]))
    assert lender.run() == [(UP, Free([ours._replace(spoilt=True)]))]


def test_what_came_back_spoilt_is_never_written_again(stand: StandMaker) -> None:
    on = stand()
    segments = []
    for turn in (1, 2):
        on.open("b", TO_DOWN, stamp=FENCE.stamp(turn))
        on.feed("b", BIG, last=True, stamp=FENCE.stamp(turn))
        (ticket,) = [m.body for m in on.messages() if isinstance(m, Chunk)]
        assert isinstance(ticket, Ticket)
        on.runner.receive(DOWN, Free([freed(ticket)._replace(spoilt=True)]))
        segments.append(ticket.segment)
    assert segments == [0, 1]
    assert not list(on.path.glob(f"{producer_name(HERE)}.*"))


def test_what_a_dead_holder_may_have_lent_on_is_never_written_again(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_DOWN)
    on.feed("b", BIG, last=True)
    (first,) = [m.body for m in on.messages() if isinstance(m, Chunk)]
    assert isinstance(first, Ticket)
    body = Reader(on.path, producer_name(HERE)).get(first).body
    on.runner.lost_receiver(DOWN)
    on.open("b", TO_DOWN._replace(worker=WorkerId(9)), stamp=FENCE.stamp(2))
    on.feed("b", b"o" * len(BIG), last=True, stamp=FENCE.stamp(2))
    (second,) = [m.body for m in on.messages() if isinstance(m, Chunk)]
    assert isinstance(second, Ticket)
    assert second.segment != first.segment
    assert body == BIG


# -- order


def test_calls_are_performed_in_order_whichever_lane_is_faster(stand: StandMaker) -> None:
    on = stand()
    late = [
        OpenSession(0, "b", SESSION, {}),
        OpenTurn(1, "b", STAMP, {}, [TO_CLIENT], 1),
    ]
    on.runner.receive(SERVER, FeedTurn(2, "b", STAMP, Inline("x", {}, b"one", ()), False))
    on.runner.receive(SERVER, FeedTurn(3, "b", STAMP, Inline("x", {}, b"two", ()), True))
    assert on.run() == []
    for message in late:
        on.runner.receive(SERVER, message)
    assert bodies(on.messages()) == [b"one", b"two"]


def test_an_abort_overtakes_the_opening_of_its_turn(stand: StandMaker) -> None:
    on = stand()
    on.runner.receive(SERVER, OpenTurn(1, "b", STAMP, {}, [TO_DOWN], 1))
    on.runner.receive(SERVER, Abort("b", STAMP))
    on.runner.receive(SERVER, OpenSession(0, "b", SESSION, {}))
    assert on.run() == [(CONTROL, Ended("b", STAMP, Outcome.INCOMPLETE, "aborted"))]


def test_chunks_that_come_before_their_turn_opens_wait_for_it(stand: StandMaker) -> None:
    on = stand()
    on.chunk("b", b"early")
    assert on.run() == []
    on.open("b", TO_CLIENT)
    assert bodies(on.messages()) == [b"early"]


def test_early_chunks_are_bounded_in_bytes(stand: StandMaker) -> None:
    on = stand(limits=RunnerLimits(early_bytes=150))
    on.chunk("b", bytes(100))
    on.chunk("b", bytes(100))
    assert on.run() == [(UP, Credit("a", "b", STAMP, 1))]
    assert on.counts["early_chunks_refused"] == 1
    assert on.counts["early_chunks_refused"] == 1
    on.open("b", TO_CLIENT)  # which now misses a chunk
    assert Ended("b", STAMP, Outcome.FAILED, "input_lost") in on.messages()


def test_early_chunks_of_a_turn_that_never_opens_are_dropped_in_time(stand: StandMaker) -> None:
    on = stand(limits=RunnerLimits(early_s=2.0))
    on.chunk("b")
    on.run()
    assert on.runner.settle() is not None
    on.now += 2 * NS_PER_S
    assert on.run() == [(UP, Credit("a", "b", STAMP, 1))]
    assert on.runner._early_bytes == 0
    on.open("b", TO_CLIENT)
    assert on.messages() == [Ended("b", STAMP, Outcome.FAILED, "input_lost")]


def test_early_chunks_go_with_their_epoch(stand: StandMaker) -> None:
    on = stand()
    on.chunk("b")
    on.run()
    on.fences.write(FENCE.raised())
    assert on.run() == [(UP, Credit("a", "b", STAMP, 1))]
    assert on.counts["early_chunks_dropped"] == 1


# -- openings by producers


def test_a_receiver_is_opened_before_the_engine_has_made_anything(stand: StandMaker) -> None:
    on = stand(b=Scripted())
    on.open("b", OPENS_DOWN)
    assert on.run() == [(DOWN, OPENED_DOWN)]
    assert OPENED_DOWN.first is None


def test_what_is_made_at_once_goes_along_with_the_opening_and_the_rest_follows(stand: StandMaker) -> None:
    on = stand()
    on.call(OpenSession, "b", SESSION, {})
    on.call(OpenTurn, "b", STAMP, {"seed": 3}, (OPENS_DOWN,), 1, Chunk(CLIENT, "b", STAMP, Inline("x", {}, b"1", ())))
    on.feed("b", b"2", last=True)
    [(to, opening), (_, chunk)] = on.run()
    assert to == DOWN
    assert isinstance(opening, OpenTurn)
    assert opening.first is not None
    assert (opening.params, opening.first.last) == ({"seed": 3}, False)
    assert bodies([opening.first, chunk]) == [b"1", b"2"]
    assert isinstance(chunk, Chunk)
    assert chunk.last


def test_all_of_a_turn_may_go_along_with_its_opening(stand: StandMaker) -> None:
    on = stand()
    on.call(OpenSession, "b", SESSION, {})
    on.call(OpenTurn, "b", STAMP, {}, (OPENS_DOWN,), 1, Chunk(CLIENT, "b", STAMP, Inline("x", {}, b"1", ()), last=True))
    [(_, opening)] = on.run()
    assert isinstance(opening, OpenTurn)
    assert opening.first is not None
    assert opening.first.last
    assert opening.first.through == (End(HERE, "b", Outcome.DONE, ""),)


def test_a_producer_opens_a_turn_with_its_first_chunk(stand: StandMaker) -> None:
    on = stand()
    on.call(OpenSession, "b", SESSION, {})
    on.opened_by_up(TO_CLIENT, first=Chunk("a", "b", STAMP, Inline("x", {}, b"one", ()), last=True))
    assert bodies(on.messages()) == [b"one"]


def test_an_opening_by_a_producer_stays_behind_the_calls_that_go_before_it(stand: StandMaker) -> None:
    engine = Scripted()
    on = stand(b=engine)
    on.opened_by_up(TO_CLIENT, after=2)
    on.chunk("b", b"one")
    on.call(OpenSession, "b", SESSION, {})
    assert on.run() == []
    assert engine.turns == []
    on.call(FeedSession, "b", SESSION, Inline("context", {}, b"", ()))
    on.run()
    assert [turn.waiting() for turn in engine.turns] == [1]


def test_fused_receivers_are_opened_first(stand: StandMaker) -> None:
    begun: list[str] = []

    class Told(Scripted):
        def begin(self, turn: Turn) -> None:
            begun.append("c" if turn.stamp.stage else "b")

    on = stand(b=Told(), c=Told())
    on.call(OpenSession, "c", SESSION, {})
    on.open("b", OPENS_DOWN._replace(worker=WorkerId(HERE)))
    assert on.run() == []
    assert begun == ["c", "b"]


def test_an_abort_ends_a_turn_that_no_producer_has_opened_yet_and_it_never_begins(stand: StandMaker) -> None:
    engine = Scripted()
    on = stand(b=engine)
    on.call(OpenSession, "b", SESSION, {})
    on.chunk("b", b"early")
    on.runner.receive(SERVER, Abort("b", STAMP))
    assert on.run() == [
        (UP, Credit("a", "b", STAMP, 1)),
        (CONTROL, Ended("b", STAMP, Outcome.INCOMPLETE, "aborted")),
    ]
    on.opened_by_up(OPENS_DOWN, first=Chunk("a", "b", STAMP, Ticket(0, 0, 5000, 1, "x", {}, ())))
    assert on.run() == [(UP, Credit("a", "b", STAMP, 1)), (UP, Free([Freed(0, 0, 1)]))]
    assert engine.turns == []


def test_a_turn_that_is_refused_opens_nothing_further(stand: StandMaker) -> None:
    on = stand()
    on.opened_by_up(OPENS_DOWN)
    assert on.run() == [(CONTROL, Ended("b", STAMP, Outcome.FAILED, "session_unknown"))]


def test_a_producer_that_is_lost_fails_the_turns_that_it_opened(stand: StandMaker) -> None:
    on = stand(b=Scripted())
    other = Fence(4, 1)
    on.fences.write(other)
    on.call(OpenSession, "b", SESSION, {})
    on.opened_by_up(TO_CLIENT)
    on.opened_by_up(TO_CLIENT, after=9, stamp=other.stamp(1))
    on.run()
    on.runner.lost_producer(UP)
    assert [m for m in on.messages() if isinstance(m, Ended)] == [
        Ended("b", STAMP, Outcome.FAILED, "peer_lost"),
        Ended("b", other.stamp(1), Outcome.FAILED, "peer_lost"),
    ]


# -- credit


def test_a_stage_has_room_for_as_many_chunks_as_it_has_credit(stand: StandMaker) -> None:
    engine = Scripted()
    on = stand(b=engine)
    on.open("b", TO_DOWN, Route(CLIENT, SERVER, 2, False), inputs=0)
    on.run()
    (turn,) = engine.turns
    assert turn.room() == 2
    turn.emit(Payload("x"))
    turn.emit(Payload("x"))
    assert turn.room() == 0
    with pytest.raises(TurnError):
        turn.emit(Payload("x"))
    on.runner.receive(SERVER, Credit("b", CLIENT, STAMP, 1))
    assert turn.room() == 1


def test_a_starved_engine_steps_again_when_credit_comes(stand: StandMaker) -> None:
    on = stand()
    on.open("b", Route(CLIENT, SERVER, 1, False))
    on.feed("b", b"one")
    on.feed("b", b"two", last=True)
    assert bodies(on.messages()) == [b"one"]
    on.runner.receive(SERVER, Credit("b", CLIENT, STAMP, 1))
    assert bodies(on.messages()) == [b"two"]


def test_credit_never_grows_past_the_window(stand: StandMaker) -> None:
    engine = Scripted()
    on = stand(b=engine)
    on.open("b", TO_CLIENT, inputs=0)
    on.runner.receive(SERVER, Credit("b", CLIENT, STAMP, 1000))
    assert engine.turns[0].room() == TO_CLIENT.credits


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_two_stages_never_starve_each_other_of_credit(tmp_path: Path, window: int) -> None:
    """The receiver holds credit back until the sender says that it runs low."""
    (tmp_path / "up").mkdir()
    (tmp_path / "down").mkdir()
    up = Stand(tmp_path / "up", {"a": echo(multiply=50)}, RunnerLimits(), 1 << 20)
    down = Stand(tmp_path / "down", {"b": echo()}, RunnerLimits(), 1 << 20)
    up.open("a", Route("b", DOWN, window, False))
    down.open("b", Route(CLIENT, SERVER, 1000, False))
    up.feed("a", last=True)
    heard, given = 0, 0
    for _ in range(1000):
        chunks = [message for to, message in up.run() if to == DOWN]
        assert len(chunks) <= window
        for chunk in chunks:
            down.runner.receive(UP, chunk)
        said = down.run()
        heard += sum(isinstance(message, Spoke) for _, message in said)
        back = [message for to, message in said if to == UP]
        given += len(back)
        for message in back:
            up.runner.receive(DOWN, message)
        if not chunks:
            break
    assert heard == 50
    assert given <= 50 if window == 1 else given <= 100 / window


def test_fused_stages_keep_their_credit_too(stand: StandMaker) -> None:
    on = stand(b=echo(multiply=10), c=Scripted(lambda turn: False))
    on.open("c", TO_CLIENT)
    on.open("b", Route("c", HERE, 3, False))
    on.feed("b", last=True)
    on.run()
    turn = on.runner._seats["c"].turns[STAMP[:4]]
    assert turn.waiting() == 3
    turn.take()
    on.run()
    assert turn.waiting() == 3


# -- fences and ends


def test_a_turn_whose_fence_moved_is_dropped_before_the_next_step(stand: StandMaker) -> None:
    stepped: list[Turn] = []

    def work(turn: Turn) -> bool:
        stepped.append(turn)
        return True

    engine = Scripted(work)
    on = stand(b=engine)
    on.open("b", TO_CLIENT, inputs=0)
    on.runner.step()
    on.fences.write(FENCE.raised())
    on.runner.step()
    assert len(stepped) == 1
    assert engine.dropped == stepped
    assert on.messages() == [Ended("b", STAMP, Outcome.INCOMPLETE, "stale")]


def test_a_dropped_turn_says_nothing_more(stand: StandMaker) -> None:
    engine = Scripted()
    on = stand(b=engine)
    on.open("b", TO_CLIENT, inputs=0)
    on.run()
    (turn,) = engine.turns
    on.runner.receive(SERVER, Abort("b", STAMP))
    turn.emit(Payload("x"))
    turn.finish()
    assert on.messages() == [Ended("b", STAMP, Outcome.INCOMPLETE, "aborted")]


def test_a_stale_turn_never_begins_and_still_reports_its_end(stand: StandMaker) -> None:
    engine = Scripted()
    on = stand(b=engine)
    on.call(OpenSession, "b", SESSION, {})
    on.fences.write(FENCE.raised())
    on.call(OpenTurn, "b", STAMP, {}, [TO_CLIENT], 1)
    assert on.run() == [(CONTROL, Ended("b", STAMP, Outcome.INCOMPLETE, "stale"))]
    assert engine.turns == []


def test_a_stale_chunk_is_dropped_and_its_ticket_and_credit_go_back(stand: StandMaker) -> None:
    on = stand()
    arena = Arena(segment_path(on.path, producer_name(UP), 0), 0, 1 << 20)
    on.open("b", TO_CLIENT)
    ticket = arena.put(Key(SESSION, 1, HERE), Payload("x", {}, BIG))
    on.fences.write(FENCE.raised())
    on.runner.receive(UP, Chunk("a", "b", STAMP, ticket))
    said = on.run()
    assert (UP, Credit("a", "b", STAMP, 1)) in said
    assert (UP, Free([freed(ticket)])) in said
    assert on.counts["stale_chunks"] == 1


def test_an_aborted_turn_gives_back_all_that_waited_for_it(stand: StandMaker) -> None:
    on = stand(b=Scripted())
    arena = Arena(segment_path(on.path, producer_name(UP), 0), 0, 1 << 20)
    on.open("b", TO_CLIENT)
    tickets = [arena.put(Key(SESSION, 1, HERE), Payload("x", {}, BIG)) for _ in range(3)]
    for ticket in tickets:
        on.runner.receive(UP, Chunk("a", "b", STAMP, ticket))
    on.run()
    on.runner._seats["b"].turns[STAMP[:4]].take()  # one is in use
    on.runner.receive(SERVER, Abort("b", STAMP))
    frees = [message for message in on.messages() if isinstance(message, Free)]
    assert frees == [Free([freed(ticket) for ticket in tickets])]


def test_closing_a_session_ends_its_turns_and_no_others(stand: StandMaker) -> None:
    engine = Scripted()
    on = stand(b=engine)
    other = Fence(4, 1)
    on.fences.write(other)
    on.open("b", TO_CLIENT)
    on.open("b", TO_CLIENT, stamp=other.stamp(1))
    on.call(CloseSession, "b", SESSION)
    on.call(CloseSession, "b", SESSION)
    assert on.messages() == [Ended("b", STAMP, Outcome.INCOMPLETE, "closed")]
    assert [turn.session for turn in engine.turns] == [other.stamp(1).session]
    assert engine.closed == [SESSION]


def test_nothing_opens_a_turn_of_a_session_that_is_not_open(stand: StandMaker) -> None:
    on = stand()
    on.call(OpenTurn, "b", STAMP, {}, [TO_CLIENT], 1)
    on.feed("b")
    on.call(FeedSession, "b", SESSION, Inline("x", {}, b"", ()))
    assert on.messages() == [Ended("b", STAMP, Outcome.FAILED, "session_unknown")]
    assert (on.counts["late_chunks"], on.counts["stale_feeds"]) == (1, 1)


def test_an_engine_may_refuse_a_session(stand: StandMaker) -> None:
    on = stand()
    on.call(OpenSession, "b", SESSION, {"refuse": True})
    on.call(OpenTurn, "b", STAMP, {}, [TO_CLIENT], 1)
    assert on.messages() == [Ended("b", STAMP, Outcome.FAILED, "refused")]
    on.call(CloseSession, "b", SESSION)


# -- faults


def test_a_turn_that_fails_ends_alone(stand: StandMaker) -> None:
    on = stand()
    other = Fence(4, 1)
    on.fences.write(other)
    on.open("b", TO_CLIENT)
    on.open("b", TO_CLIENT, stamp=other.stamp(1))
    on.feed("b", kind="fail")
    on.feed("b", b"fine", last=True, stamp=other.stamp(1))
    messages = on.messages()
    assert Ended("b", STAMP, Outcome.FAILED, "stage_error") in messages
    assert bodies(messages) == [b"fine"]


def test_a_failed_stage_does_not_tell_its_receiver_that_this_was_all(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_DOWN)
    on.feed("b", kind="fail")
    assert on.run() == [(CONTROL, Ended("b", STAMP, Outcome.FAILED, "stage_error"))]


def test_an_error_that_names_no_turn_is_the_workers_end(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_CLIENT)
    on.feed("b", kind="raise")
    with pytest.raises(FakeFailure):
        on.run()


def test_an_error_in_begin_may_name_its_turn(stand: StandMaker) -> None:
    class Refusing(Scripted):
        def begin(self, turn: Turn) -> None:
            super().begin(turn)
            raise TurnError(turn, "bad_params")

    on = stand(b=Refusing())
    on.open("b", TO_CLIENT)
    assert on.messages() == [Ended("b", STAMP, Outcome.FAILED, "bad_params")]


def test_a_lost_receiver_fails_the_turns_that_send_there_and_frees_their_tickets(stand: StandMaker) -> None:
    on = stand()
    other = Fence(4, 1)
    on.fences.write(other)
    on.open("b", TO_DOWN)
    on.open("b", TO_CLIENT, stamp=other.stamp(1))
    on.feed("b", BIG)
    on.run()
    assert on.outbox.tickets == 1
    on.runner.lost_receiver(DOWN)
    assert on.messages() == [Ended("b", STAMP, Outcome.FAILED, "peer_lost")]
    assert on.outbox.tickets == 0


def test_a_lost_producer_fails_the_turns_that_it_had_begun_to_feed(stand: StandMaker) -> None:
    on = stand(b=Scripted())
    other = Fence(4, 1)
    on.fences.write(other)
    on.open("b", TO_CLIENT)
    on.open("b", TO_CLIENT, stamp=other.stamp(1))
    on.chunk("b")
    on.chunk("b", stamp=other.stamp(1), last=True)
    on.run()
    on.runner.lost_producer(UP)
    assert [m for m in on.messages() if isinstance(m, Ended)] == [Ended("b", STAMP, Outcome.FAILED, "peer_lost")]


def test_input_whose_bytes_are_gone_fails_its_turn(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_CLIENT)
    on.runner.receive(UP, Chunk("a", "b", STAMP, Ticket(0, 0, 5000, 1, "x", {}, ())))
    assert Ended("b", STAMP, Outcome.FAILED, "peer_lost") in on.messages()


def test_a_forged_release_frees_nothing_and_is_counted(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_DOWN)
    on.feed("b", BIG)
    (chunk,) = on.messages()
    assert isinstance(chunk, Chunk)
    assert isinstance(chunk.body, Ticket)
    for source, name in [(UP, freed(chunk.body)), (DOWN, Freed(9, 0, 0)), (DOWN, Freed(0, 64, 1))]:
        on.runner.receive(source, Free([name]))
    assert on.outbox.tickets == 1
    assert on.counts["tickets_invalid"] == 3
    on.runner.receive(DOWN, Free([freed(chunk.body)]))
    assert on.outbox.tickets == 0


# -- whole edges and full arenas


def test_a_whole_edge_keeps_everything_until_it_is_forwarded(stand: StandMaker) -> None:
    on = stand(b=echo(multiply=3))
    on.open("b", TO_DOWN._replace(whole=True, credits=2))
    on.feed("b", b"one", last=True)
    assert on.run() == [(CONTROL, Ended("b", STAMP, Outcome.DONE, ""))]
    on.call(Forward, "b", STAMP, TO_DOWN._replace(credits=2))
    assert bodies(on.messages()) == [b"one", b"one"]
    on.runner.receive(DOWN, Credit("b", "c", STAMP, 1))
    (last,) = on.messages()
    assert isinstance(last, Chunk)
    assert last.last
    assert on.runner._seats["b"].lingering == {}


def test_what_a_turn_keeps_is_bounded(stand: StandMaker) -> None:
    on = stand(b=echo(multiply=3), limits=RunnerLimits(kept_bytes=150))
    on.open("b", TO_DOWN._replace(whole=True))
    on.feed("b", bytes(100), last=True)
    assert on.messages() == [Ended("b", STAMP, Outcome.FAILED, "resource_exhausted")]


def test_kept_output_goes_with_its_epoch(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_DOWN._replace(whole=True))
    on.feed("b", last=True)
    on.run()
    on.fences.write(FENCE.raised())
    assert on.run() == []
    on.call(Forward, "b", STAMP, TO_DOWN)
    assert on.run() == []
    assert on.counts["stale_forwards"] == 1


def test_kept_output_that_nobody_asks_for_is_dropped_in_time(stand: StandMaker) -> None:
    on = stand(limits=RunnerLimits(forward_s=3.0))
    on.open("b", TO_DOWN._replace(whole=True))
    on.feed("b", last=True)
    on.run()
    on.now += 3 * NS_PER_S
    on.run()
    assert on.runner._seats["b"].lingering == {}


def test_a_full_arena_makes_the_output_wait_and_nothing_is_lost_or_reordered(stand: StandMaker) -> None:
    on = stand(b=echo(multiply=3), arena=16 * 1024)
    on.open("b", TO_DOWN)
    on.feed("b", BIG, last=True)
    seqs = []
    for _ in range(3):
        chunks = [message for message in on.messages() if isinstance(message, Chunk)]
        assert len(chunks) == 1
        assert isinstance(chunks[0].body, Ticket)
        seqs.append((chunks[0].stamp.seq, chunks[0].last))
        on.runner.receive(DOWN, Free([freed(chunks[0].body)]))
    assert seqs == [(0, False), (1, False), (2, True)]
    assert on.outbox.tickets == 0


def test_the_end_of_a_turn_waits_for_output_that_waits_for_the_arena(stand: StandMaker) -> None:
    on = stand(b=echo(multiply=2), arena=16 * 1024)
    on.open("b", TO_CLIENT)
    on.feed("b", BIG, last=True)
    (first,) = on.messages()
    assert isinstance(first, Spoke)
    assert isinstance(first.body, Ticket)
    assert first.outcome is None
    on.runner.receive(SERVER, Free([freed(first.body)]))
    (last,) = on.messages()
    assert isinstance(last, Spoke)
    assert last.outcome is Outcome.DONE


def test_a_payload_that_never_fits_fails_its_turn(stand: StandMaker) -> None:
    on = stand(arena=8 * 1024)
    on.open("b", TO_DOWN)
    on.feed("b", BIG)
    assert on.messages() == [Ended("b", STAMP, Outcome.FAILED, "resource_exhausted")]


def test_kept_output_that_cannot_be_sent_fails_its_receiver(stand: StandMaker) -> None:
    on = stand(arena=8 * 1024)
    on.open("b", TO_DOWN._replace(whole=True))
    on.feed("b", BIG, last=True)
    assert on.messages() == [Ended("b", STAMP, Outcome.DONE, "")]
    on.call(Forward, "b", STAMP, TO_DOWN)
    assert on.messages() == [Chunk("b", "c", STAMP, None, False, True, Outcome.FAILED, "resource_exhausted")]


def test_input_that_broke_off_fails_its_turn(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_CLIENT)
    on.runner.receive(UP, Chunk("a", "b", STAMP, None, False, True, Outcome.FAILED, "resource_exhausted"))
    assert on.messages() == [Ended("b", STAMP, Outcome.FAILED, "resource_exhausted")]


# -- sessions


def test_what_a_session_is_told_comes_back_as_a_finding(stand: StandMaker) -> None:
    on = stand()
    on.call(OpenSession, "b", SESSION, {})
    on.call(FeedSession, "b", SESSION, Inline("audio", {"n": 1}, b"pcm", ()))
    assert on.run() == [(MEDIA, Found("b", SESSION, Inline("audio", {"n": 1}, b"pcm", ())))]


def test_a_snapshot_restores_into_another_session_and_a_fork_goes_its_own_way(stand: StandMaker) -> None:
    on = stand()
    second, third = session_key(1, 1), session_key(2, 1)
    for session in (SESSION, second):
        on.call(OpenSession, "b", session, {})
    for _ in range(2):
        on.call(FeedSession, "b", SESSION, Inline("x", {}, b"", ()))
    on.run()
    on.call(Snapshot, "b", SESSION, 9)
    ((_, shot),) = on.run()
    assert isinstance(shot, Snapshotted)
    assert isinstance(shot.body, Inline)
    on.call(Restore, "b", second, shot.body)
    on.call(Fork, "b", second, third)
    on.call(FeedSession, "b", third, Inline("x", {}, b"", ()))
    on.run()
    for session, ticket in ((second, 10), (third, 11)):
        on.call(Snapshot, "b", session, ticket)
    told = [m.body.meta["told"] for m in on.messages() if isinstance(m, Snapshotted) and isinstance(m.body, Inline)]
    assert told == [2, 3]


def test_what_is_asked_about_an_unknown_session_harms_nobody(stand: StandMaker) -> None:
    on = stand()
    on.call(Snapshot, "b", SESSION, 1)
    on.call(Fork, "b", SESSION, session_key(1, 1))
    on.call(Restore, "b", SESSION, inline(Payload("fake", {"told": 1})))
    assert on.messages() == [Snapshotted("b", SESSION, 1, None)]
    assert on.counts["refused_session_unknown"] == 2


def test_a_bad_snapshot_is_refused_and_the_state_stays(stand: StandMaker) -> None:
    on = stand()
    on.call(OpenSession, "b", SESSION, {})
    on.call(Restore, "b", SESSION, inline(Payload("fake", {"told": "nonsense"})))
    on.call(Snapshot, "b", SESSION, 1)
    assert on.messages() == [Snapshotted("b", SESSION, 1, Inline("fake", {"told": 0}, b"", ()))]


# -- whose turn it is


def test_the_stage_with_the_earlier_deadline_steps_first(stand: StandMaker) -> None:
    stepped: list[str] = []

    def noting(name: str) -> Callable[[Turn], bool]:
        def do(turn: Turn) -> bool:
            stepped.append(name)
            return False

        return do

    on = stand(b=Scripted(noting("b")), c=Scripted(noting("c")), d=Scripted(noting("d")))
    now = on.now
    on.open("b", stamp=FENCE.stamp(1, now + 9 * NS_PER_S))
    on.open("c", stamp=FENCE.stamp(1))
    on.open("d", stamp=FENCE.stamp(1, now + 10_000))
    on.run()
    assert stepped == ["d", "c", "b"]


def test_urgent_turns_do_not_starve_work_without_a_deadline(stand: StandMaker) -> None:
    greedy, patient = Scripted(lambda turn: True), Scripted(lambda turn: False)
    on = stand(b=greedy, c=patient)
    on.open("b", stamp=FENCE.stamp(1, 1))  # overdue, and always with something to do
    on.open("c", stamp=FENCE.stamp(2))
    for _ in range(100):
        on.now += NS_PER_S // 100
        on.runner.step()
    assert patient.steps == 1
    assert greedy.steps == 99


def test_an_engine_is_called_at_the_time_it_asked_for(stand: StandMaker) -> None:
    engine = Scripted()
    on = stand(b=engine)
    on.open("b")
    on.run()
    steps = engine.steps
    assert engine.host is not None
    engine.host.wake_at(on.now + 500)
    on.run()
    assert engine.steps == steps
    on.now += 500
    on.run()
    assert engine.steps == steps + 1


def test_a_helper_thread_may_ask_for_a_step(stand: StandMaker) -> None:
    engine = Scripted()
    on = stand(b=engine)
    on.run()
    assert engine.host is not None
    steps = engine.steps
    engine.host.wake()
    on.run()
    assert engine.steps == steps + 1


# -- reports


def test_a_ping_is_answered(stand: StandMaker) -> None:
    on = stand()
    on.runner.receive(SERVER, Ping(7))
    assert on.run() == [(CONTROL, Pong(7))]


def test_loads_and_counts_are_reported_and_not_too_often(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_CLIENT)
    while on.runner.step():
        pass
    on.runner.settle()
    reports = [message for _, message in on.outbox.take() if isinstance(message, Report)]
    assert reports == [Report("b", 1, 1, 0, 0, 0)]
    on.chunk("b", stamp=STAMP._replace(epoch=9))
    due = on.runner.settle()
    assert [m for _, m in on.outbox.take() if isinstance(m, Report | Counted)] == []
    assert due is not None
    on.now = due
    on.runner.settle()
    assert (CONTROL, Counted({"stale_chunks": 1})) in on.outbox.take()
    assert not on.outbox.counts


def test_a_drained_worker_has_nothing_of_anybody(stand: StandMaker) -> None:
    on = stand()
    on.open("b", TO_DOWN)
    on.runner.receive(SERVER, Drain())
    assert not on.runner.is_drained
    on.feed("b", BIG, last=True)
    (chunk,) = on.messages()
    on.call(CloseSession, "b", SESSION)
    assert not on.runner.is_drained  # somebody reads what it made
    assert isinstance(chunk, Chunk)
    assert isinstance(chunk.body, Ticket)
    on.runner.receive(DOWN, Free([freed(chunk.body)]))
    assert on.runner.is_drained
