"""What a session tells its thinker, against a thinker that may or may not have got to it before the fence did."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from omni_live.sessions.continuity import Continuity, Message, read_context
from omni_live.sessions.items import Role
from omni_live.sessions.payload import Payload


def user(number: int, text: str = "") -> Message:
    return Message(f"u{number}", Role.USER, text or f"question {number}")


def reply(number: int, text: str = "") -> Message:
    return Message(f"a{number}", Role.ASSISTANT, text or f"answer {number}")


SYSTEM = Message("", Role.SYSTEM, "Be brief.")


def pairs(*messages: Message) -> list[tuple[Role, str]]:
    return [(message.role, message.text) for message in messages]


def finished(continuity: Continuity, *messages: Message) -> None:
    """A turn over all but the last, which is its reply."""
    continuity.context(messages[:-1])
    continuity.said(messages[-1])


def test_the_first_context_is_everything() -> None:
    continuity = Continuity()
    assert read_context(continuity.context([SYSTEM, user(1)])) == (0, pairs(SYSTEM, user(1)))


def test_the_next_context_is_only_what_is_new() -> None:
    continuity = Continuity()
    finished(continuity, SYSTEM, user(1), reply(1))
    messages = [SYSTEM, user(1), reply(1), user(2)]
    assert continuity.keeps(messages) == 3
    assert read_context(continuity.context(messages)) == (3, pairs(user(2)))


def test_a_reply_cut_to_what_was_heard_is_told_again_from_there() -> None:
    continuity = Continuity()
    finished(continuity, user(1), reply(1))
    cut = reply(1, "answ")
    assert read_context(continuity.context([user(1), cut, user(2)])) == (1, pairs(cut, user(2)))


def test_the_same_text_in_another_item_is_another_message() -> None:
    continuity = Continuity()
    finished(continuity, user(1), reply(1))
    assert continuity.keeps([Message("other", Role.USER, user(1).text)]) == 0


def test_a_lost_state_is_told_everything_even_if_the_turn_went_on_elsewhere() -> None:
    continuity = Continuity()
    continuity.context([user(1)])
    continuity.lost()
    continuity.said(reply(1))
    assert read_context(continuity.context([user(1), reply(1), user(2)]))[0] == 0


def test_a_reply_is_the_first_message_of_nothing_after_a_loss() -> None:
    continuity = Continuity()
    continuity.context([])
    continuity.lost()
    continuity.said(reply(1))
    assert continuity.keeps([reply(1)]) == 0


def test_a_cut_turn_may_not_have_begun_so_what_it_was_given_is_told_again() -> None:
    continuity = Continuity()
    finished(continuity, user(1), reply(1))
    continuity.context([user(1), reply(1), user(2)])
    assert read_context(continuity.context([user(1), reply(1), user(2)])) == (2, pairs(user(2)))


def test_a_side_turn_leaves_no_trace() -> None:
    continuity = Continuity()
    finished(continuity, user(1), reply(1))
    side = continuity.context([user(1), reply(1), user(9)], remember=False)
    assert read_context(side) == (2, pairs(user(9)))
    assert read_context(continuity.context([user(1), reply(1), user(2)])) == (2, pairs(user(2)))


def test_the_oldest_messages_are_those_behind_the_instructions() -> None:
    continuity = Continuity()
    finished(continuity, SYSTEM, user(1), reply(1), user(2), reply(2))
    assert continuity.oldest(3) == {"u1", "a1", "u2"}
    assert continuity.oldest(0) == frozenset()
    assert continuity.oldest(99) == {"u1", "a1", "u2", "a2"}


def test_forgotten_messages_are_counted_from_the_front_and_the_rest_still_holds() -> None:
    continuity = Continuity()
    finished(continuity, SYSTEM, user(1), reply(1), user(2), reply(2))
    assert continuity.dropped(frozenset({"u1", "a1"})) == 2
    assert continuity.keeps([SYSTEM, user(2), reply(2), user(3)]) == 3


def test_a_message_that_is_gone_further_back_is_not_forgotten_but_missing_in_the_next_context() -> None:
    continuity = Continuity()
    finished(continuity, user(1), reply(1), user(2), reply(2))
    assert continuity.dropped(frozenset({"a1"})) == 0
    assert continuity.keeps([user(1), user(2)]) == 1


def test_what_the_turn_under_way_was_given_can_be_forgotten_too() -> None:
    continuity = Continuity()
    continuity.context([user(1), reply(1), user(2)])
    assert continuity.oldest(2) == {"u1", "a1"}
    assert continuity.dropped(frozenset({"u1", "a1"})) == 2
    continuity.said(reply(2))
    assert continuity.known == (user(2), reply(2))


def test_the_body_is_json_and_survives_any_text() -> None:
    nasty = 'quotes " and \\ and \u2028 and emoji \U0001f600'
    payload = Continuity().context([user(1, nasty)])
    assert json.loads(bytes(payload.body)) == [["user", nasty]]
    assert read_context(payload) == (0, [(Role.USER, nasty)])


def test_a_context_without_a_number_to_keep_is_refused() -> None:
    with pytest.raises(TypeError, match="keep"):
        read_context(Payload("messages", {"keep": None}, b"[]"))


class ContinuityMachine(RuleBasedStateMachine):
    """A conversation that edits its past and a thinker that may never see a turn: what it sees is always right."""

    def __init__(self) -> None:
        super().__init__()
        self.continuity = Continuity()
        self.messages: list[Message] = []
        self.mind: list[tuple[Role, str]] = []
        self.given: list[Message] | None = None
        self.started = False
        self.numbers = 0

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def see(self, payload: Payload) -> list[tuple[Role, str]]:
        keep, new = read_context(payload)
        assert keep <= len(self.mind), "counts on messages that the thinker has not got"
        return [*self.mind[:keep], *new]

    @rule(instructions=st.booleans(), starts=st.booleans())
    def turn(self, instructions: bool, starts: bool) -> None:
        """A turn begins, in place of the one that ran; its fence may overtake it."""
        self.messages.append(user(self.number()))
        if instructions and (not self.messages or self.messages[0].role is not Role.SYSTEM):
            self.messages.insert(0, SYSTEM)
        payload = self.continuity.context(self.messages)
        seen = self.see(payload)
        assert seen == pairs(*self.messages)
        self.given, self.started = list(self.messages), starts
        if starts:
            self.mind = seen

    @rule()
    def repeated(self) -> None:
        """The same turn again: nothing of it may be taken as known."""
        assert self.see(self.continuity.context(self.messages)) == pairs(*self.messages)
        self.given, self.started = list(self.messages), False

    @rule()
    def finishes(self) -> None:
        if self.given is None or not self.started:
            return
        said = reply(self.number())
        self.continuity.said(said)
        self.mind.append((said.role, said.text))
        self.messages.append(said)
        self.given = None

    @rule()
    def aside(self) -> None:
        messages = [*self.messages, user(0, "an aside")]
        assert self.see(self.continuity.context(messages, remember=False)) == pairs(*messages)

    @rule(at=st.integers(0, 20), how=st.sampled_from(["cut", "delete", "insert"]))
    def edit(self, at: int, how: str) -> None:
        if not self.messages:
            return
        at %= len(self.messages)
        if how == "delete":
            del self.messages[at]
        elif how == "insert":
            self.messages.insert(at, user(self.number()))
        else:
            message = self.messages[at]
            self.messages[at] = Message(message.item_id, message.role, message.text[:-1])

    @rule()
    def replica_dies(self) -> None:
        self.continuity.lost()
        self.mind, self.given = [], None

    @rule(count=st.integers(0, 4))
    def drops(self, count: int) -> None:
        """The thinker says that the oldest no longer fit, of a turn that it started or that is over."""
        if self.given is not None and not self.started:
            return
        gone = self.continuity.oldest(count)
        forget = self.continuity.dropped(gone)
        first = 1 if self.mind and self.mind[0][0] is Role.SYSTEM else 0
        del self.mind[first : first + forget]
        self.messages = [message for message in self.messages if message.item_id not in gone]


TestContinuityMachine = ContinuityMachine.TestCase
TestContinuityMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)
