"""A simulated voice pipeline and people who talk to it: rates are a thousandth of real ones, one sample a millisecond.

The microphone's samples say who speaks: 0 is silence, anything else the speaker. The reply's samples say whose they
are, so that a byte of one session in another is seen (G6). The thinker keeps the conversation as a real one keeps its
KV and compares it, turn by turn, with what the session means it to stand for (G8).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from simclients import Act, Client, Desk, Link, Manners, Watched
from simlaws import Ledger
from simworkers import BrokenError, Host, Make
from simworld import MS, S, World

from omni_live.pipelines.registry import VOICE
from omni_live.protocols.desk import Mailbox
from omni_live.runtime.orchestrator import UnavailableError
from omni_live.server.desk import Seat
from omni_live.sessions.continuity import Message, read_context
from omni_live.sessions.conversation import Conversation
from omni_live.sessions.effects import SnapshotReady
from omni_live.sessions.events import (
    AudioDelta,
    AudioTranscriptDelta,
    ContextDropped,
    ErrorTold,
    Event,
    ItemTruncated,
    OutputItemAdded,
    ResponseDone,
    TextDelta,
)
from omni_live.sessions.exchange import SIDE_LANE, Exchange, Shape
from omni_live.sessions.findings import (
    Finding,
    Heard,
    SpeechBegan,
    SpeechFaded,
    SpeechPaused,
    SpeechWent,
    write_finding,
)
from omni_live.sessions.history import History
from omni_live.sessions.ids import CountedIds
from omni_live.sessions.inputs import (
    AudioAppended,
    AudioCleared,
    AudioCommitted,
    BargeInAsked,
    CancelAsked,
    ClientInput,
    ItemCreateAsked,
    ItemDeleteAsked,
    ItemTruncateAsked,
    PlaybackAcked,
    RespondAsked,
    RestoreAsked,
    SnapshotAsked,
    TextAppended,
)
from omni_live.sessions.items import Item, Modality, Response, ResponseStatus, Role
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.session import Session
from omni_live.sessions.settings import Settings, TurnDetection
from omni_live.sessions.stamp import SessionKey, Stamp, session_key

RATE_HZ = 1000
CHUNK_MS = 250
SHAPE = Shape(input_rate_hz=RATE_HZ, output_rate_hz=RATE_HZ)
MIN_SPEECH_MS = 96
SPECULATIVE_MS = 160
DETECTION = TurnDetection(
    silence_duration_ms=500, min_silence_ms=400, speculative_ms=SPECULATIVE_MS, min_speech_ms=MIN_SPEECH_MS
)
MOST_PEOPLE = 5
TRAVEL_MS = 25
"""What a frame takes to the client at most on a fast line: it plays on until the news is there."""


Lines = list[tuple[Role, str]]


def voice_of(session: SessionKey) -> int:
    """The sample value that only this session's reply has."""
    return (session * 2654435761 >> 7) % 32_000 + 1


def words_of(turn: int, lines: Lines) -> list[str]:
    """What the thinker says in this turn of this conversation."""
    size = sum(len(text) for _, text in lines)
    return [f"r{turn}c{size}w{index} " for index in range(1 + (turn * 7 + size) % 11)]


@dataclass
class Ear:
    """What the ears keep for a session."""

    at: int = 0
    utterance: int = 0
    began: int | None = None
    end: int = 0
    told: bool = False
    heard_at: int = -1
    """The end of speech that the latest transcript covers."""
    detect: bool = True


class Ears(Make):
    """Voice activity by the sample, with a transcript at each pause and on commit."""

    def listen(self, host: Host, payload: Payload) -> None:
        ear = host.memory.setdefault("ear", Ear())
        assert isinstance(ear, Ear)
        match payload.kind:
            case "configure":
                ear.at = max(ear.at, _whole(payload, "position"))
                ear.utterance = max(ear.utterance, _whole(payload, "utterance"))
                ear.detect = bool(payload.meta["detect"])
            case "pcm":
                self._frame(host, ear, bytes(payload.body))
            case "commit":
                self._committed(host, ear, _whole(payload, "utterance"))
            case "discard" | "clear":
                ear.began = None
            case kind:
                raise AssertionError(f"the ears do not know {kind}")

    def _frame(self, host: Host, ear: Ear, pcm: bytes) -> None:
        samples = len(pcm) // 2
        ear.at += samples
        if not ear.detect:
            return
        if pcm[0] or pcm[1]:
            if ear.began is None:
                ear.utterance += 1
                ear.began, ear.told = ear.at - samples, False
            ear.end = ear.at
            voiced = ear.at - ear.began
            if not ear.told and voiced >= MIN_SPEECH_MS:
                ear.told = True
                self._say(host, SpeechBegan(ear.utterance, ear.began, -20.0))
            if ear.told:
                self._say(host, SpeechWent(ear.utterance, ear.at, voiced, -20.0))
        elif ear.began is not None:
            silence = ear.at - ear.end
            if ear.told:
                self._say(host, SpeechPaused(ear.utterance, ear.end, silence))
                if silence >= SPECULATIVE_MS and ear.heard_at != ear.end:
                    self._transcribe(host, ear, ear.utterance, ear.began, final=False)
            elif silence >= SPECULATIVE_MS:
                ear.began = None
                self._say(host, SpeechFaded(ear.utterance))

    def _transcribe(self, host: Host, ear: Ear, utterance: int, start: int, final: bool) -> None:
        ear.heard_at = ear.end
        text = f"words {start} to {ear.end}"
        self._say(host, Heard(utterance, start, ear.end, text, (ear.end // 7 % 5) / 4, final))

    def _committed(self, host: Host, ear: Ear, utterance: int) -> None:
        if utterance == 0:
            ear.utterance += 1
            utterance = ear.utterance
        start = ear.began if ear.began is not None else max(0, ear.end - 100)
        if utterance == ear.utterance:
            ear.began = None
        self._transcribe(host, ear, utterance, start, final=True)

    def _say(self, host: Host, finding: Finding) -> None:
        host.find(write_finding(finding))


def _whole(payload: Payload, name: str) -> int:
    value = payload.meta[name]
    assert isinstance(value, int)
    return value


class Thinker(Make):
    """Says a few words; keeps the conversation, and checks it against what the session means it to be."""

    compute_ns = (1 * MS, 30 * MS)
    chokes = prompt = True

    def __init__(self) -> None:
        self.meant: dict[tuple[int, ...], Lines] = {}
        """By the stamp's first four fields: all that the model shall see in this turn."""

    def turn(self, host: Host, stamp: Stamp, params: Mapping[str, Scalar], payload: Payload) -> Iterable[Payload]:
        keep, fresh = read_context(payload)
        kept = self._lines(host)
        if keep > len(kept) and host.memory.get("choked"):
            raise BrokenError  # the session has not heard of it yet
        assert keep <= len(kept), f"turn {stamp} keeps {keep} messages of {len(kept)} (G8)"
        lines: Lines = [*kept[:keep], *fresh]
        assert lines == self.meant[stamp[:4]], f"turn {stamp} sees {lines}, not {self.meant[stamp[:4]]} (G8)"
        words = words_of(stamp.turn, lines)
        if not params["side"]:
            # What a real one would have written by the time it is cut is anybody's guess: it is all there.
            host.memory.pop("choked", None)
            host.memory["lines"] = [*lines, (Role.ASSISTANT, "".join(words))]
        return [Payload("text", {"text": word}) for word in words]

    def listen(self, host: Host, payload: Payload) -> None:
        assert payload.kind == "forget"
        lines = self._lines(host)
        first = 1 if lines and lines[0][0] is Role.SYSTEM else 0
        del lines[first : first + _whole(payload, "items")]

    def fork(self, host: Host, into: Host) -> None:
        into.memory["lines"] = list(self._lines(host))

    def snapshot(self, host: Host) -> Payload:
        return Payload("kv", body=json.dumps(self._lines(host)).encode())

    def restore(self, host: Host, payload: Payload) -> None:
        """As the real one: what it computed comes back, the messages come with the next turn."""
        json.loads(bytes(payload.body))
        host.memory["lines"] = []

    def _lines(self, host: Host) -> Lines:
        lines = host.memory.setdefault("lines", [])
        assert isinstance(lines, list)
        return lines


class Talker(Make):
    compute_ns = (1 * MS, 20 * MS)


@dataclass(frozen=True, slots=True)
class Wave:
    """How far the sound of a turn has come."""

    samples: int = 0
    chars: int = 0


class Code2Wav(Make):
    """A chunk of sound for each word, marked at its start and end."""

    compute_ns = (5 * MS, 60 * MS)

    def turn(self, host: Host, stamp: Stamp, params: Mapping[str, Scalar], payload: Payload) -> Iterable[Payload]:
        del params
        text = str(payload.meta["text"])
        waves = host.memory.setdefault("waves", {})
        assert isinstance(waves, dict)
        wave = waves.get(stamp[:4], Wave())
        pcm = array("h", [voice_of(host.session)]) * CHUNK_MS
        after = waves[stamp[:4]] = Wave(wave.samples + CHUNK_MS, wave.chars + len(text))
        marks = (wave.samples, wave.chars, after.samples, after.chars)
        return [Payload("pcm", {"text": text, "marks": marks}, pcm.tobytes())]


class WatchedTalk(Watched, Conversation):
    """Tells the thinker's judge what each turn shall see."""

    judge: Thinker
    restored: tuple[str, ...] | None = None
    """The items that a restore brought back, until a turn is made on them."""

    def check(self) -> None:
        assert len(self.items) <= self.limits.conversation_items, f"{len(self.items)} items (G11)"
        room = self.limits.client_credits
        for exchange in (self._exchange, self._tried, self._side):
            if exchange is not None:
                assert len(exchange.reply.waiting) <= room, f"{len(exchange.reply.waiting)} chunks wait (G11)"

    def _emit(self, event: Event, content: Stamp | None = None, nbytes: int = 0) -> None:
        super()._emit(event, content, nbytes)
        if isinstance(event, ResponseDone) and event.response.status is ResponseStatus.COMPLETED:
            self._check_words(event.response)

    def _check_words(self, done: Response) -> None:
        """A reply that is done has every word of its turn, made on what the turn was given (G1, G4)."""
        stamps = self.ledger.stamps[done.turn]
        stamp = next(one for one in reversed(stamps) if (one.lane != SIDE_LANE) == done.in_conversation)
        meant = "".join(words_of(done.turn, self.judge.meant[stamp[:4]]))
        said = "" if done.item is None else done.item.text
        assert said == meant, f"{self.ledger.name}: {done.id} is done with {said!r}, not {meant!r} (G1, G4)"

    def _submit(self, exchange: Exchange, messages: list[Message]) -> None:
        self.judge.meant[exchange.stamp[:4]] = [(message.role, message.text) for message in messages]
        super()._submit(exchange, messages)

    def _adopt(self, exchange: Exchange) -> None:
        now = tuple(self._messages())
        assert exchange.messages == now, f"a try is adopted that was made on {exchange.messages}, not {now} (G8)"
        super()._adopt(exchange)

    def _take_on(self, history: History) -> None:
        super()._take_on(history)
        assert tuple(self.items) == history.items, "a restore brings other items back than the snapshot's (G8)"

    def _open_item(self, exchange: Exchange) -> Item:
        if exchange.item is None and exchange.lane != SIDE_LANE:
            now = {item.id: item.text for item in self.items if item.role is Role.ASSISTANT}
            for message in exchange.messages:
                meant = now.get(message.item_id, message.text)
                assert message.text == meant, f"a reply speaks that was made on {message}, heard was {meant!r} (G8)"
        return super()._open_item(exchange)


@dataclass
class Player:
    """A client's loudspeaker: what came is played in real time, without gaps where it came in time."""

    buffer_ms: int = 0
    """It begins so long after the first of it came."""
    due: int = 0
    """Samples that came."""
    played_before: int = 0
    since_ns: int | None = None
    stopped: bool = False

    def stop(self, now: int) -> int:
        """Be silent from now on; returns the samples that were played."""
        self.played_before, self.since_ns, self.stopped = self.at(now), None, True
        return self.played_before

    def play(self, samples: int, now: int) -> None:
        if self.since_ns is None:
            self.since_ns = now + self.buffer_ms * MS
        else:
            self.played_before, self.since_ns = self.at(now), max(now, self.since_ns)
        self.due += samples

    def at(self, now: int) -> int:
        """Samples played by now."""
        if self.since_ns is None:
            return self.played_before
        return min(self.due, self.played_before + max(0, now - self.since_ns) // MS)


@dataclass(frozen=True, slots=True)
class Cut:
    """What the server says was heard of a reply that it cut, and where it said so."""

    heard_ms: int
    text: str
    link: Link


@dataclass(frozen=True, slots=True)
class Habits:
    """How somebody talks."""

    acks: bool = True
    """Says how far it has played what it got."""
    reports: bool = True
    """Says it now and then; else only of what was cut."""
    buffer_ms: int = 0
    exact: bool = False
    """Its line is such that what the server says was heard is what was played, to one chunk."""
    text: bool = False
    """Wants to be answered in writing."""
    verbs: bool = False
    """Forks, takes snapshots and goes back to them."""
    fussy: int = 4
    """Weight of commands in the middle of talk."""
    types: int = 4
    speaks: int = 30
    hushes: int = 40
    frame_ms: int = 32


class Talkative(Client):
    """Somebody with an open microphone who talks, listens, interrupts, types, and has a bad line."""

    pipeline = VOICE.name
    greets = True

    def __init__(
        self,
        world: World,
        desk: Desk,
        name: str,
        manners: Manners,
        habits: Habits,
        judge: Thinker,
        crowd: list[Talkative],
    ) -> None:
        super().__init__(world, desk, name, manners)
        self.judge = judge
        self.crowd = crowd
        """Everybody who talks; one may go back to another's snapshot."""
        crowd.append(self)
        self.habits = habits
        self.parent: Talkative | None = None
        """Whose session this one's is forked from."""
        self.ended: set[str] = set()
        self.snapshots: list[SnapshotReady] = []
        self.tickets: set[int] = set()
        """Snapshots that were asked for and are not there yet."""
        self._twins = 0
        self._players: dict[str, Player] = {}
        self._responses: dict[str, str] = {}
        self._cut_last: tuple[str, Cut] | None = None
        """The item that was cut last since the server spoke."""
        self._truncated: set[str] = set()
        """Items of which the client itself may have said how much of them counts, and those that are gone."""
        self._speaking = False
        self._deaf_at = 0
        self._voice = 1 + int(world.draw() * 30_000)
        self._tickets = 0
        self._last_status: ResponseStatus | None = None

    def make_session(self, slot: int, generation: int) -> tuple[Session, Ledger]:
        key, now, limits = session_key(slot, generation), self.world.now(), self.world.plan.limits
        session_id, ids = f"sess_{self.name}", CountedIds(f"{key:x}.")
        parent = self.parent.session if self.parent is not None else None
        if isinstance(parent, Conversation):
            session = parent.forked(session_id, slot, generation, ids, now)
        else:
            modality = Modality.TEXT if self.habits.text else Modality.AUDIO
            settings = Settings(modality=modality, turn_detection=DETECTION)
            session = Conversation(session_id, slot, generation, limits, ids, now, settings, SHAPE)
        session.__class__ = WatchedTalk
        assert isinstance(session, WatchedTalk)
        session.judge = self.judge
        ledger = Ledger(self.world, key, self.name)
        session.watch(self.world, ledger)
        return session, ledger

    def open(self, seat: Seat, post: Mailbox) -> None:
        parent, self.parent = self.parent, None
        if parent is None:
            super().open(seat, post)
        elif parent.seat is None or parent.session is None:
            raise UnavailableError("", 0.0)
        else:
            self.world.it.fork(parent.seat, seat, post)
            self.world.count("sim_forks")

    def opened(self) -> None:
        self._players.clear()
        self._responses.clear()
        self._cut_last = None
        self.ended.clear()
        self.tickets.clear()
        self._microphone(self.session)
        if self.habits.acks and self.habits.reports:
            self._tell_position(self.session)

    # -- the loops of its life

    def acts(self) -> dict[Act, int]:
        acts: dict[Act, int] = {
            self.speak: self.habits.speaks,
            self.hush: self.habits.hushes,
            self.type: self.habits.types,
            self.fuss: self.habits.fussy,
            self.aside: self.habits.fussy // 3,
        }
        if self.habits.verbs:
            acts |= {self.fork: 5, self.take_snapshot: 8, self.restore: 8}
        return acts

    def leave(self) -> None:
        """Say no more; the microphone goes on until the last word is surely heard."""
        super().leave()
        self._speaking = False
        self._deaf_at = self.world.now() + S

    def speak(self) -> None:
        self._speaking = True

    def hush(self) -> None:
        self._speaking = False

    def type(self) -> None:
        self.tell(TextAppended(f"typed at {self.world.now()}"))

    def aside(self) -> None:
        """Note something down and ask for an answer beside the conversation, whatever runs in it."""
        self.tell(ItemCreateAsked(Item("", Role.USER, f"noted at {self.world.now()}", spoken=False)))
        self.tell(RespondAsked(out_of_band=True))

    def fuss(self) -> None:
        item = next(reversed(self._responses), "no such item")
        told: Sequence[ClientInput] = (
            CancelAsked(),
            BargeInAsked(),
            RespondAsked(),
            RespondAsked(out_of_band=True),
            RespondAsked(modality=Modality.TEXT),
            AudioCommitted(),
            AudioCleared(),
            ItemDeleteAsked(item),
            ItemCreateAsked(Item("", Role.USER, f"noted at {self.world.now()}", spoken=False)),
            ItemTruncateAsked(item, int(self.world.draw() * 800)),
        )
        chosen = self.world.random.choice(told)
        if isinstance(chosen, ItemTruncateAsked | ItemDeleteAsked):
            self._truncated.add(item)
        self.tell(chosen)

    def _microphone(self, session: Session | None) -> None:
        if session is None or session is not self.session or (self.leaving and self.world.now() > self._deaf_at):
            return
        if self.on_line:
            value = self._voice if self._speaking else 0
            self.tell(AudioAppended(value.to_bytes(2, "little") * self.habits.frame_ms))
        self.world.post(self.world.now() + self.habits.frame_ms * MS, lambda: self._microphone(session))

    def _tell_position(self, session: Session | None) -> None:
        if session is None or session is not self.session:
            return
        if self.on_line:
            for response in tuple(self._players)[-2:]:  # one may run beside the conversation
                played = self._players[response].at(self.world.now())
                self.tell(PlaybackAcked(float(played), response_id=response))
        self.world.post(self.world.now() + 250 * MS, lambda: self._tell_position(session))

    # -- forks and snapshots

    def fork(self) -> None:
        """Somebody goes on from here in a session of its own."""
        if self.session is None or len(self.crowd) >= MOST_PEOPLE:
            return
        self._twins += 1
        name = f"{self.name}.{self._twins}"
        twin = Talkative(self.world, self.desk, name, self.manners, self.habits, self.judge, self.crowd)
        twin.parent = self
        twin.want()
        twin.live()

    def take_snapshot(self) -> None:
        if self.seat is not None and self.session is not None:
            self._tickets += 1
            if not self.tickets:
                self.tickets.add(self._tickets)
            self.world.it.tell(self.seat, SnapshotAsked(self._tickets))

    def snapshot(self, ready: SnapshotReady) -> None:
        assert ready.ticket in self.tickets, f"{self.name} gets snapshot {ready.ticket} unasked (G5)"
        self.tickets.discard(ready.ticket)
        self.snapshots.append(ready)
        self.world.count("sim_snapshots" if ready.state is not None else "sim_snapshots_stateless")

    def restore(self) -> None:
        """Go back to a snapshot: to one's own, or to somebody else's."""
        shots = [shot for person in self.crowd for shot in person.snapshots]
        if self.seat is None or self.session is None or not shots:
            return
        shot = self.world.random.choice(shots)
        self.world.it.tell(self.seat, RestoreAsked(shot.history, shot.state))
        self.world.count("sim_restores")

    # -- what comes

    def got(self, event: Event) -> None:
        match event:
            case AudioDelta(response, item, pcm, start):
                assert response not in self.ended, f"{self.name}: sound of {response} after its end (G1, G4)"
                assert self.ledger is not None
                own = voice_of(self.ledger.key).to_bytes(2, "little")
                assert pcm == own * (len(pcm) // 2), f"{self.name} hears another session (G6)"
                player = self._players.setdefault(response, Player(self.habits.buffer_ms))
                if not self.gap_to and not self.forgot:
                    assert start == player.due, f"{self.name}: sound from {start} after {player.due} (G7)"
                    assert not player.stopped, f"{self.name}: sound of {response}, which is cut (G1)"
                player.play(len(pcm) // 2, self.world.now())
                self._responses[item] = response
            case AudioTranscriptDelta(response) | TextDelta(response):
                assert response not in self.ended, f"{self.name}: text of {response} after its end (G1, G4)"
            case OutputItemAdded():
                self._check_heard()
            case ResponseDone(response):
                self.ended.add(response.id)
                if response.in_conversation:
                    self._last_status = response.status
            case ItemTruncated(item, _, heard_ms, text):
                self._cut(item, heard_ms, text)
            case ContextDropped(items):
                self._truncated.update(items)
            case ErrorTold("snapshot_in_progress"):
                self.world.count("sim_snapshot_refused")
            case _:
                pass

    def answered(self) -> bool:
        """Whether the last reply that it heard of is a whole one."""
        return self._last_status is ResponseStatus.COMPLETED

    def _cut(self, item: str, heard_ms: int, text: str) -> None:
        """The server cut a reply: stop playing it and say, once, how far it came."""
        response = self._responses.get(item, "")
        player = self._players.get(response, Player())
        words = len(text.split())
        assert words <= heard_ms // CHUNK_MS, f"{self.name}: {heard_ms} ms of {item} are {text!r} (G8)"
        if not player.stopped:
            played = player.stop(self.world.now())
            if self.habits.acks:
                self.tell(PlaybackAcked(float(played), response_id=response))
        if response in self._players and self.link is not None:
            self._cut_last = (item, Cut(heard_ms, text, self.link))

    def _check_heard(self) -> None:
        """The server speaks again: by now it knows what was heard of what it cut (G8)."""
        session, link = self.session, self.link
        if not self.habits.exact or session is None or link is None:
            return
        item, cut = self._cut_last or ("", None)
        self._cut_last = None
        if cut is None or cut.link is not link or item in self._truncated:
            return
        played_ms = self._players[self._responses[item]].at(self.world.now())
        what = f"{self.name}: of {item} {cut.heard_ms} ms count, {cut.text!r}, and {played_ms} were played (G8)"
        assert abs(cut.heard_ms - played_ms) <= CHUNK_MS + TRAVEL_MS, what
        assert len(cut.text.split()) == cut.heard_ms // CHUNK_MS, what
        self.world.count("sim_heard_exactly")
