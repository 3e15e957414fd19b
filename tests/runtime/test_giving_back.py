"""When tickets go back: with the next message that goes the same way, or alone when it is time."""

from pathlib import Path

import pytest

from omni_live.connectors.contract import Ticket
from omni_live.runtime.outbox import CONTROL, MEDIA, Outbox
from omni_live.runtime.ports import WorkerId
from omni_live.runtime.wire import SERVER, Credit, Free, Message, Pong, freed
from omni_live.sessions.stamp import Stamp

ARENA = 1 << 20
UP, OTHER = 4, 5
CREDIT = Credit("a", "b", Stamp(0, 1, 1, 1), 1)


class Giver:
    """An outbox that is done with tickets, and the time."""

    def __init__(self, path: Path) -> None:
        self.now = 1000
        self.outbox = Outbox(path, WorkerId(2), ARENA, free_wait_ns=50, now=lambda: self.now)
        self._serial = 0

    def done_with(self, source: int, nbytes: int = 5000) -> Message:
        self._serial += 1
        ticket = Ticket(0, 64 * self._serial, nbytes, self._serial, "bytes", {}, ())
        self.outbox.free(source, ticket)
        return Free([freed(ticket)])


@pytest.fixture
def giver(tmp_path: Path) -> Giver:
    return Giver(tmp_path)


def test_a_ticket_goes_back_with_the_next_message_to_whom_it_came_from(giver: Giver) -> None:
    free = giver.done_with(UP)
    assert giver.outbox.take() == []
    giver.outbox.say(OTHER, CREDIT)
    assert giver.outbox.take() == [(OTHER, CREDIT)]
    giver.outbox.say(UP, CREDIT)
    assert giver.outbox.take() == [(UP, CREDIT), (UP, free)]
    assert giver.outbox.frees_ns == 0


@pytest.mark.parametrize("lane", [CONTROL, MEDIA])
def test_what_the_server_fed_goes_back_on_the_lane_that_speaks(giver: Giver, lane: int) -> None:
    free = giver.done_with(SERVER)
    giver.outbox.say(lane, Pong(1))
    assert giver.outbox.take() == [(lane, Pong(1)), (lane, free)]


def test_a_ticket_that_nothing_takes_along_goes_back_alone_when_it_is_time(giver: Giver) -> None:
    free = giver.done_with(UP)
    assert giver.outbox.frees_ns == 1050
    giver.now = 1049
    later = giver.done_with(OTHER)
    assert giver.outbox.take() == []
    giver.now = 1050
    assert giver.outbox.take() == [(UP, free), (OTHER, later)]
    assert giver.outbox.frees_ns == 0
    assert giver.outbox.take() == []


def test_much_memory_goes_back_at_once(giver: Giver) -> None:
    giver.done_with(UP, ARENA // 8 - 1)
    assert giver.outbox.take() == []
    giver.done_with(UP, 1)
    ((target, free),) = giver.outbox.take()
    assert target == UP
    assert isinstance(free, Free)
    assert len(free.tickets) == 2
    giver.done_with(UP, 5000)
    assert giver.outbox.take() == []
