"""Videos over a real session: when blocks are begun, what an interaction changes, and what survives the world."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_live.protocols.video.film import ATTEMPTS
from omni_live.protocols.video.messages import Interaction
from omni_live.sessions.inputs import DrainAsked, EventAcked
from omni_live.sessions.limits import Limits

from .house import House, dreamt

A, B = [[0.5, 0.0]] * 2, [[0.0, -0.5]] * 2


def turn(*rows: Any, event_id: str | None = "turn") -> Interaction:
    return Interaction(event_id, np.asarray(rows, np.float32))


def same(seen: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return len(seen) == len(wanted) and all(map(np.array_equal, seen, wanted))


def test_a_video_is_the_worlds_frames_in_blocks_and_then_it_is_done() -> None:
    house = House(seed=7, num_frames=20, paced=False, action=A[0])
    firsts = []
    while house.make() or house.film.next() is not None:
        while (block := house.send()) is not None:
            firsts.append((block.first, len(block.actions)))
    assert firsts == [(0, 8), (8, 8), (16, 4)]
    assert same(house.seen, dreamt(7, [A] * 20))
    assert house.kinds() == ["video.start", "session.done"]
    assert (house.said[-1]["frames"], house.said[-1]["reason"]) == (20, "complete")
    assert house.film.close_code == 1000
    assert house.closes()


def test_paced_no_more_than_two_blocks_are_ahead_of_what_is_played() -> None:
    house = House(block_frames=5, fps=5)  # a block lasts a second
    for _ in range(2):
        assert house.make(10.0)
        assert house.send(10.0) is not None
    assert not house.make(10.0)
    assert house.film.beat(10.5) == pytest.approx(11.0)
    assert not house.make(10.999)
    assert house.make(11.0)
    assert house.send(11.0) is not None
    assert house.film.beat(11.0) == pytest.approx(12.0)


def test_a_client_that_stood_still_does_not_get_what_it_missed_at_once() -> None:
    house = House(block_frames=5, fps=5)
    for now_s in (10.0, 10.0, 100.0):
        assert house.make(now_s)
        assert house.send(now_s) is not None
    assert house.make(100.0)
    assert house.send(100.0) is not None
    assert not house.make(100.0), "what stood still was not played meanwhile"


def test_unpaced_no_more_than_two_blocks_wait_to_be_sent() -> None:
    house = House(paced=False)
    assert house.make()
    assert house.make()
    assert not house.make()
    assert house.send() is not None
    assert house.make()


def test_one_block_at_a_time_is_asked_of_the_world() -> None:
    house = House(paced=False)
    house.film.beat(0.0)
    house.film.beat(0.0)
    house.run(3)
    house.film.beat(0.0)
    assert len(house.turns_begun) == 1


def test_an_interaction_names_the_first_frame_that_is_not_begun_and_changes_it_and_none_before() -> None:
    house = House(seed=1, num_frames=24, paced=False, action=A[0])
    house.film.beat(0.0)
    house.run(3)  # in the middle of the first block
    house.film.interact(turn(B))
    queued = house.last("session.interaction.queued")
    assert (queued["event_id"], queued["first_frame"]) == ("turn", 8)
    assert "interaction.applied" not in house.kinds()
    blocks = []
    house.break_down()  # what was made is shown again, and the rest is made as it was begun
    while house.make() or house.film.next() is not None:
        while (block := house.send()) is not None:
            blocks.append(block)
    applied = house.last("interaction.applied")
    assert (applied["first_frame"], applied["chunk"]) == (8, 1)
    assert [(block.started, block.active) for block in blocks] == [((), ()), (("turn",), ("turn",)), ((), ("turn",))]
    assert same(house.seen, dreamt(1, [A] * 8 + [B] * 16))


def test_a_list_is_followed_row_by_row_and_its_last_row_holds_on() -> None:
    house = House(num_frames=8, block_frames=2, paced=False, action=[A[0], B[0], A[0]])
    rows = []
    while house.make():
        while (block := house.send()) is not None:
            rows += block.actions.tolist()
    assert rows == [A, B, A, A, A, A, A, A]


def test_the_later_of_two_interactions_before_a_block_holds_and_the_earlier_one_is_told_so() -> None:
    house = House(num_frames=8, paced=False)
    house.film.interact(turn(A, event_id="first"))
    house.film.interact(turn(B, event_id=None))
    dropped = house.last("interaction.dropped")
    assert (dropped["event_id"], dropped["reason"]) == ("first", "superseded")
    house.make()
    block = house.send()
    assert block is not None
    assert block.actions.tolist() == [B] * 8
    assert house.last("interaction.applied")["event_id"] == block.started[0] == "event-1"


def test_an_id_is_taken_once() -> None:
    house = House()
    house.film.interact(turn(A))
    house.film.interact(turn(B))
    assert (house.said[-1]["code"], house.said[-1]["event_id"]) == ("event_id_conflict", "turn")


def test_an_interaction_after_the_last_block_was_begun_is_refused() -> None:
    house = House(num_frames=8)
    house.film.beat(0.0)
    house.film.interact(turn(A))
    assert house.said[-1]["code"] == "no_frames_left"
    house.run()
    assert house.send() is not None
    assert house.said[-1]["reason"] == "complete"


def test_a_stop_ends_what_runs_and_nothing_goes_out_any_more() -> None:
    house = House(paced=False)
    house.make()
    house.film.beat(0.0)
    house.run(3)
    house.film.interact(turn(A))
    house.film.stop()
    assert house.film.next() is None
    assert house.kinds()[-2:] == ["interaction.dropped", "session.done"]
    assert (house.said[-1]["stopped"], house.said[-1]["frames"]) == (True, 0)
    assert house.closes()
    assert not house.turns
    house.film.stop()
    assert house.kinds().count("session.done") == 1


def test_g1_silence_no_frame_of_a_turn_that_a_fence_ended_is_sent_and_it_is_shown_again() -> None:
    house = House(seed=2, num_frames=16, paced=False, action=A[0])
    house.make()
    waiting = house.film.next()
    assert waiting is not None
    house.film.beat(0.0)
    house.run(2)
    house.break_down()
    assert house.film.next() is None, "the whole block that waited was of the older epoch"
    while house.make() or house.film.next() is not None:
        house.send()
    assert same(house.seen, dreamt(2, [A] * 16))
    looks = [submit for submit in house.turns_begun if submit.payload.kind == "look"]
    assert len(looks) == 10, "eight that were whole and two that were made"


def test_g9_survival_a_lost_replica_changes_no_frame() -> None:
    house = House(Limits(snapshot_frames=4), seed=3, num_frames=24, block_frames=4, paced=False, action=A[0])
    for _ in range(2):
        assert house.make()
        house.send()
    house.film.beat(0.0)
    house.run(2)
    house.lose_replica()
    while house.turns or house.make() or house.film.next() is not None:
        if house.turns:
            house.run()  # the replay of what no snapshot holds
        house.send()
    assert same(house.seen, dreamt(3, [A] * 24))
    assert house.said[-1]["reason"] == "complete"


def test_a_world_that_makes_nothing_any_more_ends_the_video_with_an_error() -> None:
    house = House()
    for _ in range(ATTEMPTS):
        house.film.beat(0.0)
        house.break_down("world_error")
    assert house.kinds()[-2:] == ["error", "session.done"]
    assert (house.said[-2]["code"], house.said[-1]["stopped"]) == ("world_error", False)
    assert house.film.close_code == 1013
    assert house.closes()


def test_a_picture_of_another_size_ends_the_video() -> None:
    house = House()
    house.film.beat(0.0)
    assert house.pictures is not None
    house.film.contract = type(house.film.contract)((8, 8, 3), (1, 1, 1), (2, 2), 5.0)
    house.run(1)
    assert house.said[-2]["code"] == "bad_frame"


def test_a_server_that_drains_ends_the_video_with_the_code_that_says_so() -> None:
    house = House()
    house.make()
    house.tell(DrainAsked(10**12))
    assert (house.said[-1]["type"], house.said[-1]["reason"]) == ("session.done", "drained")
    assert house.film.close_code == 1012


def test_a_client_that_leaves_closes_the_session() -> None:
    house = House()
    house.film.beat(0.0)
    house.run(1)
    house.film.leave()
    assert house.closes()


def test_what_was_sent_is_not_kept_for_a_resume() -> None:
    house = House(num_frames=24, paced=False)
    seqs = []
    while house.make():
        block = house.send()
        assert block is not None
        seqs.append(block.seq)
    assert [told.seq for told in house.told if isinstance(told, EventAcked)] == seqs == sorted(set(seqs))


def test_a_list_of_an_interaction_begins_with_its_first_frame() -> None:
    house = House(num_frames=8, block_frames=4, paced=False)
    house.make()
    house.film.interact(turn(A, B))
    house.make()
    blocks = [house.send(), house.send()]
    assert [block.actions.tolist() for block in blocks if block] == [[[[0.0, 0.0]] * 2] * 4, [A, B, B, B]]


def test_a_world_that_fails_now_and_then_goes_on() -> None:
    house = House(num_frames=8, paced=False, seed=4, action=A[0])
    for _ in range(7):
        house.film.beat(0.0)
        while house.turns[0].payload.kind == "look":
            house.run()
            house.film.beat(0.0)
        house.run(1)
        house.break_down()
    house.make()
    house.send()
    assert same(house.seen, dreamt(4, [A] * 8))


class Fate:
    """A video to which things happen, and what its client could know of it."""

    def __init__(self, block_frames: int, is_paced: bool) -> None:
        limits = Limits(snapshot_frames=3)
        self.house = House(limits, seed=5, num_frames=12, block_frames=block_frames, paced=is_paced)
        self.rows: list[Any] = []
        """Actions of each frame that came."""
        self.interactions: list[str] = []
        self.now_s = 0.0

    def happens(self, event: str) -> None:
        house, self.now_s = self.house, self.now_s + 0.2
        match event:
            case "beat":
                house.film.beat(self.now_s)
            case "frame" | "run" if house.turns:
                house.run(1 if event == "frame" else None)
            case "send":
                self.send()
            case "fail" if house.turns and "decoder" in house.turns[0].outputs:
                house.break_down()
            case "lose":
                house.lose_replica()
            case "interact":
                self.interact()
            case _:
                pass

    def interact(self) -> None:
        tenth = round(self.now_s * 5)
        self.house.film.interact(turn([[tenth / 100, 0.0]] * 2, event_id=f"e{tenth}"))
        if self.house.said[-1]["type"] == "session.interaction.queued":
            self.interactions.append(f"e{tenth}")

    def send(self) -> None:
        block = self.house.send(self.now_s)
        if block is not None:
            assert block.first == len(self.rows)
            self.rows += block.actions.tolist()

    def comes_to_its_end(self) -> None:
        for _ in range(100):
            self.now_s += 10.0
            self.house.film.beat(self.now_s)
            while self.house.turns:
                self.house.run()
            self.send()


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["beat", "frame", "run", "send", "fail", "lose", "interact"]), min_size=1, max_size=60),
    st.integers(1, 4),
    st.booleans(),
)
def test_whatever_happens_each_frame_is_sent_once_and_made_of_the_actions_that_were_told(
    events: list[str], block_frames: int, is_paced: bool
) -> None:
    fate = Fate(block_frames, is_paced)
    for event in events:
        fate.happens(event)
    fate.comes_to_its_end()
    said, rows = fate.house.said, fate.rows
    assert said[-1]["type"] == "session.done"
    assert same(fate.house.seen, dreamt(5, rows))
    assert len(rows) == 12 or said[-1]["reason"] != "complete"
    for message in said:
        if message["type"] == "interaction.applied":
            first, wanted = int(str(message["first_frame"])), int(str(message["event_id"])[1:]) / 100
            assert first >= len(rows) or rows[first][0][0] == pytest.approx(wanted)
    fates = [
        message["event_id"] for message in said if message["type"] in {"interaction.applied", "interaction.dropped"}
    ]
    assert fates == fate.interactions, "each has one"
