"""Processes in which other people's packages stand before ours: those that pin other versions than the server's.

`requirements/clients` says what they are; `make apart` brings those that the tests run, each set in a folder of its
own.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]


def environment(*names: str) -> dict[str, str]:
    """The variables of a process that meets these packages first. Skips where they are not there."""
    folders = [ROOT / f".venv-{name}" for name in names]
    for folder in folders:
        if not (folder / ".installed").exists():
            pytest.skip(f"lacks what `make {folder.name}/.installed` installs")
    path = os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def run(names: Sequence[str], *arguments: str, within_s: float = 300.0) -> str:
    """What Python, given these arguments, prints in such a process. Fails where it fails."""
    outcome = subprocess.run(
        [sys.executable, "-P", *arguments],
        env=environment(*names),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=within_s,
    )
    assert outcome.returncode == 0, outcome.stdout[-4000:] + outcome.stderr[-4000:]
    return outcome.stdout


def run_tests(names: Sequence[str], *arguments: str, within_s: float = 300.0) -> str:
    """What pytest prints of tests that ran in such a process, all of which passed and none of which was skipped."""
    quiet = ("-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider")
    printed = run(names, *quiet, *arguments, within_s=within_s)
    summary = printed.splitlines()[-1]
    assert " passed" in summary and "skipped" not in summary, printed[-4000:]
    return summary
