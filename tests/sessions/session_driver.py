"""Drives a conversation in virtual time: inputs in, effects out, with the laws checked on every effect.

The stages are scripts: a `Voice` says what a test tells it to, a `Thinker` keeps its messages as the real one does,
and a `User` makes the findings that the ears would make of somebody who speaks and pauses.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from omni_live.sessions.continuity import read_context
from omni_live.sessions.conversation import Conversation
from omni_live.sessions.effects import (
    Abort,
    Count,
    Effect,
    Emit,
    Feed,
    Hold,
    RaiseFence,
    Release,
    Submit,
    Unhold,
    Wake,
)
from omni_live.sessions.events import (
    AudioDelta,
    AudioDone,
    AudioTranscriptDelta,
    AudioTranscriptDone,
    ErrorTold,
    Event,
    ItemAdded,
    ItemDone,
    OutputItemAdded,
    OutputItemDone,
    PartAdded,
    PartDone,
    ResponseCreated,
    ResponseDone,
    SessionClosed,
    TextDelta,
    TextDone,
    TurnDone,
)
from omni_live.sessions.exchange import Shape
from omni_live.sessions.findings import (
    Finding,
    Heard,
    SpeechBegan,
    SpeechFaded,
    SpeechPaused,
    SpeechWent,
    write_finding,
)
from omni_live.sessions.ids import CountedIds
from omni_live.sessions.inputs import (
    Asked,
    Attached,
    AudioAppended,
    Input,
    Outcome,
    StageEnded,
    StageFound,
    StageSpoke,
    Woke,
)
from omni_live.sessions.items import Item, ResponseStatus, Role
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload
from omni_live.sessions.plain import PlainSession
from omni_live.sessions.session import Session
from omni_live.sessions.settings import Settings, TurnDetection
from omni_live.sessions.stamp import Fence, Stamp

MS = 1_000_000
S = 1000 * MS
FRAME = 512
BRISK_DETECTION = TurnDetection(silence_duration_ms=500, min_silence_ms=400)
BRISK = Settings(turn_detection=BRISK_DETECTION)
"""What the scenarios' pauses are made for."""
"""Samples of a microphone frame: 32 ms."""
HEARS = 16
SPEAKS = 24
"""Samples per millisecond."""

SLOT, GENERATION = 3, 7

Start = Callable[..., "Drive"]
T = TypeVar("T")


class Perform:
    """What an orchestrator makes of a session's effects, as far as the laws need it."""

    def __init__(self, session: Session, now: int) -> None:
        self.session = session
        self.now = now
        self.effects: list[Effect] = []
        self.fences: dict[int, Fence] = {}
        self.submits: list[Submit] = []
        self.live: dict[tuple[int, ...], Submit] = {}
        """Turns at work in the stages, by what names them."""
        self.released: list[str] = []
        self.wake_at: int | None = None
        self.seqs: set[int] = set()

    def tell(self, *inputs: Input) -> list[Effect]:
        """The effects of the last of the inputs."""
        effects: list[Effect] = []
        for one in inputs:
            if isinstance(one, StageEnded):
                self.live.pop(one.stamp[:4], None)
            effects = self.session.handle(one, self.now)
            for effect in effects:
                self._perform(effect)
            self.effects += effects
        return effects

    def pass_ms(self, ms: float) -> None:
        """Let time pass; wakes come exactly when they are due."""
        until = self.now + round(ms * MS)
        for _ in range(100_000):
            if self.wake_at is None or self.wake_at > until:
                self.now = until
                return
            self.now, self.wake_at = max(self.now, self.wake_at), None
            self.tell(Woke())
        raise AssertionError("the session wants to be woken again and again")

    # -- what it did -----------------------------------------------------------------------------------------------

    @property
    def emits(self) -> list[Emit]:
        return [effect for effect in self.effects if isinstance(effect, Emit)]

    @property
    def events(self) -> list[Event]:
        return [emit.event for emit in self.emits]

    def all(self, kind: type[T]) -> list[T]:
        """Every effect or event of the kind, oldest first."""
        found: list[object] = [effect.event if isinstance(effect, Emit) else effect for effect in self.effects]
        return [one for one in found if isinstance(one, kind)]

    def last(self, kind: type[T]) -> T:
        return self.all(kind)[-1]

    def count(self, name: str) -> int:
        return sum(effect.amount for effect in self.all(Count) if effect.name == name)

    @property
    def errors(self) -> list[str]:
        return [error.code for error in self.all(ErrorTold)]

    # -- the laws --------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        assert not self.released or isinstance(effect, Count), f"{effect} after the release (G3)"
        match effect:
            case RaiseFence(fence):
                self._raise(fence)
            case Submit(stamp):
                assert self.admits(stamp), f"submits what is stale: {stamp}"
                assert stamp[:4] not in {submit.stamp[:4] for submit in self.submits}, "the same turn twice"
                self.submits.append(effect)
                self.live[stamp[:4]] = effect
            case Abort(stamp):
                self.live.pop(stamp[:4], None)
            case Emit(_, seq, content):
                assert content is None or self.admits(content), f"{effect.event} is stale (G1)"
                if seq:
                    self.seqs.add(seq)
            case Wake(at_ns):
                self.wake_at = at_ns
            case Release(reason):
                self.released.append(reason)
                self.wake_at = None
                assert not self.live, "turns are still at work (G3)"
            case _:
                pass

    def _raise(self, fence: Fence) -> None:
        before = self.fences.get(fence.slot)
        assert before is None or fence.epoch > before.epoch, "a fence only grows"
        self.fences[fence.slot] = fence

    def admits(self, stamp: Stamp) -> bool:
        fence = self.fences.get(stamp.slot)
        return fence is not None and fence.admits(stamp)


class Thinker:
    """Keeps its messages exactly as the contract of `Continuity.context` lets it."""

    def __init__(self) -> None:
        self.items: list[tuple[Role, str]] = []

    def start(self, submit: Submit) -> list[tuple[Role, str]]:
        """What the model sees in this turn."""
        keep, new = read_context(submit.payload)
        assert keep <= len(self.items), "the session counts on messages that are not there"
        items = [*self.items[:keep], *new]
        if submit.params["side"] is not True:
            self.items = items
        return list(items)

    def forget(self, count: int) -> None:
        first = 1 if self.items and self.items[0][0] is Role.SYSTEM else 0
        del self.items[first : first + count]

    def replied(self, text: str) -> None:
        self.items.append((Role.ASSISTANT, text))


@dataclass
class Voice:
    """The last stage of one turn."""

    drive: "Drive"
    submit: Submit
    seq: int = 0
    text: str = ""
    samples: int = 0
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(sample, characters) at the start of each word."""

    @property
    def stamp(self) -> Stamp:
        return self.submit.stamp._replace(stage=3, seq=self.seq)

    def chunk(self, text: str, ms: int = 250) -> StageSpoke:
        """The next chunk: the words are spread evenly over it, and each ends with its blank."""
        samples = ms * SPEAKS
        words = text.split(" ")[:-1]
        flat: list[int] = []
        at = len(self.text)
        for index, word in enumerate(words):
            mark = (self.samples + index * samples // len(words), at)
            self.marks.append(mark)
            flat += mark
            at += len(word) + 1
        spoke = StageSpoke(
            self.stamp, "code2wav", Payload("pcm", {"text": text, "marks": tuple(flat)}, bytes(2 * samples))
        )
        self.seq += 1
        self.text += text
        self.samples += samples
        return spoke

    def say(self, text: str, ms: int = 250) -> list[Effect]:
        return self.drive.tell(self.chunk(text, ms))

    def write(self, text: str) -> list[Effect]:
        """The next piece of a text turn."""
        spoke = StageSpoke(self.stamp, "thinker", Payload("text", {"text": text}))
        self.seq += 1
        self.text += text
        return self.drive.tell(spoke)

    def end(self, outcome: Outcome = Outcome.DONE, reason: str = "") -> list[Effect]:
        (stage,) = self.submit.outputs
        if outcome is Outcome.DONE and self.submit.params["side"] is not True:
            self.drive.thinker.replied(self.text)
        return self.drive.tell(StageEnded(self.submit.stamp, stage, outcome, reason))

    def heard(self, ms: float) -> str:
        """What somebody has heard of it who listened so long: nothing of a word that had not begun, nor of the last."""
        samples = round(ms * SPEAKS)
        passed = [char for sample, char in self.marks if sample <= samples]
        if samples >= self.samples:
            return self.text
        return self.text[: passed[-1]] if passed else ""


class Drive(Perform):
    """A conversation, attached, one second after it was opened."""

    def __init__(
        self,
        settings: Settings | None = None,
        limits: Limits | None = None,
        shape: Shape | None = None,
        attach: bool = True,
    ) -> None:
        now = 5_000 * S
        talk = Conversation(
            "sess_1", SLOT, GENERATION, limits or Limits(), CountedIds(), now, settings or BRISK, shape or Shape()
        )
        super().__init__(talk, now)
        self.talk = talk
        self.thinker = Thinker()
        self.auto_start = True
        """The thinker starts each turn as soon as it is submitted."""
        self.seen: list[list[tuple[Role, str]]] = []
        """What the model saw in each started turn."""
        self.user = User(self)
        if attach:
            self.tell(Attached(1))
        self.pass_ms(1000)

    def _perform(self, effect: Effect) -> None:
        super()._perform(effect)
        match effect:
            case Submit() if self.auto_start:
                self.seen.append(self.thinker.start(effect))
            case Feed("thinker", Payload("forget", meta)):
                count = meta["items"]
                assert isinstance(count, int)
                self.thinker.forget(count)
            case _:
                pass

    def voice(self, index: int = -1) -> Voice:
        """The voice of a submitted turn, by default the latest."""
        return Voice(self, self.submits[index])

    def find(self, finding: Finding) -> list[Effect]:
        return self.tell(StageFound("ears", write_finding(finding)))

    @property
    def items(self) -> list[Item]:
        return self.talk.items

    @property
    def busy(self) -> bool:
        return self.talk.busy

    @property
    def texts(self) -> list[str]:
        return [item.text for item in self.items]

    @property
    def statuses(self) -> list[ResponseStatus]:
        return [done.response.status for done in self.all(ResponseDone)]

    @property
    def held(self) -> bool:
        held = False
        for effect in self.effects:
            if isinstance(effect, Hold | Unhold):
                held = isinstance(effect, Hold)
        return held

    def audio(self, response_id: str) -> list[AudioDelta]:
        return [delta for delta in self.all(AudioDelta) if delta.response_id == response_id]

    def check(self) -> None:
        """Order of everything that was emitted (once: replays are not told apart here)."""
        unique: dict[int, Event] = {}
        for effect in self.effects:
            if isinstance(effect, Emit) and effect.seq:
                unique.setdefault(effect.seq, effect.event)
        numbers = sorted(unique)
        check_grammar([unique[number] for number in numbers], whole=len(numbers) == max(numbers, default=0))
        if self.released:
            assert len(self.released) == 1
            assert isinstance(self.effects[-1], Release | Count)


class PlainDrive(Perform):
    """A plain session, attached."""

    def __init__(self, limits: Limits | None = None, attach: bool = True) -> None:
        now = 5_000 * S
        super().__init__(PlainSession("sess_1", SLOT, GENERATION, limits or Limits(), CountedIds(), now), now)
        self.requests = 0
        if attach:
            self.tell(Attached(1))

    def ask(self, *outputs: str, request: str = "") -> str:
        """Ask for a turn; its request id."""
        self.requests += 1
        request = request or f"request {self.requests}"
        self.tell(Asked("first", frozenset(outputs or ("third",)), Payload("request"), request_id=request))
        return request

    def speak(self, submit: Submit, seq: int, stage: str = "third", nbytes: int = 8) -> list[Effect]:
        return self.tell(
            StageSpoke(submit.stamp._replace(seq=seq), stage, Payload("unit", {"seq": seq}, bytes(nbytes)))
        )

    def end(
        self, submit: Submit, stage: str = "third", outcome: Outcome = Outcome.DONE, reason: str = ""
    ) -> list[Effect]:
        return self.tell(StageEnded(submit.stamp, stage, outcome, reason))

    @property
    def ends(self) -> list[tuple[str, str, str]]:
        return [(end.request_id, end.status, end.reason) for end in self.all(TurnDone)]


@dataclass
class User:
    """Somebody at the microphone: frames of 32 ms, and the findings that ears make of them."""

    drive: Drive
    at: int = 0
    utterance: int = 0
    start: int = 0
    voiced: int = 0
    end: int = 0
    silence: int = 0
    open: bool = False

    def _frame(self) -> None:
        self.drive.tell(AudioAppended(bytes(2 * FRAME)))
        self.drive.pass_ms(32)
        self.at += FRAME

    def listen(self, ms: int) -> None:
        """Silence, and nobody speaks."""
        for _ in range(ms // 32):
            self._frame()

    def speak(self, ms: int, level_db: float = -25.0) -> None:
        for _ in range(-(-ms // 32)):
            self._frame()
            if not self.open:
                self.open = True
                self.utterance += 1
                self.start, self.voiced = max(0, self.at - FRAME - 300 * HEARS), 0
                self.drive.find(SpeechBegan(self.utterance, self.start, level_db))
                self.voiced = FRAME
            else:
                self.voiced += FRAME + self.silence
            self.end, self.silence = self.at, 0
            self.drive.find(SpeechWent(self.utterance, self.at, self.voiced, level_db))

    def pause(self, ms: int, text: str | None = None, completeness: float = 1.0) -> None:
        """Silence after speech; the transcript `text` comes at the speculative silence, 160 ms."""
        for _ in range(-(-ms // 32)):
            self._frame()
            self.silence += FRAME
            if self.silence >= 3 * FRAME:
                self.drive.find(SpeechPaused(self.utterance, self.end, self.silence))
            if text is not None and self.silence == 5 * FRAME:
                self.hear(text, completeness)

    def hear(self, text: str, completeness: float = 1.0, final: bool = False) -> None:
        self.drive.find(Heard(self.utterance, self.start, self.at, text, completeness, final))

    def fade(self) -> None:
        self.open = False
        self.silence = 0
        self.drive.find(SpeechFaded(self.utterance))

    def turn(self, text: str, ms: int = 800) -> None:
        """A whole turn, pause and final transcript included."""
        self.speak(ms)
        self.pause(512, text)
        self.closed()

    def closed(self) -> None:
        """The utterance was committed: the next speech is another."""
        self.open = False
        self.silence = 0


# -- grammar -------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What came of one response so far."""

    conversational: bool
    order: list[str] = field(default_factory=list)
    text: str = ""
    done: bool = False


STEPS = [
    "created",
    "output_added",
    "item_added",
    "part_added",
    "delta",
    "audio_done",
    "text_done",
    "part_done",
    "output_done",
    "item_done",
    "done",
]


def check_grammar(events: list[Event], whole: bool) -> None:
    """R1, R2, R3, R4, R9: for each response in order, each step at most once, and what was opened is closed.

    `whole` says that no event is missing: those that were void before a resume are.
    """
    responses: dict[str, Seen] = {}
    owners: dict[str, str] = {}
    for event in events:
        for response_id, step, text in steps(event, owners):
            if step == "created":
                assert response_id not in responses, "created twice (R1)"
                assert isinstance(event, ResponseCreated)
                responses[response_id] = Seen(event.response.in_conversation)
            seen = responses[response_id]
            assert not seen.done, f"{event} after response.done (X2)"
            if seen.order and step != "delta":
                assert STEPS.index(step) > STEPS.index(seen.order[-1]), f"{step} after {seen.order} (R2)"
            seen.order.append(step)
            if step == "delta":
                seen.text += text
            if step == "text_done" and whole:
                assert text == seen.text, "the deltas are not the text (R4)"
            seen.done = step == "done"
    for response_id, seen in responses.items():
        steps_seen = set(seen.order)
        if not seen.done:
            continue
        opened = "output_added" in steps_seen
        for step in ("part_added", "text_done", "part_done", "output_done"):
            assert (step in steps_seen) == opened, f"{response_id}: {seen.order} (R9)"
        for step in ("item_added", "item_done"):
            assert (step in steps_seen) == (opened and seen.conversational), f"{response_id}: {seen.order} (R3, R8)"


def steps(event: Event, owners: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """(response, step, text) of an event that belongs to one."""
    match event:
        case ResponseCreated(response):
            yield response.id, "created", ""
        case ResponseDone(response):
            yield response.id, "done", ""
        case OutputItemAdded(response_id, item):
            owners[item.id] = response_id
            yield response_id, "output_added", ""
        case ItemAdded(item) if item.id in owners:
            yield owners[item.id], "item_added", ""
        case ItemDone(item) if item.id in owners:
            yield owners[item.id], "item_done", ""
        case _:
            yield from content_steps(event)


def content_steps(event: Event) -> Iterator[tuple[str, str, str]]:
    match event:
        case PartAdded(response_id):
            yield response_id, "part_added", ""
        case AudioTranscriptDelta(response_id, _, delta) | TextDelta(response_id, _, delta):
            yield response_id, "delta", delta
        case AudioDelta(response_id):
            yield response_id, "delta", ""
        case AudioDone(response_id):
            yield response_id, "audio_done", ""
        case AudioTranscriptDone(response_id, _, text) | TextDone(response_id, _, text):
            yield response_id, "text_done", text
        case PartDone(response_id):
            yield response_id, "part_done", ""
        case OutputItemDone(response_id, item):
            yield response_id, "output_done", item.text
        case _:
            pass


def without_wakes(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, Wake | Count)]


def told(effects: list[Effect]) -> list[Event]:
    """The events among the effects."""
    return [effect.event for effect in effects if isinstance(effect, Emit)]


def closing(effects: list[Effect]) -> bool:
    """Whether the effects end the session as they must: the terminal event, then the release."""
    left = [effect for effect in effects if not isinstance(effect, Wake)]
    return (
        len(left) >= 2
        and isinstance(left[-1], Release)
        and isinstance(left[-2], Emit)
        and isinstance(left[-2].event, SessionClosed)
    )


QUIET = replace(BRISK, turn_detection=None)
"""The client commits by hand."""
