"""The guarantees of the design that the core alone can keep, under a client, ears and stages that do what they like.

One hypothesis machine over a whole conversation: every step is checked against G1, G3, G4, G5, G7, G8 and G11, and
against a thinker that keeps its messages as the real one does. G2, G6, G9 and G10 need the runtime.
"""

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from session_driver import BRISK, BRISK_DETECTION, QUIET, SPEAKS, Drive, S, Voice, check_grammar

from omni_live.sessions.effects import Effect, Feed, Submit
from omni_live.sessions.events import (
    AudioDelta,
    AudioTranscriptDelta,
    Event,
    ItemTruncated,
    OutputItemAdded,
    ResponseCreated,
    ResponseDone,
    SessionResumed,
    TextDelta,
)
from omni_live.sessions.findings import Heard
from omni_live.sessions.inputs import (
    Attached,
    AudioCleared,
    AudioCommitted,
    BargeInAsked,
    CancelAsked,
    CloseAsked,
    Detached,
    DrainAsked,
    EventAcked,
    Heartbeat,
    Input,
    ItemCreateAsked,
    ItemDeleteAsked,
    ItemRetrieveAsked,
    ItemTruncateAsked,
    Outcome,
    PlaybackAcked,
    RespondAsked,
    SettingsAsked,
    StageEnded,
    StageFound,
    StageLost,
    StageSpoke,
    TextAppended,
)
from omni_live.sessions.items import Item, Modality, Response, ResponseStatus, Role
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload
from omni_live.sessions.settings import Overlap, Settings
from omni_live.sessions.stamp import Stamp
from omni_live.sessions.turn import SessionState

LIMITS = Limits(
    journal_bytes=150_000, journal_s=30, turn_deadline_s=20, idle_lease_s=2000, detach_grace_s=100, max_reply_s=2.0
)
CREDITS = LIMITS.client_credits
WORDS = "ab cd ef gh ij kl mn op qr st uv wx".split()
SETTINGS = [
    BRISK,
    replace(BRISK, lead_ms=0),
    replace(BRISK, instructions="Be brief."),
    replace(BRISK, modality=Modality.TEXT),
    replace(BRISK, overlap=Overlap(listen_only=True)),
    Settings(turn_detection=replace(BRISK_DETECTION, interrupt_response=False)),
    Settings(turn_detection=replace(BRISK_DETECTION, speculative_ms=0)),
    QUIET,
]


@dataclass
class Written:
    """An event of the numbered stream, sent or not."""

    seq: int
    event: Event
    content: Stamp | None
    at_ns: int


@dataclass
class Work:
    """A submitted turn in the stages: what the voice will say is known from the start."""

    voice: Voice
    plan: list[str]
    started: bool = False
    thought: bool = False
    """The thinker is done with it, and holds its whole reply."""
    ended: Outcome | None = None
    sent: int = 0

    @property
    def text(self) -> str:
        return "".join(self.plan)

    @property
    def side(self) -> bool:
        return self.voice.submit.params["side"] is True

    @property
    def spoken(self) -> bool:
        return self.voice.submit.outputs == {"code2wav"}


class Watched(Drive):
    """A conversation whose whole stream is written down, and whose thinker starts when it is told to."""

    def __init__(self) -> None:
        self.written: list[Written] = []
        self.works: list[Work] = []
        self.expected: dict[tuple[int, ...], list[tuple[Role, str]]] = {}
        """What the conversation was when a turn was submitted."""
        self.answers: list[Heard] = []
        """Transcripts that the ears owe."""
        super().__init__(limits=LIMITS, attach=False)
        self.auto_start = False
        journal = self.session._journal
        add = journal.add

        def noted(event: Event, content: Stamp | None, nbytes: int, now: int) -> int:
            seq = add(event, content, nbytes, now)
            self.written.append(Written(seq, event, content, now))
            return seq

        journal.add = noted  # type: ignore[method-assign]
        self.tell(Attached(1))

    def tell(self, *inputs: Input) -> list[Effect]:
        effects: list[Effect] = []
        for one in inputs:
            effects = super().tell(one)
            submits = [effect for effect in effects if isinstance(effect, Submit)]
            for submit in submits:
                self._submitted(submit, check=submit is submits[-1])
        return effects

    def _submitted(self, submit: Submit, check: bool) -> None:
        number = len(self.works)
        plan = [f"{WORDS[(number + index) % len(WORDS)]} {number} " for index in range(number % 5 + 1)]
        self.works.append(Work(Voice(self, submit), plan))
        if check:
            self.expected[submit.stamp[:4]] = [(item.role, item.text) for item in self.items if item.text]

    def start(self, work: Work) -> None:
        """The thinker gets to the turn, and to every one before it that is not stale."""
        for other in self.works[: self.works.index(work) + 1]:
            if other.started or not self.alive(other):
                continue
            other.started = True
            seen = self.thinker.start(other.voice.submit)
            expected = self.expected.get(other.voice.submit.stamp[:4])
            if expected is not None:
                said = seen[1:] if seen and seen[0] in SYSTEMS else seen
                tentative = other.voice.submit.stamp.lane in (1, 2)
                assert (said[:-1] if tentative else said) == expected, "the model sees another conversation (G8)"

    def alive(self, work: Work) -> bool:
        return work.voice.submit.stamp[:4] in self.live

    def think(self, work: Work) -> None:
        """The thinker finishes; what it wrote is part of its state from here on."""
        self.start(work)
        if not work.thought and self.alive(work):
            work.thought = True
            if not work.side and work is self.newest():
                self.thinker.replied(work.text)

    def newest(self) -> Work | None:
        """The conversation's turn that the thinker began last: it forgets those before."""
        begun = [work for work in self.works if work.started and not work.side]
        return begun[-1] if begun else None

    def _perform(self, effect: Effect) -> None:
        super()._perform(effect)
        match effect:
            case Feed("ears", Payload("commit", meta)):
                user = self.user
                if meta["utterance"] in (0, user.utterance) and user.open:
                    text = f"line {user.utterance}"
                    self.answers.append(Heard(user.utterance, user.start, user.at, text, 1.0, True))
                    user.closed()
                elif meta["utterance"] == 0 and self.talk.settings.turn_detection is None:
                    user.utterance += 1
                    self.answers.append(Heard(user.utterance, 0, user.at, f"by hand {user.at}", 1.0, True))
            case Feed("ears", Payload("discard" | "clear")):
                self.user.closed()
            case _:
                pass


SYSTEMS = [(Role.SYSTEM, "Be brief."), (Role.SYSTEM, "Shout.")]
works = st.integers(0, 3)


class ConversationMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize()
    def begin(self) -> None:
        self.drive = Watched()
        self.got: dict[int, Event] = {}
        self.read_to = 0
        self.void: set[int] = set()
        self.gone: set[int] = set()
        self.attachment = 1
        self.checked = 0
        self.first_ns: dict[str, int] = {}
        self.released: Counter[str] = Counter()
        self.acks: dict[str, int] = {}
        self.owner: dict[str, str] = {}
        self.responses: dict[str, Response] = {}
        self.done: Counter[str] = Counter()

    # -- helpers -----------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        return not self.drive.session.closed

    def work(self, index: int) -> Work | None:
        """One of the latest turns, stale ones included."""
        made = self.drive.works
        return made[-1 - index % len(made)] if made else None

    def read(self) -> None:
        """The client takes what it was sent."""
        emits = self.drive.emits
        for emit in emits[self.read_to :]:
            if isinstance(emit.event, SessionResumed):
                for first, last in emit.event.voids:
                    self.void |= set(range(first, last + 1))
            if emit.seq:
                assert emit.seq > max(self.got, default=0), "out of order or twice (G7)"
                self.got[emit.seq] = emit.event
        self.read_to = len(emits)

    # -- the client --------------------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(
            [
                TextAppended("Hello."),
                TextAppended("A note.", respond=False),
                RespondAsked(),
                RespondAsked(instructions="Shout."),
                RespondAsked(modality=Modality.TEXT),
                RespondAsked(out_of_band=True),
                RespondAsked(out_of_band=True, modality=Modality.TEXT),
                CancelAsked(),
                CancelAsked("resp_nothing"),
                BargeInAsked(),
                AudioCommitted(None),
                AudioCommitted(True),
                AudioCommitted(False),
                AudioCleared(),
                Heartbeat(),
                ItemRetrieveAsked("nothing"),
            ]
        )
    )
    def asks(self, what: Input) -> None:
        self.drive.tell(what)

    def sets(self, new: Settings) -> None:
        self.drive.tell(SettingsAsked(new))

    def edits(self, at: int, how: str) -> None:
        items = self.drive.items
        named = items[at % len(items)].id if items else "nothing"
        if how == "delete":
            self.drive.tell(ItemDeleteAsked(named))
        else:
            after = {"create": None, "root": "root", "after": named}[how]
            self.drive.tell(ItemCreateAsked(Item("", Role.USER, f"Item {len(items)}.", spoken=False), after))

    @precondition(lambda self: self.drive.items)
    @rule(at=st.integers(0, 2), ms=st.sampled_from([0, 100, 125, 250, 300, 700, 1500, 9000]))
    def truncates(self, at: int, ms: int) -> None:
        item = self.drive.items[-1 - at % len(self.drive.items)]
        response = self.owner.get(item.id, "")
        known = {exchange.response.id for exchange in (self.drive.talk._exchange, self.drive.talk._last) if exchange}
        if response in known and ms <= self.released[response] // SPEAKS + 260:
            self.acks[response] = min(ms * SPEAKS, self.released[response])
        self.drive.tell(ItemTruncateAsked(item.id, ms))

    @rule(ms=st.sampled_from([0.0, 100.0, 260.0, 510.0, 5000.0]), last=st.booleans())
    def acknowledges(self, ms: float, last: bool) -> None:
        exchange = self.drive.talk._last if last else self.drive.talk._exchange
        if exchange is not None:
            response = exchange.response.id
            if response in self.first_ns:
                self.acks[response] = min(round(ms * SPEAKS), self.released[response])
            self.drive.tell(PlaybackAcked(ms, response))

    @rule(back=st.integers(0, 3))
    def has(self, back: int) -> None:
        self.read()
        if self.got:
            self.drive.tell(EventAcked(max(0, max(self.got) - back)))

    # -- the user ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.open and self.drive.talk.settings.turn_detection is not None)
    @rule(frames=st.sampled_from([1, 3, 8, 24]), level=st.sampled_from([-25.0, -25.0, -50.0]))
    def speaks(self, frames: int, level: float) -> None:
        self.drive.user.speak(frames * 32, level)

    @precondition(lambda self: self.open and self.drive.talk.settings.turn_detection is not None)
    @rule(ms=st.sampled_from([320, 800]), text=st.sampled_from(["line", "another line"]))
    def takes_a_turn(self, ms: int, text: str) -> None:
        self.speaks(ms // 32, -25.0)
        self.pauses(18, text)

    @precondition(lambda self: self.open and self.drive.user.open)
    @rule(frames=st.sampled_from([3, 6, 12, 18]), text=st.sampled_from([None, "line", "another line"]))
    def pauses(self, frames: int, text: str | None) -> None:
        user = self.drive.user
        before = user.utterance
        for _ in range(frames):
            if not user.open or user.utterance != before:
                return
            user.pause(32, text)

    def fades(self) -> None:
        if self.drive.user.open:
            self.drive.user.fade()

    def listens(self, ms: int) -> None:
        if not self.drive.user.open:
            self.drive.user.listen(ms)

    @precondition(lambda self: self.drive.answers)
    @rule(at=st.integers(0, 3), twice=st.booleans())
    def transcribes(self, at: int, twice: bool) -> None:
        answers = self.drive.answers
        heard = answers.pop(at % len(answers))
        self.drive.find(heard)
        if twice:
            self.drive.find(heard)

    # -- the stages --------------------------------------------------------------------------------------------

    @rule(index=works)
    def thinks(self, index: int) -> None:
        work = self.work(index)
        if work is not None and self.drive.alive(work):
            self.drive.think(work)

    @rule(chunks=st.integers(1, 6), ms=st.sampled_from([0, 30, 250]), end=st.booleans())
    def answers(self, chunks: int, ms: int, end: bool) -> None:
        """The turn that was begun last is answered, at some pace."""
        live = [work for work in self.drive.works if self.drive.alive(work) and work.ended is None]
        if not live:
            return
        index = len(self.drive.works) - 1 - self.drive.works.index(live[-1])
        for _ in range(chunks):
            self.speaks_on(index, 1)
            self.drive.pass_ms(ms)
        if end:
            self.ends(index, Outcome.DONE)

    @rule(index=st.sampled_from([0, 0, 0, 1, 2]), count=st.integers(1, 3))
    def speaks_on(self, index: int, count: int) -> None:
        work = self.work(index)
        for _ in range(count):
            if work is None or work.sent >= len(work.plan) or work.ended or work.sent >= CREDITS:
                return
            if self.drive.alive(work):
                self.drive.start(work)
            elif not work.started:
                return
            text = work.plan[work.sent]
            work.sent += 1
            if work.spoken:
                work.voice.say(text)
            else:
                work.voice.write(text)

    def repeats_or_skips(self, index: int, ahead: int) -> None:
        work = self.work(index)
        if work is None or not work.started:
            return
        seq = work.voice.seq + ahead
        if seq < 0:
            return
        stage = "code2wav" if work.spoken else "thinker"
        stamp = work.voice.submit.stamp._replace(stage=3, seq=seq)
        before = len(self.drive.written)
        self.drive.tell(
            StageSpoke(stamp, stage, Payload("pcm" if work.spoken else "text", {"text": "ghost "}, bytes(480)))
        )
        for written in self.drive.written[before:]:
            assert "ghost" not in repr(written.event), "what is out of order is never heard (G7)"

    @rule(index=st.sampled_from([0, 0, 1, 2]), outcome=st.sampled_from([Outcome.DONE] * 4 + list(Outcome)))
    def ends(self, index: int, outcome: Outcome) -> None:
        work = self.work(index)
        if work is None or work.ended or not work.started:
            return
        if outcome is Outcome.DONE:
            if work.sent < len(work.plan):
                self.speaks_on(index, 3)
            if work.sent < len(work.plan):
                return
            self.drive.think(work)
        if outcome is Outcome.FAILED and self.drive.alive(work) and not work.side:
            self.drive.thinker.items = self.drive.thinker.items[:0]
        work.ended = outcome
        (stage,) = work.voice.submit.outputs
        self.drive.tell(
            StageEnded(work.voice.submit.stamp, stage, outcome, "" if outcome is Outcome.DONE else "reason")
        )

    def ghosts(self, index: int, slots: int, epochs: int, turns: int) -> None:
        """Output under a stamp that names nothing that runs (G5)."""
        work = self.work(index)
        if work is None:
            return
        stamp = work.voice.submit.stamp
        stamp = stamp._replace(slot=stamp.slot + slots, epoch=stamp.epoch + epochs, turn=stamp.turn + turns)
        if stamp[:4] in self.drive.live:
            return
        before = (len(self.drive.written), len(self.drive.works), list(self.drive.items), self.drive.busy)
        self.drive.tell(StageSpoke(stamp, "code2wav", Payload("pcm", {"text": "ghost "}, bytes(480))))
        self.drive.tell(StageEnded(stamp, "code2wav", Outcome.DONE))
        assert before == (len(self.drive.written), len(self.drive.works), list(self.drive.items), self.drive.busy)

    def dies(self, stage: str) -> None:
        if stage == "ears":
            self.drive.user.closed()
            self.drive.answers.clear()
            self.drive.tell(StageLost("ears"))
            return
        self.drive.thinker.items.clear()
        self.drive.tell(StageLost("thinker"))
        for work in self.drive.works:
            if self.drive.alive(work) and not work.thought:
                work.ended = Outcome.FAILED
                (stage,) = work.voice.submit.outputs
                self.drive.tell(StageEnded(work.voice.submit.stamp, stage, Outcome.FAILED, "replica_lost"))
        for work in self.drive.works:
            work.thought = True  # what it wrote is gone with it

    def forgets(self, count: int) -> None:
        """The oldest messages no longer fit; the thinker says so about a turn that it has begun."""
        if all(work.started for work in self.drive.works if self.drive.alive(work)):
            self.drive.tell(StageFound("thinker", Payload("dropped", {"items": count})))

    # -- transports and time -----------------------------------------------------------------------------------

    @precondition(lambda self: self.open)
    @rule()
    def loses_its_transport(self) -> None:
        self.read()
        self.drive.tell(Detached(self.attachment))

    @precondition(lambda self: self.open)
    @rule(lost=st.integers(0, 4))
    def resumes(self, lost: int) -> None:
        """The client comes back; the last frames did not reach it."""
        self.read()
        for seq in sorted(self.got)[len(self.got) - min(lost, len(self.got)) :]:
            del self.got[seq]
        seen = max(self.got, default=0)
        self.attachment += 1
        token = self.drive.session.token
        assert self.drive.session.resumable(token) is None
        gap = self.drive.session._journal.replay(seen, self.drive.now).gap
        if gap is not None:
            self.gone |= set(range(gap[0], gap[1] + 1))
        self.drive.tell(Attached(self.attachment, token, seen))
        self.drive.tell(Heartbeat())
        assert self.drive.session.resumable(token) == "invalid_resume_token"
        self.read()

    @rule(ms=st.sampled_from([1, 40, 250, 1000, 5000]))
    def waits(self, ms: int) -> None:
        self.drive.pass_ms(ms)

    def leaves(self, odds: int) -> None:
        if odds == 0:
            self.drive.tell(CloseAsked())
        elif odds == 1:
            self.drive.tell(DrainAsked(self.drive.now + 10 * S))

    @rule(
        what=st.sampled_from(
            [
                "set",
                "set",
                "edit",
                "edit",
                "edit",
                "fade",
                "listen",
                "repeat",
                "skip",
                "ghost",
                "die",
                "forget",
                "leave",
            ]
        ),
        one=st.integers(0, 9),
        two=st.integers(0, 9),
        three=st.integers(0, 9),
    )
    def troubles(self, what: str, one: int, two: int, three: int) -> None:
        """What happens now and then; one rule of many, so that there is a conversation to trouble."""
        match what:
            case "set":
                self.sets(SETTINGS[one % len(SETTINGS)])
            case "edit":
                self.edits(one, ("create", "root", "after", "delete")[two % 4])
            case "fade":
                self.fades()
            case "listen":
                self.listens(64 if one else 320)
            case "repeat":
                self.repeats_or_skips(one % 3, -1 - two % 2)
            case "skip":
                self.repeats_or_skips(one % 3, 1)
            case "ghost":
                self.ghosts(one % 4, two % 6 - 1, three % 3 - 1, (one + two) % 3 - 1)
            case "die":
                self.dies(("ears", "thinker")[one % 2])
            case "forget":
                self.forgets(1 + one % 3)
            case _:
                self.leaves(one + two)

    # -- what must hold ----------------------------------------------------------------------------------------

    @invariant()
    def stream_is_right(self) -> None:
        for written in self.drive.written[self.checked :]:
            assert written.seq == self.checked + 1, "numbers have holes (G7)"
            self.checked += 1
            self._check(written)

    def _check(self, written: Written) -> None:
        match written.event:
            case ResponseCreated(response):
                self.responses[response.id] = response
            case OutputItemAdded(response_id, item):
                self.owner[item.id] = response_id
            case AudioDelta(response_id, _, pcm, start_sample):
                assert start_sample == self.released[response_id], "samples are missing (G7)"
                self.first_ns.setdefault(response_id, written.at_ns)
                self.released[response_id] += len(pcm) // 2
            case ItemTruncated(item_id, _, audio_end_ms, text):
                self._check_heard(self.owner[item_id], audio_end_ms, text, written.at_ns)
            case ResponseDone(response):
                self.done[response.id] += 1
                assert self.done[response.id] == 1, "ended twice (G4)"
                if response.status in (ResponseStatus.CANCELLED, ResponseStatus.FAILED):
                    self._check_silenced(response.id)
                if response.status is ResponseStatus.COMPLETED:
                    self._check_completed(response)
            case _:
                pass

    def _check_heard(self, response_id: str, audio_end_ms: int, text: str, at_ns: int) -> None:
        """Exactly what the client says it played, else what real time lets it have played (G8)."""
        released = self.released[response_id]
        elapsed = (at_ns - self.first_ns[response_id]) * SPEAKS // 1_000_000
        position = self.acks.get(response_id, min(released, elapsed))
        assert audio_end_ms == position // SPEAKS
        turn = self.responses[response_id].turn
        side = not self.responses[response_id].in_conversation
        voices = [work.voice for work in self.drive.works if work.voice.submit.stamp.turn == turn and work.side == side]
        whole = "".join(
            written.event.delta
            for written in self.drive.written
            if isinstance(written.event, AudioTranscriptDelta) and written.event.response_id == response_id
        )
        voice = next(voice for voice in reversed(voices) if voice.text.startswith(whole))
        passed = [char for sample, char in voice.marks if sample <= position and sample < released]
        expected = whole if position >= released else whole[: passed[-1]] if passed else ""
        assert text == expected, "not what was heard (G8)"

    def _check_silenced(self, response_id: str) -> None:
        for written in self.drive.written:
            event = written.event
            if isinstance(event, AudioDelta | AudioTranscriptDelta | TextDelta) and event.response_id == response_id:
                assert written.content is not None
                assert not self.drive.admits(written.content), "it may still be handed to the client (G1)"

    def _check_completed(self, response: Response) -> None:
        made = [
            work
            for work in self.drive.works
            if work.voice.submit.stamp.turn == response.turn and work.side != response.in_conversation
        ]
        assert made[-1].ended is Outcome.DONE, "completed too early (G4)"
        assert response.item is None or response.item.text == made[-1].text, "completed without all of it (G4)"

    @invariant()
    def bounded(self) -> None:
        talk = self.drive.talk
        assert self.drive.session._journal.nbytes <= LIMITS.journal_bytes, "G11"
        for exchange in (talk._exchange, talk._tried, talk._side):
            assert exchange is None or len(exchange.reply.waiting) <= CREDITS, "G11"
        assert len({item.id for item in talk.items}) == len(talk.items)

    @invariant()
    def items_are_what_was_told(self) -> None:
        """Whatever was cut stands in the conversation as the client was told last (G8)."""
        cut = {w.event.item_id: w.event.text for w in self.drive.written if isinstance(w.event, ItemTruncated)}
        for item in self.drive.items:
            if item.id in cut:
                assert item.text == cut[item.id]

    def teardown(self) -> None:
        drive = self.drive
        self.read()
        if self.open and drive.session.state is SessionState.OPEN:
            missing = set(range(1, len(drive.written) + 1)) - set(self.got)
            assert missing <= self.void | self.gone, "numbers are missing (G7)"
            for written in drive.written:
                assert written.seq not in self.got or self.got[written.seq] == written.event
        if self.open:
            drive.pass_ms(65_000)
            assert drive.session.closed or not (drive.busy or drive.held), "a turn that nothing ends"
        if self.open:
            drive.tell(CloseAsked())
        assert len(drive.released) == 1
        assert set(self.responses) | {
            w.event.response.id for w in drive.written if isinstance(w.event, ResponseCreated)
        } == {w.event.response.id for w in drive.written if isinstance(w.event, ResponseDone)}, "never ended (G4)"
        check_grammar([written.event for written in drive.written], whole=True)


TestConversationMachine = ConversationMachine.TestCase
TestConversationMachine.settings = settings(max_examples=250, stateful_step_count=60, deadline=None, derandomize=True)
