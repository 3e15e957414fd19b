"""A server as its users start it, a process of its own on a free port, seen from outside and through /proc."""

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

READY_WITHIN_S: Final = 120.0
SOON_S: Final = 20.0
"""What must happen has this long, on a machine that does other things as well."""
LOOK_S: Final = 0.01

_SAMPLE: Final = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')

Sample = tuple[str, tuple[tuple[str, str], ...]]


class NotYet(AssertionError):
    """What was waited for did not come about; the text says how things stand."""


def wait_until(holds: Callable[[], bool], what: str, within_s: float = SOON_S) -> float:
    """Look until it holds; the seconds that took. Raises NotYet."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > within_s:
            raise NotYet(what)
        time.sleep(LOOK_S)
    return time.monotonic() - began


@dataclass(frozen=True, slots=True)
class Rest:
    """What a server holds while it has no session."""

    fds: int
    standing: Mapping[Sample, float]
    """Sessions, waiting opens, slots, outboxes and what each stage keeps."""


@dataclass(slots=True)
class Served:
    """A running server."""

    process: subprocess.Popen[bytes]
    folder: Path
    port: int = 0
    rest: Rest | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/duplex"

    @property
    def run_directory(self) -> Path:
        """Where its processes meet, also where the server has a /dev/shm of its own."""
        (found,) = Path(f"/proc/{self.pid}/root/dev/shm").glob(f"omni-live.{self.pid}.*")
        return found

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    # -- asked ---------------------------------------------------------------------------------------------------

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def is_ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def metrics(self) -> dict[Sample, float]:
        page = self.get("/metrics")[1]
        return {
            (name, tuple(sorted(_LABEL.findall(labels)))): float(value) for name, labels, value in _SAMPLE.findall(page)
        }

    def metric(self, name: str, **labels: str) -> float:
        """The sum over the samples that have these labels."""
        wanted = set(labels.items())
        return sum(value for (found, has), value in self.metrics().items() if found == name and wanted <= set(has))

    # -- looked at -----------------------------------------------------------------------------------------------

    def workers(self) -> dict[str, list[int]]:
        """Title -> pids of the living worker processes."""
        found: dict[str, list[int]] = {}
        for nursery in _children(self.pid):
            for pid in _children(nursery):
                with contextlib.suppress(OSError):
                    found.setdefault(Path(f"/proc/{pid}/comm").read_text().strip(), []).append(pid)
        found.pop("omni:nursery", None)  # forked a moment ago
        return found

    def worker(self, stage: str) -> int:
        """The pid of the one worker whose stages begin with this one."""
        (pid,) = (pid for title, pids in self.workers().items() if title.startswith(f"omni:{stage}") for pid in pids)
        return pid

    def fds(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def standing(self) -> dict[Sample, float]:
        kept = (
            "omni_live_sessions",
            "omni_live_admission_waiting",
            "omni_live_slots_taken",
            "omni_live_outbox_bytes",
            "omni_live_stage_sessions",
            "omni_live_stage_turns",
            "omni_live_stage_queue",
            "omni_live_stage_bytes",
        )
        # a worker that has not reported yet holds nothing either
        return {sample: value for sample, value in self.metrics().items() if sample[0] in kept and value}

    # -- at rest -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Remember what the server holds now, without sessions, as what it must come back to."""
        self.rest = Rest(self.fds(), self.standing())

    def assert_at_rest(self) -> None:
        """Nothing is left of any session: counts, loads, descriptors and shared memory are what they were."""
        rest = self.rest
        assert rest is not None
        wait_until(self.is_ready, "the server is not ready again")
        self._wait(lambda: self.standing() == rest.standing, lambda: _difference(rest.standing, self.standing()))
        self._wait(lambda: abs(self.fds() - rest.fds) <= 2, lambda: f"{rest.fds} descriptors became {self.fds()}")
        self._wait(self._is_tidy, lambda: str(sorted(path.name for path in self.run_directory.iterdir())))

    @staticmethod
    def _wait(holds: Callable[[], bool], standing: Callable[[], str]) -> None:
        try:
            wait_until(holds, "", 8.0)
        except NotYet:
            raise NotYet(f"the server does not come to rest: {standing()}") from None

    def _is_tidy(self) -> bool:
        """The run directory holds what living workers use and nothing else."""
        names = {path.name for path in self.run_directory.iterdir()} - {"fences", "owner"}
        sockets = {name.removesuffix(".sock") for name in names if name.endswith(".sock")}
        arenas = {name.partition(".")[0][1:] for name in names if not name.endswith(".sock")}
        return len(sockets) == sum(map(len, self.workers().values())) and arenas <= sockets


def _difference(was: Mapping[Sample, float], is_now: Mapping[Sample, float]) -> str:
    names = sorted(set(was) | set(is_now))
    changed = [name for name in names if was.get(name) != is_now.get(name)]
    return "; ".join(f"{name}: {was.get(name)} -> {is_now.get(name)}" for name in changed)


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == pid and stat[0] != "Z":
                    found.append(int(entry.name))
    return found


COMMAND: Final = (sys.executable, "-P", "-m", "omni_live", "serve")


@contextlib.contextmanager
def served(
    folder: Path,
    deploy: str = "pipelines: {voice: }\n",
    *arguments: str,
    before: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """`omni-live serve` with this deploy file, ready. `before` is a command that runs the server's."""
    folder.mkdir(exist_ok=True)
    file, ready, log = folder / "deploy.yaml", folder / "port", folder / "log"
    file.write_text(deploy)
    ready.unlink(missing_ok=True)
    command = [*before, *COMMAND, "--config", str(file), "--port", "0", "--ready-file", str(ready), *arguments]
    with log.open("ab") as output:
        # no shell in between: the process is the server, and its children are the workers
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=folder, env={**os.environ, **(environment or {})}
        )
    server = Served(process, folder)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, f"not ready:\n{server.log()}", READY_WITHIN_S)
        assert process.poll() is None, server.log()
        server.port = int(ready.read_text())
        yield server
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> int:
    """End it as a supervisor does; its exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return process.returncode
