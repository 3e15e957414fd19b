"""The command line of the benches."""

import argparse
import json
import socket
from pathlib import Path

import numpy as np
import pytest

from omni_live.bench.cli import add_arguments, parse_sections, parse_setting, parse_sweep, run
from omni_live.bench.voice import SECTIONS, Asked
from omni_live.clients.wav import write_wav


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


def test_without_a_server_the_exit_status_is_1_and_a_sentence_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wav(tmp_path / "a.wav", np.full(1600, 1000, np.int16), 16_000)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    url = f"ws://127.0.0.1:{port}/v1/duplex"
    args = parsed("--json", "--only", "alone", "--runs", "1", "--wavs", str(tmp_path), "--url", url)
    assert run(args) == 1
    shown = capsys.readouterr()
    assert "omni-live bench voice: alone: " in shown.err
    assert json.loads(shown.out.splitlines()[-1])["v2v_ms_p50"] is None


def test_without_recordings_nothing_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(parsed("--wavs", str(tmp_path))) == 1
    assert "holds no wav files" in capsys.readouterr().err


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
