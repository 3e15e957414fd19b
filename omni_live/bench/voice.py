"""`omni-live bench voice`: how a voice conversation with the server feels, in figures.

It starts a server of its own and talks to it over the socket with recordings in real time. docs/bench.md says what each
figure is and how it is taken.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from omni_live.bench import replies
from omni_live.bench.caller import Silent
from omni_live.bench.figures import alone, cutoffs, latencies, silence, sweep_line
from omni_live.bench.pauses import Paused, place_pauses, word_gaps
from omni_live.bench.report import Progress, Value
from omni_live.bench.scenes import Site, rounds, speak_with_pause, talk, talk_together
from omni_live.bench.server import Endpoint, cpu_s, memory, own_server, process_tree
from omni_live.bench.timeline import PausedTurn, growth, largest, median, worst
from omni_live.clients.duplex import DuplexError, Options
from omni_live.clients.turns import TurnReport, Utterance
from omni_live.clients.wav import Wave

SECTIONS: Final = ("alone", "four", "eight", "cutoffs", "false", "silence", "ttft", "idle")
PAUSES: Final = 24
FALSE_TRIALS: Final = 4
"""Of each of the three kinds."""
SILENCE_TRIALS: Final = 21
"""Of each of the two kinds."""
IDLE_S: Final = 10.0
IDLE_AFTER_S: Final = 2.0
STUCK_S, STUCK_STEP_S = 60.0, 90.0
"""A section that takes longer than this, and this for each of its steps, is given up."""
_TURN_DETECTION: Final = frozenset({"threshold", "prefix_padding_ms", "silence_duration_ms"})
"""Settings that OpenAI's session object has a place for; all others are Omni Live's own."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What to measure, and how."""

    sections: tuple[str, ...] = SECTIONS
    runs: int = 2
    seed: int = 1
    model: str = "voice"
    settings: tuple[tuple[str, float], ...] = ()
    sweep: tuple[int, ...] = ()
    url: str | None = None
    api_key: str | None = None

    def options(self, *more: tuple[str, float]) -> Options:
        """The session's settings."""
        settings = dict((*self.settings, *more))
        detection = {name: value for name, value in settings.items() if name in _TURN_DETECTION}
        own = {name: value for name, value in settings.items() if name not in _TURN_DETECTION}
        return Options(turn_detection=detection, omni_live=own)


Section = Callable[[Site], Awaitable[Mapping[str, Value]]]


class Bench:
    """One run of the bench."""

    def __init__(self, asked: Asked, utterances: Sequence[Utterance]) -> None:
        self.problems: list[str] = []
        """What could not be measured, and why."""
        self.notes: list[str] = []
        """What the figures do not say."""
        self._asked = asked
        self._utterances = utterances
        self._paused: list[Paused] = []
        self._sections: Mapping[str, tuple[Section, int]] = {
            "alone": (self._alone, asked.runs * len(utterances)),
            "four": (self._four, 2 * asked.runs),
            "eight": (self._eight, asked.runs),
            "cutoffs": (self._cutoffs, PAUSES * (1 + len(asked.sweep))),
            "false": (self._false, FALSE_TRIALS * len(replies.DISTURBANCES)),
            "silence": (self._silence, 2 * SILENCE_TRIALS),
            "ttft": (self._ttft, asked.runs * 2 * len(replies.SMALL_TALK)),
            "idle": (self._idle, round(IDLE_S)),
        }
        self._progress = Progress(sum(self._sections[name][1] for name in asked.sections))

    async def run(self) -> dict[str, Value]:
        """The figures by key. Raises NoServer, DuplexError where there is nothing to measure."""
        asked = self._asked
        values: dict[str, Value] = {"load1_before": os.getloadavg()[0]}
        if "cutoffs" in asked.sections:
            self._paused = await self._placed()
        self._progress.enter("starting the server")
        async with self._server() as endpoint:
            site = Site(endpoint, asked.model, asked.options())
            values["ready_s"] = endpoint.ready_s
            for name in asked.sections:
                values.update(await self._measured(name, site))
            values["stale_chunks"] = site.stale
        self._progress.close()
        return {**values, **self._circumstances()}

    def _circumstances(self) -> dict[str, Value]:
        asked = self._asked
        return {
            "runs": asked.runs,
            "load1_after": os.getloadavg()[0],
            "cpus": len(os.sched_getaffinity(0)),
            "model": asked.model,
            "settings": " ".join(f"{name}={value:g}" for name, value in asked.settings) or "default",
        }

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[Endpoint]:
        asked = self._asked
        if asked.url is not None:
            yield Endpoint(asked.url, asked.api_key)
            return
        async with own_server(asked.model) as endpoint:
            yield endpoint

    async def _measured(self, name: str, site: Site) -> Mapping[str, Value]:
        section, steps = self._sections[name]
        before = self._progress.done
        self._progress.enter(name)
        values: Mapping[str, Value] = {}
        limit_s = STUCK_S + STUCK_STEP_S * steps
        try:
            async with asyncio.timeout(limit_s):
                values = await section(site)
        except (Silent, DuplexError) as error:
            self.problems.append(f"{name}: {error}")
        except TimeoutError:
            self.problems.append(f"{name}: not done within {limit_s:.0f} s")
        self._progress.step(before + steps - self._progress.done)
        return values

    # -- latency ---------------------------------------------------------------------------------------------------

    async def _alone(self, site: Site) -> Mapping[str, Value]:
        reports: list[TurnReport] = []
        for _ in range(self._asked.runs):
            reports += await talk(site, self._utterances, self._progress.step)
        self._check(reports, self._asked.runs * len(self._utterances))
        return alone(reports)

    async def _four(self, site: Site) -> Mapping[str, Value]:
        latencies = await self._together(site, 4, 2 * self._asked.runs)
        return {"v2v_ms_p50_4": median(latencies), "v2v_ms_max_4": largest(latencies)}

    async def _eight(self, site: Site) -> Mapping[str, Value]:
        return {"v2v_ms_p50_8": median(await self._together(site, 8, self._asked.runs))}

    async def _together(self, site: Site, users: int, count: int) -> list[float]:
        reports: list[TurnReport] = []
        for utterances in rounds(self._utterances, users, count):
            reports += await talk_together(site, utterances, self._progress.step)
        self._check(reports, users * count)
        return latencies(reports)

    def _check(self, reports: Sequence[TurnReport], said: int) -> None:
        """Notes the turns that nobody answered; they have no latency, so the figures do not show them."""
        unanswered = said - len(latencies(reports))
        if unanswered:
            self.problems.append(f"{self._progress.section}: {unanswered} of {said} turns were not answered")

    # -- pauses ----------------------------------------------------------------------------------------------------

    async def _placed(self) -> list[Paused]:
        self._progress.enter("looking for the gaps between words")
        try:
            return await asyncio.to_thread(_placed, self._utterances, self._asked.seed)
        except ModuleNotFoundError as error:
            self.problems.append(f"cutoffs: {error.name} is missing; pip install 'omni-live[voice]' brings it")
            return []

    async def _cutoffs(self, site: Site) -> Mapping[str, Value]:
        if not self._paused:
            self.problems.append("cutoffs: no gap between two words was found for sure in these recordings")
            return {}
        turns = await self._with_pauses(site, self._asked.options())
        for min_silence_ms in self._asked.sweep:
            swept = await self._with_pauses(site, self._asked.options(("min_silence_ms", min_silence_ms)))
            self.notes.append(sweep_line(min_silence_ms, swept))
        return cutoffs(turns)

    async def _with_pauses(self, site: Site, options: Options) -> list[PausedTurn]:
        turns = []
        for paused in self._paused:
            turns.append(await speak_with_pause(site, paused, options))
            self._progress.step()
        return turns

    # -- interruptions ---------------------------------------------------------------------------------------------

    async def _false(self, site: Site) -> Mapping[str, Value]:
        trials: list[replies.Disturbed] = []
        for index, kind in enumerate(replies.DISTURBANCES):
            utterance = self._utterances[index % len(self._utterances)]
            found = await replies.disturb(
                site, kind, utterance, FALSE_TRIALS, self._asked.seed + index, self._progress.step
            )
            cancelled, held = sum(one.cancelled for one in found), sum(one.holds > 0 for one in found)
            self.notes.append(f"{kind}: of {len(found)} replies {cancelled} cancelled, {held} held for a moment")
            trials += found
        return {"false_interrupts": sum(one.cancelled for one in trials), "false_interrupt_trials": len(trials)}

    async def _silence(self, site: Site) -> Mapping[str, Value]:
        cancels = await replies.cancel_replies(site, SILENCE_TRIALS, self._progress.step)
        speech = await replies.interrupt_replies(site, self._utterances, SILENCE_TRIALS, self._progress.step)
        self.notes.append(f"silence: {len(cancels)} replies stopped by a cancel, {len(speech)} by speech")
        lag_ms = worst(one.lag_ms for one in (*cancels, *speech))
        if lag_ms is not None:
            self.notes.append(f"silence: content reached the client at most {lag_ms:.0f} ms after it was handed out")
        return silence(cancels, speech)

    # -- the rest --------------------------------------------------------------------------------------------------

    async def _ttft(self, site: Site) -> Mapping[str, Value]:
        growths = []
        for interrupted in (False, True):
            talks = [
                await replies.small_talk(site, interrupted=interrupted, step=self._progress.step)
                for _ in range(self._asked.runs)
            ]
            growths.append(growth((one[replies.EARLY - 1] for one in talks), (one[replies.LATE - 1] for one in talks)))
        return {"ttft_growth": worst(growths)}

    async def _idle(self, site: Site) -> Mapping[str, Value]:
        if not site.endpoint.pid:
            return {}
        await asyncio.sleep(IDLE_AFTER_S)
        pids = process_tree(site.endpoint.pid)
        before = cpu_s(pids)
        for _ in range(round(IDLE_S)):
            await asyncio.sleep(1.0)
            self._progress.step()
        used = memory(pids)
        fraction = (cpu_s(pids) - before) / IDLE_S
        return {"idle_cpu_fraction": fraction, "rss_mb": used.pss_mb, "rss_sum_mb": used.rss_mb}


def _placed(utterances: Sequence[Utterance], seed: int) -> list[Paused]:
    """The recordings with pauses in them. Raises ModuleNotFoundError without the recogniser."""
    from omni_live.models.whisper import Whisper

    whisper = Whisper(parallel=1)

    def recognise(sound: Wave) -> str:
        return whisper.transcribe(np.ascontiguousarray(sound, np.float32)).text

    try:
        known = [utterance for utterance in utterances if utterance.text]
        return place_pauses([(utterance, word_gaps(utterance, recognise)) for utterance in known], PAUSES, seed)
    finally:
        whisper.close()
