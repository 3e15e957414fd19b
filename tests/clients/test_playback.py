"""What is played, to the sample: jitter buffer, overlap decisions, underruns, heard positions."""

import numpy as np
import pytest

from omni_live.clients.duplex_events import OverlapDecision, ReplyEnded, Sound, SoundEnded, SpeechStarted
from omni_live.clients.playback import Gap, Player, SimulatedCard, WrongRate, silences

RATE = 1000  # a sample is a millisecond
MS = 1_000_000


def _player(**options) -> Player:
    return Player(RATE, depth_ms=40, most_depth_ms=100, record=True, **options)


def _sound(samples: range, response_id: str = "r1", rate_hz: int = RATE) -> Sound:
    """Samples whose values are their positions from 1, so that what is played says where it is from."""
    pcm = np.arange(samples.start + 1, samples.stop + 1, dtype="<i2").tobytes()
    start = samples.start
    return Sound(at_ns=0, response_id=response_id, item_id="i", pcm=pcm, rate_hz=rate_hz, start_sample=start)


def _pull(player: Player, blocks: int, block: int = 20) -> list[int]:
    return [int(sample) for _ in range(blocks) for sample in player.pull(block, player.timeline * MS)]


def _ended(status: str = "completed", response_id: str = "r1") -> ReplyEnded:
    return ReplyEnded(at_ns=0, response_id=response_id, status=status, reason="")


def _decision(action: str, response_id: str = "r1") -> OverlapDecision:
    return OverlapDecision(at_ns=0, action=action, reason="", response_id=response_id)


SPEECH = SpeechStarted(at_ns=0, item_id="u", audio_start_ms=0)


def test_silence_is_played_until_there_is_enough_and_then_every_sample_in_order() -> None:
    player = _player()
    player.take(_sound(range(20)))
    assert _pull(player, 1) == [0] * 20
    player.take(_sound(range(20, 50)))
    assert _pull(player, 2) == list(range(1, 41))


def test_a_short_reply_plays_as_soon_as_it_is_complete() -> None:
    player = _player()
    player.take(_sound(range(10)))
    player.take(SoundEnded(at_ns=0, response_id="r1"))
    assert _pull(player, 1) == [*range(1, 11), *[0] * 10]
    assert player.idle


def test_replies_play_one_after_another_without_a_gap() -> None:
    player = _player()
    player.take(_sound(range(30)))
    player.take(_ended())
    player.take(_sound(range(40), "r2"))
    assert _pull(player, 2) == [*range(1, 31), *range(1, 11)]


def test_a_gap_in_the_middle_of_a_reply_is_an_underrun_of_its_length() -> None:
    player = _player()
    player.take(_sound(range(40)))
    _pull(player, 3)  # 40 samples, then 20 of silence
    player.take(_sound(range(40, 120)))
    assert _pull(player, 1) == list(range(41, 61))
    assert player.replies["r1"].gaps == [Gap(40, 20)]
    assert player.underruns == 1


def test_silence_behind_the_last_sample_is_no_underrun() -> None:
    player = _player()
    player.take(_sound(range(40)))
    _pull(player, 5)
    player.take(_ended())
    _pull(player, 1)
    assert player.underruns == 0


def test_silence_before_an_interruption_is_no_underrun() -> None:
    player = _player()
    player.take(_sound(range(40)))
    _pull(player, 5)
    player.take(_ended("cancelled"))
    _pull(player, 1)
    assert player.underruns == 0


def test_after_an_underrun_more_is_gathered_before_playing_goes_on() -> None:
    player = _player()
    player.take(_sound(range(40)))
    _pull(player, 3)
    player.take(_sound(range(40, 80)))
    _pull(player, 2)
    assert player.depth.samples == 60
    assert _pull(player, 1) == [0] * 20
    player.take(_sound(range(80, 130)))
    assert _pull(player, 1) == [0] * 20
    player.take(_sound(range(130, 140)))
    assert _pull(player, 1) == list(range(81, 101))


def test_hold_pauses_and_drop_goes_on_where_it_paused() -> None:
    player = _player()
    player.take(_sound(range(100)))
    assert _pull(player, 1) == list(range(1, 21))
    player.take(_decision("hold"))
    assert _pull(player, 2) == [0] * 40
    player.take(_decision("drop"))
    assert _pull(player, 1) == list(range(21, 41))
    assert player.underruns == 0


def test_a_hold_stops_only_the_reply_it_names() -> None:
    player = _player()
    player.take(_decision("hold", "gone"))
    player.take(_sound(range(40)))
    assert _pull(player, 1) == list(range(1, 21))


@pytest.mark.parametrize(
    "interruption", [_decision("barge_in"), _decision("barge_in", ""), _ended("cancelled"), SPEECH]
)
def test_an_interruption_discards_what_was_not_played_and_what_still_comes(interruption) -> None:
    player = _player()
    player.take(_sound(range(100)))
    _pull(player, 2)
    player.take(_decision("hold"))
    player.take(interruption)
    assert _pull(player, 2) == [0] * 40
    player.take(_sound(range(100, 150)))
    assert _pull(player, 2) == [0] * 40
    reply = player.replies["r1"]
    assert (reply.played, reply.discarded, reply.after_cut) == (40, 110, 50)
    assert list(reply.played_sound()) == list(range(1, 41))
    assert player.idle
    player.take(_sound(range(40), "r2"))
    assert _pull(player, 2) == list(range(1, 41))


def test_speech_discards_nothing_where_it_was_asked_not_to_interrupt() -> None:
    player = _player(speech_interrupts=False)
    player.take(_sound(range(60)))
    player.take(SPEECH)
    assert _pull(player, 1) == list(range(1, 21))


def test_a_reply_that_failed_is_played_as_far_as_it_came() -> None:
    player = _player()
    player.take(_sound(range(10)))
    player.take(_ended("failed"))
    assert _pull(player, 1)[:10] == list(range(1, 11))


def test_the_played_position_of_each_reply_is_told_once() -> None:
    player = _player()
    player.take(_sound(range(60)))
    _pull(player, 2)
    assert [(one.response_id, one.item_id, one.played_ms) for one in player.positions()] == [("r1", "i", 40.0)]
    assert player.positions() == []
    player.take(_ended())
    player.take(_sound(range(40), "r2"))
    _pull(player, 2)
    assert [(one.response_id, one.played_ms) for one in player.positions()] == [("r1", 60.0), ("r2", 20.0)]


def test_what_the_card_still_holds_back_is_not_heard_yet() -> None:
    player = _player(latency_ms=30)
    player.take(_sound(range(60)))
    _pull(player, 1)
    assert player.positions() == []
    _pull(player, 1)
    assert [one.played_ms for one in player.positions()] == [10.0]
    player.take(_ended())
    _pull(player, 3)
    assert [one.played_ms for one in player.positions()] == [60.0]


def test_lost_sound_is_jumped_over_and_positions_stay_those_of_the_reply() -> None:
    player = _player()
    player.take(_sound(range(40)))
    player.take(_sound(range(100, 140)))
    assert _pull(player, 3) == [*range(1, 41), *range(101, 121)]
    assert player.replies["r1"].buffer.missing == 60
    assert [one.played_ms for one in player.positions()] == [120.0]


def test_sound_that_came_before_is_not_played_twice() -> None:
    player = _player()
    player.take(_sound(range(40)))
    player.take(_sound(range(20, 60)))
    assert _pull(player, 3) == list(range(1, 61))


def test_sound_at_another_rate_is_refused() -> None:
    with pytest.raises(WrongRate):
        _player().take(_sound(range(10), rate_hz=24_000))


def test_a_moment_of_playing_is_known_for_each_sample() -> None:
    player = _player()
    player.take(_sound(range(40)))
    _pull(player, 3)
    player.take(_sound(range(40, 120)))
    _pull(player, 2)
    reply = player.replies["r1"]
    assert reply.played_at_ns(0, RATE) == 0
    assert reply.played_at_ns(39, RATE) == 39 * MS
    assert reply.played_at_ns(40, RATE) == 60 * MS
    assert reply.played_at_ns(110, RATE) is None


def test_a_simulated_card_pulls_each_block_at_its_time() -> None:
    player = _player()
    card = SimulatedCard(player, 500)
    card.run_to(499)
    assert player.timeline == 0
    card.run_to(500 + 45 * MS)
    assert player.timeline == 60
    card.run_to(500 + 45 * MS)
    assert player.timeline == 60
    assert card.next_ns == 500 + 60 * MS


def test_finished_replies_are_forgotten_beyond_the_bound() -> None:
    player = Player(RATE, keep=2, depth_ms=0)
    for number in range(5):
        player.take(_sound(range(10), f"r{number}"))
        player.take(_ended(response_id=f"r{number}"))
        _pull(player, 1)
        player.positions()
    assert list(player.replies) == ["r3", "r4"]


def test_silent_stretches_of_a_recording_are_found() -> None:
    pcm = np.zeros(1000, np.int16)
    pcm[200:300] = 5000
    pcm[350:400] = -5000
    assert silences(pcm, RATE) == [(0, 200), (400, 600)]
    assert silences(pcm, RATE, at_least_ms=50) == [(0, 200), (300, 50), (400, 600)]
    assert silences(np.zeros(0, np.int16), RATE) == []
