"""LeRobot's own class behind the adapter, in a process that has LeRobot and the versions it pins before ours."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve()
PACKAGES = HERE.parents[2] / ".venv-lerobot"


def test_lerobot_s_act_policy_answers_through_the_adapter_as_by_itself() -> None:
    if not (PACKAGES / "lerobot").is_dir():
        pytest.skip("LeRobot is not installed: make lerobot")
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    outcome = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "pytest", "-q", "--import-mode=importlib"),
            *("-o", "filterwarnings=", "-p", "no:cacheprovider"),  # LeRobot warns as it likes
            str(HERE.parent / "lerobot_act.py"),
        ],
        env={**os.environ, "PYTHONPATH": path},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert outcome.returncode == 0, outcome.stdout[-4000:] + outcome.stderr[-2000:]
    assert re.search(r"^4 passed", outcome.stdout, re.MULTILINE), outcome.stdout[-2000:]
