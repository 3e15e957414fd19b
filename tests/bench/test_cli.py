"""The command line of the benches."""

import argparse

import pytest

from omni_live.bench.cli import add_arguments, parse_sections, parse_setting, parse_sweep
from omni_live.bench.voice import SECTIONS, Asked


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["voice", *arguments])


def test_without_arguments_everything_is_measured_at_the_defaults() -> None:
    args = parsed()
    assert args.only == SECTIONS
    assert (args.settings, args.sweep_min_silence, args.url) == ([], (), None)


def test_sections_run_in_their_own_order() -> None:
    assert parse_sections("idle,alone") == ("alone", "idle")


@pytest.mark.parametrize("text", ["", "alone,nothing"])
def test_an_unknown_section_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="choose of"):
        parse_sections(text)


def test_a_setting_is_a_name_and_a_number() -> None:
    assert parse_setting("min_silence_ms=350") == ("min_silence_ms", 350)
    assert parse_setting("threshold=0.6") == ("threshold", 0.6)


@pytest.mark.parametrize("text", ["min_silence_ms", "=", "a=b"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_setting(text)


def test_the_sweep_is_a_list_of_milliseconds() -> None:
    assert parse_sweep("350,400") == (350, 400)
    with pytest.raises(argparse.ArgumentTypeError):
        parse_sweep("350,,")


def test_settings_go_where_the_session_object_has_them() -> None:
    asked = Asked(settings=(("silence_duration_ms", 600), ("speculative_ms", 0)))
    session = asked.options(("min_silence_ms", 350)).session()
    audio, own = session["audio"], session["omni_live"]
    assert isinstance(audio, dict)
    assert isinstance(own, dict)
    assert audio["input"]["turn_detection"] == {"type": "server_vad", "silence_duration_ms": 600}
    assert (own["speculative_ms"], own["min_silence_ms"]) == (0, 350)


def test_the_defaults_are_the_server_s() -> None:
    session = Asked().options().session()
    assert session["audio"] == {"input": {}, "output": {}}
