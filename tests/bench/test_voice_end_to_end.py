"""The bench against the real server and the real models: one recording, said once."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from omni_live.bench.figures import ROWS

RECORDINGS = Path(__file__).resolve().parents[1] / "data" / "voice"
RECORDING = "00_kokf.wav"
BENCH = "import sys; from omni_live.cli import main; sys.exit(main(['bench', 'voice', *sys.argv[1:]]))"


@pytest.fixture
def one_recording(tmp_path: Path) -> Path:
    shutil.copy(RECORDINGS / RECORDING, tmp_path)
    listed = json.loads((RECORDINGS / "transcripts.json").read_text())
    keys = ("file", "text", "speech_end_s")  # all that a folder must say
    kept = [{key: entry[key] for key in keys} for entry in listed if entry["file"] == RECORDING]
    (tmp_path / "transcripts.json").write_text(json.dumps(kept))
    return tmp_path


def test_a_turn_is_held_with_the_real_server_and_its_figures_are_the_last_line(one_recording: Path) -> None:
    command = [sys.executable, "-c", BENCH, "--json", "--wavs", str(one_recording), "--only", "alone", "--runs", "1"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert outcome.returncode == 0, outcome.stderr
    values = json.loads(outcome.stdout.splitlines()[-1])
    assert list(values) == [row.key for row in ROWS]
    assert values["turns"] == 1
    assert 0 < values["v2v_ms_p50"] == values["v2v_ms_max"] < 30_000
    assert 0 <= values["v2v_after_endpoint_ms_p50"] < values["v2v_ms_p50"]
    assert values["wer"] == 0
    assert values["stale_chunks"] == 0
    assert values["ready_s"] > 0
    assert values["cutoffs"] is None
    assert values["settings"] == "default"
    assert "alone" in outcome.stderr
