"""The voice pipeline's engines, hand-cranked on the real models."""

import json

import pytest

from omni_live.engines.contract import EngineOptions, TurnError
from omni_live.engines.options import BadOption
from omni_live.pipelines.voice.code2wav import Code2Wav
from omni_live.pipelines.voice.talker import Talker
from omni_live.pipelines.voice.thinker import Thinker
from omni_live.sessions.continuity import Continuity, Message
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.items import Role
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import LANES, SessionKey, Stamp, session_key
from tests.pipelines.rig import FakeHost, FakeTurn, run

QUESTION = "What is the capital city of France?"


def stamp(session: int = 0, turn: int = 1) -> Stamp:
    return Stamp(session * LANES, 1, 1, turn)


@pytest.fixture(scope="module")
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture(scope="module")
def thinker(host: FakeHost) -> Thinker:
    made = Thinker(EngineOptions({"sessions": 6, "context": 512, "reserve": 64}))
    made.load(host)
    return made


@pytest.fixture(scope="module")
def talker(host: FakeHost) -> Talker:
    made = Talker(EngineOptions({}))
    made.load(host)
    return made


class Talk:
    """One session's conversation with the thinker."""

    def __init__(self, thinker: Thinker, number: int) -> None:
        self.thinker = thinker
        self.number = number
        self.key: SessionKey = session_key(number, 1)
        self.continuity = Continuity()
        self.messages: list[Message] = []
        self.turns = 0
        thinker.open(self.key, {})

    def begin(self, text: str, room: int = 1000, **params: Scalar) -> FakeTurn:
        self.turns += 1
        self.messages.append(Message(f"u{self.turns}", Role.USER, text))
        turn = FakeTurn(stamp(self.number, self.turns), params, room)
        turn.inbox.append(self.continuity.context(self.messages))
        turn.complete = True
        self.thinker.begin(turn)
        return turn

    def replied(self, turn: FakeTurn, heard: str | None = None) -> str:
        whole = said(turn)
        message = Message(f"a{self.turns}", Role.ASSISTANT, whole if heard is None else heard)
        self.messages.append(message)
        if heard is None:
            self.continuity.said(message)
        return whole

    def close(self) -> None:
        self.thinker.close(self.key)


def said(turn: FakeTurn) -> str:
    return "".join(str(payload.meta["text"]) for payload in turn.sent)


def test_the_thinker_answers_and_its_text_is_gapless(thinker: Thinker) -> None:
    talk = Talk(thinker, 0)
    turn = talk.begin(QUESTION)
    run(thinker)
    assert turn.ended == (Outcome.DONE, "")
    assert "Paris" in said(turn)
    at = 0
    for payload in turn.sent:
        assert payload.meta["start"] == at
        at += len(str(payload.meta["text"]))
    talk.close()


def test_the_same_turn_gives_the_same_text_with_and_without_neighbours_of_other_sessions(thinker: Thinker) -> None:
    first, second = Talk(thinker, 0), Talk(thinker, 1)
    alone = first.begin(QUESTION)
    run(thinker)
    again = second.begin(QUESTION)
    run(thinker)
    assert said(again) == said(alone)
    first.close()
    second.close()


def test_sessions_do_not_see_each_other(thinker: Thinker) -> None:
    """G6: each answers from its own conversation, although their turns decode together."""
    names = ("Sarah", "Thomas")
    talks = [Talk(thinker, number) for number in range(2)]
    for talk, name in zip(talks, names, strict=True):
        turn = talk.begin(f"My name is {name}. Please say hello to {name}.")
        run(thinker)
        talk.replied(turn)
    turns = [talk.begin("How are you?") for talk in talks]
    run(thinker)
    for talk, turn, name, other in zip(talks, turns, names, reversed(names), strict=True):
        assert turn.ended is not None
        assert name in seen(talk)
        assert other not in seen(talk)
        talk.close()


def seen(talk: Talk) -> str:
    """What the session's KV stands for, as text."""
    slot = talk.thinker._minds[talk.key].slot
    assert slot is not None
    tokens = talk.thinker._llama.tokens(slot)
    return str(talk.thinker._tokenizer.decode(list(tokens), skip_special_tokens=False))


def test_a_kept_kv_is_not_prefilled_again(thinker: Thinker) -> None:
    talk = Talk(thinker, 0)
    turn = talk.begin(QUESTION)
    run(thinker)
    talk.replied(turn)
    talk.begin("And of Italy?")
    assert thinker.step()
    thought = thinker._thoughts[0]
    assert thought.slot is not None
    fed = len(thinker._llama.tokens(thought.slot))
    run(thinker)
    opening = len(thinker._minds[talk.key].context.opening_ids())
    assert fed > opening + 20
    talk.close()


def test_g8_after_an_interruption_the_model_sees_what_was_heard(thinker: Thinker) -> None:
    """What the KV stands for in the next turn ends with exactly the heard words."""
    talk = Talk(thinker, 0)
    turn = talk.begin("Tell me about the sea.")
    for _ in range(12):
        thinker.step()
    thinker.drop(turn)
    heard = said(turn)[:12].rstrip()
    assert heard
    talk.replied(turn, heard)
    talk.begin("What did you say?")
    run(thinker)
    assert f"<|im_start|>assistant\n{heard}<|im_end|>\n<|im_start|>user\nWhat did you say?<|im_end|>" in seen(talk)
    talk.close()


def test_a_tentative_turn_that_is_dropped_leaves_no_trace(thinker: Thinker) -> None:
    tried, plain = Talk(thinker, 0), Talk(thinker, 1)
    turn = tried.begin("Tell me about")
    thinker.step()
    thinker.step()
    thinker.drop(turn)
    tried.messages.clear()
    tried.turns = 0
    turns = [tried.begin(QUESTION)]
    run(thinker)
    turns.append(plain.begin(QUESTION))
    run(thinker)
    assert said(turns[0]) == said(turns[1])
    tried.close()
    plain.close()


def test_a_context_the_engine_does_not_have_fails_the_turn(thinker: Thinker) -> None:
    talk = Talk(thinker, 0)
    turn = FakeTurn(stamp(0, 1))
    turn.inbox.append(Payload("messages", {"keep": 3}, json.dumps([["user", "Hi"]]).encode()))
    thinker.begin(turn)
    with pytest.raises(TurnError, match="context_lost"):
        thinker.step()
    thinker.drop(turn)
    talk.close()


def test_a_receiver_without_credit_stops_the_thinker(thinker: Thinker) -> None:
    talk = Talk(thinker, 0)
    turn = talk.begin(QUESTION, room=2)
    run(thinker)
    assert len(turn.sent) == 2
    assert turn.ended is None
    turn.credit = 1000
    run(thinker)
    assert turn.ended == (Outcome.DONE, "")
    talk.close()


def test_the_token_limit_ends_a_reply_as_incomplete(thinker: Thinker) -> None:
    talk = Talk(thinker, 0)
    turn = talk.begin("Tell me a long story.", max_tokens=5)
    run(thinker)
    assert turn.ended == (Outcome.INCOMPLETE, "max_output_tokens")
    talk.close()


def test_a_full_window_drops_the_oldest_items_and_says_so_once(thinker: Thinker, host: FakeHost) -> None:
    host.found.clear()
    talk = Talk(thinker, 0)
    filler = " ".join(f"Fact number {number} is not important." for number in range(12))
    for _ in range(4):
        turn = talk.begin(filler, max_tokens=4)
        run(thinker)
        talk.replied(turn, said(turn))
    dropped = [payload for key, payload in host.found if key == talk.key]
    assert [payload.kind for payload in dropped] == ["dropped"]
    count = dropped[0].meta["items"]
    assert isinstance(count, int)
    thinker.listen(talk.key, Payload("forget", {"items": count}))
    talk.continuity.dropped(frozenset(message.item_id for message in talk.messages[:count]))
    del talk.messages[:count]
    turn = talk.begin(QUESTION)
    run(thinker)
    assert turn.ended is not None
    talk.close()


def test_closed_sessions_give_their_slots_back(thinker: Thinker) -> None:
    for _ in range(20):
        talk = Talk(thinker, 0)
        talk.begin(QUESTION)
        thinker.step()
        thinker.drop(thinker._thoughts[0].turn)
        talk.close()
    assert thinker.load_now().sessions == 0
    assert thinker._llama.free == 6


def speak(talker: Talker, text: str, room: int = 1000) -> FakeTurn:
    code2wav = Code2Wav(EngineOptions({}))
    turns = FakeTurn(stamp(), {"seed": 5}), FakeTurn(stamp(), {"seed": 5}, room)
    turns[0].receiver = turns[1]
    talker.begin(turns[0])
    code2wav.begin(turns[1])
    words = text.split(" ")
    at = 0
    for number, word in enumerate(words):
        piece = word if number == 0 else " " + word
        turns[0].inbox.append(Payload("text", {"text": piece, "start": at}))
        at += len(piece)
        run(talker, code2wav)
    turns[0].complete = True
    run(talker, code2wav)
    return turns[1]


def test_the_transcript_travels_with_the_sound_and_is_whole(talker: Talker) -> None:
    text = "The capital of France is Paris, of course. It lies on the Seine!  "
    turn = speak(talker, text)
    assert turn.ended == (Outcome.DONE, "")
    assert "".join(str(payload.meta["text"]) for payload in turn.sent) == text
    samples = sum(payload.nbytes for payload in turn.sent) // 2
    assert 2 * 24_000 < samples < 10 * 24_000


def test_the_first_chunk_is_a_quarter_of_a_second(talker: Talker) -> None:
    turn = speak(talker, "The capital of France is Paris, of course.")
    assert turn.sent[0].nbytes <= 24_000 // 4 * 2
    assert turn.sent[0].meta["start"] == 0


def test_marks_lie_within_the_sound_and_grow(talker: Talker) -> None:
    text = "One, two, three and four. Then five."
    turn = speak(talker, text)
    flat = [number for payload in turn.sent for number in (payload.meta.get("marks") or ())]  # type: ignore[union-attr]
    samples, chars = flat[::2], flat[1::2]
    assert samples == sorted(samples)
    assert chars == sorted(chars)
    assert chars[-1] == len(text)


def test_a_text_that_cannot_be_spoken_ends_without_sound(talker: Talker) -> None:
    turn = speak(talker, "🙂 …")
    assert turn.ended == (Outcome.DONE, "")
    assert sum(payload.nbytes for payload in turn.sent) == 0


def test_an_unknown_voice_is_refused(talker: Talker) -> None:
    with pytest.raises(TurnError, match="unknown_voice"):
        talker.begin(FakeTurn(stamp(), {"voice": "../../etc/passwd"}))


def test_unknown_options_are_refused_by_name() -> None:
    with pytest.raises(BadOption, match="code2wav: unknown option speed"):
        Code2Wav(EngineOptions({"speed": 1}))
    with pytest.raises(BadOption, match="sessions is a whole number"):
        Thinker(EngineOptions({"sessions": True}))
