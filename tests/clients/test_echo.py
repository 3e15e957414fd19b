"""The echo guard: the loudspeaker does not reach the server, the user does."""

import numpy as np

from omni_live.clients.echo import EchoGuard, level

RNG = np.random.default_rng(1)


def _noise(amplitude: float) -> np.ndarray:
    return (RNG.standard_normal(320) * amplitude * 2**15).astype(np.int16)


def _echo(guard: EchoGuard, blocks: int) -> list[float]:
    """A reply at -20 dB whose echo comes back at -34 dB; how loud it is after the guard."""
    passed = []
    for _ in range(blocks):
        guard.played(_noise(0.1))
        passed.append(level(guard.heard(_noise(0.02))))
    return passed


def test_the_microphone_is_left_alone_while_nothing_plays() -> None:
    guard = EchoGuard()
    spoken = _noise(0.05)
    guard.played(np.zeros(480, np.int16))
    assert guard.heard(spoken) is spoken


def test_the_echo_of_a_reply_is_turned_down_from_its_first_block() -> None:
    assert max(_echo(EchoGuard(), 200)) < 0.002


def test_a_user_who_is_clearly_louder_than_the_echo_comes_through() -> None:
    guard = EchoGuard()
    _echo(guard, 50)
    spoken = _noise(0.1)
    guard.played(_noise(0.1))
    assert guard.heard(spoken) is spoken


def test_a_user_who_talks_for_long_is_not_taken_for_the_echo() -> None:
    guard = EchoGuard()
    _echo(guard, 100)
    for _ in range(50):
        spoken = _noise(0.1)
        guard.played(_noise(0.1))
        assert guard.heard(spoken) is spoken


def test_the_guard_closes_again_when_the_user_stops() -> None:
    guard = EchoGuard()
    _echo(guard, 50)
    guard.played(_noise(0.1))
    guard.heard(_noise(0.1))
    assert max(_echo(guard, 40)[12:]) < 0.002


def test_with_a_headset_left_off_by_mistake_nothing_is_lost_because_there_is_no_echo() -> None:
    guard = EchoGuard()
    for _ in range(30):
        guard.played(_noise(0.1))
        guard.heard(np.zeros(320, np.int16))
    spoken = _noise(0.03)
    guard.played(_noise(0.1))
    assert guard.heard(spoken) is spoken
