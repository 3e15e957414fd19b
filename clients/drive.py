"""Simulated robots that ask a server what to do, each on a socket and in a session of its own."""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from omni_live.clients.chunks import Action, Executor, Rules
from omni_live.clients.clock import Clock, MonotonicClock, S
from omni_live.clients.envs.table import CONTRACT, Observation, TableEnv
from omni_live.clients.robot import Episode, run_episode
from omni_live.clients.robot_link import Overloaded, Policy, RobotError, SessionLost, connect

FILMED: Final = 4
"""Episodes of the first robot that are on the film."""
ZOOM: Final = 4
"""Pixels of the film per pixel of the table, each way."""
FRAME_MS: Final = 50
BAR: Final = 24

T = TypeVar("T")
Frame = NDArray[np.uint8]
Figures = dict[str, float | int | None]


class CannotRender(Exception):
    """There is no Pillow to write a film with."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is driven, and how."""

    url: str
    robots: int = 1
    episodes: int = 10
    """Of each robot."""
    rules: Rules = field(default_factory=Rules)
    rate_hz: float = 0.0
    """0: as fast as it goes."""
    max_steps: int = 150
    seed: int = 0
    """Robot i acts in the worlds of seed + i."""
    jpeg: bool = False
    api_key: str | None = None
    timeout_s: float = 10.0
    patience_s: float = 60.0
    """With a server that is full."""
    films: bool = False


@dataclass(slots=True)
class Result:
    """What came of it."""

    episodes: list[Episode] = field(default_factory=list)
    wall_s: float = 0.0
    drops: int = 0
    resumes: int = 0
    is_stated: bool = True
    """Whether the server stated its contract."""
    film: list[Frame] = field(default_factory=list)

    @property
    def success(self) -> float:
        """The share of episodes that ended well."""
        return sum(episode.success for episode in self.episodes) / max(1, len(self.episodes))

    def figures(self) -> Figures:
        """What was measured, by name; None where nothing was."""
        rtts = [rtt for episode in self.episodes for rtt in episode.rtts_ms]
        batches = [batch for episode in self.episodes for batch in episode.batches]
        return {
            "episodes": len(self.episodes),
            "success": round(self.success, 4),
            "wall_s": round(self.wall_s, 3),
            "steps": self._sum(lambda episode: episode.steps),
            "chunks": len(rtts),
            "chunks_per_s": round(len(rtts) / self.wall_s, 1) if self.wall_s else None,
            "rtt_p50_ms": _percentile(rtts, 50),
            "rtt_p99_ms": _percentile(rtts, 99),
            "batch_mean": round(sum(batches) / len(batches), 2) if batches else None,
            "continued_chunks": self._sum(lambda episode: episode.continued),
            "late_chunks": self._sum(lambda episode: episode.late_chunks),
            "unsafe_chunks": self._sum(lambda episode: episode.unsafe_chunks),
            "late_steps": self._sum(lambda episode: episode.late_steps),
            "holds": self._sum(lambda episode: episode.holds),
            "failures": self._sum(lambda episode: episode.failures),
            "broken_off": self._sum(lambda episode: bool(episode.ended)),
            "drops": self.drops,
            "resumes": self.resumes,
        }

    def _sum(self, count: Callable[[Episode], int]) -> int:
        return sum(count(episode) for episode in self.episodes)


def _percentile(values: list[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 2) if values else None


def report(result: Result) -> str:
    """The figures for people to read."""
    found = result.figures()
    lines = [
        f"success   {result.success:.0%} of {found['episodes']} episodes",
        f"steps     {found['steps']} in {found['wall_s']} s",
        f"chunks    {found['chunks']}, {_shown(found['chunks_per_s'])} a second",
        f"answers   {_shown(found['rtt_p50_ms'])} ms at the median, {_shown(found['rtt_p99_ms'])} ms at 99 %",
    ]
    if found["batch_mean"] is not None:
        lines.append(f"batches   {found['batch_mean']} robots on average")
    lines += [
        f"{name:<9} {', '.join(f'{found[key]} {words}' for key, words in which)}"
        for name, which in _TROUBLE
        if name == "late" or any(found[key] for key, _ in which)
    ]
    return "\n".join(lines)


_TROUBLE: Final = (
    ("late", (("late_steps", "steps"), ("late_chunks", "chunks"))),
    ("smooth", (("continued_chunks", "chunks went on where the last one was"),)),
    ("held", (("holds", "steps"), ("unsafe_chunks", "unsafe chunks"))),
    ("failed", (("failures", "requests"), ("broken_off", "episodes broken off"))),
    ("lost", (("drops", "sockets"), ("resumes", "of them back"))),
)


def _shown(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


# -- driving


async def drive(plan: Plan, progress: "Progress | None" = None, clock: Clock | None = None) -> Result:
    """All robots at once, until each had its episodes. Raises RobotError: one robot's trouble ends it for all."""
    clock = clock or MonotonicClock()
    team = _Team(plan, progress, clock)
    trouble: RobotError | None = None
    began_ns = clock.now_ns()
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(plan.robots):
                group.create_task(team.robot(index))
    except* RobotError as errors:
        trouble = next(error for error in errors.exceptions if isinstance(error, RobotError))
    finally:
        if progress is not None:
            progress.close()
    if trouble is not None:
        raise trouble
    team.result.wall_s = (clock.now_ns() - began_ns) / S
    return team.result


class _Team:
    def __init__(self, plan: Plan, progress: "Progress | None", clock: Clock) -> None:
        self.result = Result()
        self._plan = plan
        self._progress = progress
        self._clock = clock

    async def robot(self, index: int) -> None:
        plan = self._plan
        world = TableEnv(plan.seed + index)
        executor = Executor(plan.rules)
        async with contextlib.AsyncExitStack() as stack:
            policy = await self._patiently(lambda: stack.enter_async_context(self._line()))
            self.result.is_stated = policy.is_stated
            for number in range(plan.episodes):
                is_filmed = plan.films and index == 0 and number < FILMED
                episode = await self._episode(policy, world, executor, is_filmed=is_filmed)
                self.result.episodes.append(episode)
                if self._progress is not None:
                    self._progress.step(episode)
            self.result.drops += policy.counts.drops
            self.result.resumes += policy.counts.resumes

    def _line(self) -> contextlib.AbstractAsyncContextManager[Policy]:
        plan = self._plan
        return connect(
            plan.url, CONTRACT, api_key=plan.api_key, jpeg=plan.jpeg, timeout_s=plan.timeout_s, clock=self._clock
        )

    async def _episode(self, policy: Policy, world: TableEnv, executor: Executor, *, is_filmed: bool) -> Episode:
        observation = world.reset()
        if is_filmed:
            self.result.film.append(world.render())
        acting = _Filmed(world, self.result.film) if is_filmed else world
        plan = self._plan
        try:
            return await self._patiently(
                lambda: run_episode(
                    policy,
                    acting,
                    observation,
                    executor,
                    max_steps=plan.max_steps,
                    rate_hz=plan.rate_hz,
                    clock=self._clock,
                )
            )
        except SessionLost as error:
            if error.code == "connection_lost":
                raise
            return Episode(ended=error.code)  # the next one begins in a new session

    async def _patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Again while the server is full; nothing has moved then."""
        deadline_ns = self._clock.now_ns() + round(self._plan.patience_s * S)
        while True:
            try:
                return await attempt()
            except Overloaded as error:
                again_ns = self._clock.now_ns() + round((error.retry_after_s or 1.0) * S)
                if again_ns > deadline_ns:
                    raise
            await self._clock.sleep_until_ns(again_ns)


class _Filmed:
    """A world that is filmed."""

    def __init__(self, world: TableEnv, film: list[Frame]) -> None:
        self._world = world
        self._film = film

    def step(self, action: Action) -> tuple[Observation, bool]:
        outcome = self._world.step(action)
        self._film.append(self._world.render())
        return outcome


@dataclass(slots=True)
class Progress:
    """A bar on a terminal, nothing elsewhere."""

    total: int
    out: TextIO = field(default_factory=lambda: sys.stderr)
    done: int = 0
    won: int = 0

    def step(self, episode: Episode) -> None:
        self.done += 1
        self.won += episode.success
        if self.out.isatty():
            full = round(BAR * self.done / self.total)
            bar = "#" * full + "." * (BAR - full)
            self.out.write(f"\r\033[K[{bar}] {self.done} of {self.total} episodes, {self.won} done well")
            self.out.flush()

    def close(self) -> None:
        if self.out.isatty():
            self.out.write("\r\033[K")
            self.out.flush()


# -- the film


def check_film() -> None:
    """Raises CannotRender where no film could be written in the end."""
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError:
        raise CannotRender("--render needs Pillow: pip install pillow") from None


def write_film(film: list[Frame], path: Path, frame_ms: int = FRAME_MS) -> None:
    """An animated GIF, `ZOOM` times as large as the table. Raises CannotRender, OSError."""
    check_film()
    from PIL import Image

    images = [
        Image.fromarray(frame).resize((frame.shape[1] * ZOOM, frame.shape[0] * ZOOM), Image.Resampling.NEAREST)
        for frame in film
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    images[0].save(path, format="GIF", save_all=True, append_images=images[1:], duration=frame_ms, loop=0)
