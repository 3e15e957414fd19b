"""A simulated voice pipeline and people who talk to it: rates are a thousandth of real ones, one sample a millisecond.

The microphone's samples say who speaks: 0 is silence, anything else the speaker. The reply's samples say whose they
are, so that a byte of one session in another is seen (G6). The thinker keeps the conversation as a real one keeps its
KV and compares it, turn by turn, with what the session means it to stand for (G8).
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from simclients import Client, Desk, Frame
from simworkers import Host, Make
from simworld import MS, World

from omni_live.sessions.continuity import Message, read_context
from omni_live.sessions.conversation import SIDE_LANE, Conversation, Exchange, Shape
from omni_live.sessions.events import (
    AudioDelta,
    AudioTranscriptDelta,
    Event,
    ItemTruncated,
    ResponseCreated,
    ResponseDone,
    TextDelta,
)
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
    AudioAppended,
    BargeInAsked,
    CancelAsked,
    CloseAsked,
    Input,
    PlaybackAcked,
    RespondAsked,
    TextAppended,
)
from omni_live.sessions.items import Item, Modality, Role
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.session import Session
from omni_live.sessions.stamp import SessionKey, Stamp, session_key

RATE_HZ = 1000
FRAME_MS = 32
CHUNK_MS = 250
SHAPE = Shape(input_rate_hz=RATE_HZ, output_rate_hz=RATE_HZ)
MIN_SPEECH_MS = 96
SPECULATIVE_MS = 160


def voice_of(session: SessionKey) -> int:
    """The sample value that only this session's reply has."""
    return (session * 2654435761 >> 7) % 32_000 + 1


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
                self._frame(host, ear, array("h", bytes(payload.body)))
            case "commit":
                self._committed(host, ear, _whole(payload, "utterance"))
            case "discard" | "clear":
                ear.began = None
            case kind:
                raise AssertionError(f"the ears do not know {kind}")

    def _frame(self, host: Host, ear: Ear, pcm: Sequence[int]) -> None:
        ear.at += len(pcm)
        if not ear.detect:
            return
        if pcm[0]:
            if ear.began is None:
                ear.utterance += 1
                ear.began, ear.told = ear.at - len(pcm), False
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


Lines = list[tuple[Role, str]]


class Thinker(Make):
    """Says a few words; keeps the conversation, and checks it against what the session means it to be."""

    compute_ns = (1 * MS, 30 * MS)

    def __init__(self) -> None:
        self.meant: dict[tuple[int, ...], Lines] = {}
        """By the stamp's first four fields: all that the model shall see in this turn."""

    def turn(self, host: Host, stamp: Stamp, params: Mapping[str, Scalar], payload: Payload) -> Iterable[Payload]:
        keep, fresh = read_context(payload)
        kept = host.memory.setdefault("lines", [])
        assert isinstance(kept, list)
        assert keep <= len(kept), f"turn {stamp} keeps {keep} messages of {len(kept)} (G8)"
        lines: Lines = [*kept[:keep], *fresh]
        assert lines == self.meant[stamp[:4]], f"turn {stamp} sees {lines}, not {self.meant[stamp[:4]]} (G8)"
        words = [f"r{stamp.turn}w{index} " for index in range(1 + stamp.turn * 7 % 11)]
        if not params["side"]:
            # What a real one would have written by the time it is cut is anybody's guess: it is all there.
            host.memory["lines"] = [*lines, (Role.ASSISTANT, "".join(words))]
        return [Payload("text", {"text": word}) for word in words]


class Talker(Make):
    compute_ns = (1 * MS, 20 * MS)


class Code2Wav(Make):
    """A chunk of sound for each word, marked at its start and end."""

    compute_ns = (5 * MS, 60 * MS)

    def turn(self, host: Host, stamp: Stamp, params: Mapping[str, Scalar], payload: Payload) -> Iterable[Payload]:
        text = str(payload.meta["text"])
        turn, samples, chars = host.memory.get("wave", (None, 0, 0))  # type: ignore[misc]
        if turn != stamp[:4]:
            samples = chars = 0
        pcm = array("h", [voice_of(host.session)]) * CHUNK_MS
        marks = (samples, chars, samples + CHUNK_MS, chars + len(text))
        host.memory["wave"] = (stamp[:4], samples + CHUNK_MS, chars + len(text))
        return [Payload("pcm", {"text": text, "marks": marks}, pcm.tobytes())]  # type: ignore[dict-item]


class RecordedTalk(Conversation):
    """Keeps what it says and tells the thinker's judge what each turn shall see."""

    def __init__(self, name: str, slot: int, generation: int, limits: Limits, now: int, judge: Thinker) -> None:
        super().__init__(f"sess_{name}", slot, generation, limits, CountedIds(name), now, shape=SHAPE)
        self.said: list[Event] = []
        self._judge = judge

    def _emit(self, event: Event, content: Stamp | None = None, nbytes: int = 0) -> None:
        self.said.append(event)
        super()._emit(event, content, nbytes)

    def _submit(self, exchange: Exchange, messages: list[Message]) -> None:
        self._judge.meant[exchange.stamp[:4]] = [(message.role, message.text) for message in messages]
        super()._submit(exchange, messages)

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
        self.played_before, self.since_ns = self.at(now), now
        self.due += samples

    def at(self, now: int) -> int:
        """Samples played by now."""
        if self.since_ns is None:
            return self.played_before
        return min(self.due, self.played_before + (now - self.since_ns) // MS)


class Talkative(Client):
    """Somebody with an open microphone who talks, listens, interrupts, types, and has a bad line."""

    def __init__(self, world: World, desk: Desk, name: str, judge: Thinker, acks: bool = True) -> None:
        super().__init__(world, desk, name)
        self.judge = judge
        self.acks = acks
        self.recorded: dict[SessionKey, RecordedTalk] = {}
        self.players: dict[str, Player] = {}
        self.texts: dict[str, str] = {}
        self.ended: set[str] = set()
        self.heard: dict[str, tuple[int, int, bool]] = {}
        """Item -> milliseconds that the server says were heard, those that were played, and whether any sound came."""
        self._speaking = False
        self._voice = 1 + world.random.randrange(30_000)

    def make_session(self, slot: int, generation: int) -> Session:
        limits = self.world.plan.limits
        session = RecordedTalk(self.name, slot, generation, limits, self.world.now(), self.judge)
        self.recorded[session_key(slot, generation)] = session
        return session

    def opened(self) -> None:
        self.players.clear()
        self.ended.clear()
        self.texts.clear()
        self._microphone(self.session)
        if self.acks:
            self._tell_position(self.session)

    # -- the loops of its life

    def live(self) -> None:
        """Begin or stop to speak, or do something else, again and again."""
        if self.leaving:
            self._speaking = False
            return
        if self.session is None:
            self.want()
        else:
            self.world.random.choices(
                (self.speak, self.hush, self.drop, self.come_back, self.ack, self.close, self.type, self.fuss),
                (30, 40, 3, 10, 8, 1, 4, 4),
            )[0]()
        self.world.after(50 * MS, 900 * MS, self.live)

    @property
    def on_line(self) -> bool:
        return self.door is not None and self.door.connection is not None and self.door.connection.open

    def send(self, told: Input) -> None:
        """Tell the session something, if the line is there."""
        if self.on_line:
            self.tell(told)

    def speak(self) -> None:
        self._speaking = True

    def hush(self) -> None:
        self._speaking = False

    def type(self) -> None:
        self.send(TextAppended(f"typed at {self.world.now()}"))

    def close(self) -> None:
        self.tell(CloseAsked())

    def fuss(self) -> None:
        told = self.world.random.choice(
            (
                CancelAsked(),
                BargeInAsked(),
                RespondAsked(),
                RespondAsked(out_of_band=True),
                RespondAsked(modality=Modality.TEXT),
            )
        )
        self.send(told)

    def _microphone(self, session: Session | None) -> None:
        if session is None or session is not self.session:
            return
        value = self._voice if self._speaking else 0
        self.send(AudioAppended((array("h", [value]) * FRAME_MS).tobytes()))
        self.world.call_at(self.world.now() + FRAME_MS * MS, lambda: self._microphone(session))

    def _tell_position(self, session: Session | None) -> None:
        if session is None or session is not self.session:
            return
        for response, player in tuple(self.players.items())[-2:]:  # one may run beside the conversation
            self.send(PlaybackAcked(float(player.at(self.world.now())), response_id=response))
        self.world.call_at(self.world.now() + 250 * MS, lambda: self._tell_position(session))

    # -- what comes

    def got(self, frame: Frame) -> None:
        match frame.event:
            case AudioDelta(response, item, pcm, start):
                assert response not in self.ended, f"{self.name}: sound of {response} after its end (G1, G4)"
                own = voice_of(self.sessions[-1][0])
                assert set(array("h", pcm)) == {own}, f"{self.name} hears another session (G6)"
                player = self.players.setdefault(response, Player())
                assert start == player.due, f"{self.name}: sound from {start} after {player.due} (G7)"
                assert not player.stopped, f"{self.name}: sound of {response}, which is cut (G1)"
                player.play(len(pcm) // 2, self.world.now())
                self.texts.setdefault(item, response)
            case AudioTranscriptDelta(response) | TextDelta(response):
                assert response not in self.ended, f"{self.name}: text of {response} after its end (G1, G4)"
            case ResponseDone(response):
                self.ended.add(response.id)
            case ItemTruncated(item, _, heard_ms):
                self._cut(item, heard_ms)
            case _:
                pass

    def _cut(self, item: str, heard_ms: int) -> None:
        """The server cut a reply: stop playing it and say, once, how far it came."""
        response = self.texts.get(item, "")
        player = self.players.get(response, Player())
        if not player.stopped:
            played = player.stop(self.world.now())
            if self.acks:
                self.send(PlaybackAcked(float(played), response_id=response))
        self.heard[item] = (heard_ms, player.at(self.world.now()), response in self.players)

    # -- what must hold in the end

    def check(self) -> None:
        for key, door in self.sessions:
            assert len(door.released) == 1, f"{self.name}: released {door.released} (G3)"
            said = self.recorded[key].said
            begun = [event.response.id for event in said if isinstance(event, ResponseCreated)]
            ended = [event.response.id for event in said if isinstance(event, ResponseDone)]
            assert sorted(begun) == sorted(ended), f"{self.name}: not one end for each response (G4)"
            assert len(set(ended)) == len(ended), f"{self.name}: a response ended twice (G4)"
