"""`omni-live` as a process."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omni_live import __version__
from omni_live.cli import COMMANDS, main
from omni_live.cli.serve import key_names

COMMAND = [sys.executable, "-c", "import sys; from omni_live.cli import main; sys.exit(main())"]


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`omni-live serve` with echo stages, ready; gives the process and its port."""
    file = folder / "port"
    command = [*COMMAND, "serve", "--pipeline", "echo", "--port", "0", "--ready-file", str(file), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while not file.exists():
                assert process.poll() is None, process.stdout and process.stdout.read()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield process, int(file.read_text())
        finally:
            process.kill()


def asked(port: int, path: str, key: str = "") -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_serve_says_when_it_is_ready_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    with served(tmp_path) as (process, port):
        assert asked(port, "/readyz")[0] == 200
        assert json.loads(asked(port, "/v1/models")[1])["data"][0]["id"] == "echo"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    lines = output.splitlines()
    assert [line for line in lines if line.startswith("echo/second ready in ")]
    assert [line for line in lines if line.startswith(f"ready on http://127.0.0.1:{port} in ")]
    assert "Traceback" not in output
    assert not list(Path("/dev/shm").glob(f"omni-live.{process.pid}.*"))


def test_serve_lets_in_who_shows_a_key_and_prints_it_nowhere(tmp_path: Path) -> None:
    with served(tmp_path, "--api-key", "team=secret-of-the-team", "--log-level", "debug") as (process, port):
        assert asked(port, "/v1/models", "secret-of-the-team")[0] == 200
        assert asked(port, "/v1/models", "other")[0] == 401
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "secret" not in output


def test_serve_refuses_an_address_that_others_reach_without_a_key() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMNI_LIVE_API_KEY"}
    outcome = subprocess.run(
        [*COMMAND, "serve", "--pipeline", "echo", "--host", "0.0.0.0", "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )
    assert outcome.returncode == 1
    assert "API key" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_serve_says_in_one_line_that_a_port_is_taken(tmp_path: Path) -> None:
    with served(tmp_path) as (_, port):
        outcome = subprocess.run(
            [*COMMAND, "serve", "--pipeline", "echo", "--port", str(port)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert outcome.returncode == 1
    assert "in use" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_check_prints_the_plan_and_complains_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("pipelines:\n  echo:\n")
    bad.write_text("pipelines:\n  echo: {replicas: 2}\n")
    assert main(["check", str(good)]) == 0
    assert "pipeline  echo" in capsys.readouterr().out
    assert main(["check", str(bad)]) == 1
    assert "bad.yaml:2" in capsys.readouterr().err


def test_the_version_and_the_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out.strip() == f"omni-live {__version__}"
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_a_command_that_is_not_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["sing"])
    assert exited.value.code == 2
    assert "sing" in capsys.readouterr().err


def test_asking_for_help_loads_no_server() -> None:
    script = "import sys; from omni_live.cli import main; main([]); print(*{'uvicorn', 'torch'} & set(sys.modules))"
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert outcome.stdout.strip() == ""


@pytest.mark.parametrize(
    ("given", "environment", "keys"),
    [
        (["abc"], {}, {"key1": "abc"}),
        (["team=abc", "def=="], {}, {"team": "abc", "key2": "def=="}),
        ([], {"OMNI_LIVE_API_KEY": "abc"}, {"key1": "abc"}),
        ([], {}, {}),
    ],
)
def test_a_key_may_have_a_name(given: list[str], environment: dict[str, str], keys: dict[str, str]) -> None:
    assert key_names(given, environment) == keys
