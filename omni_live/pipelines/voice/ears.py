"""The ears: voice activity for each frame of every session, transcripts where the listener wants them.

Voice activity runs in the runner's steps; recognition runs in helper threads beside them, so that a transcript for one
session never keeps another's microphone waiting. Recognition is most urgent first: a committed utterance before a
speculative one, then in order of arrival.
"""

import heapq
import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from omni_live.engines.contract import EngineOptions, Host, Load, SessionError, Turn, TurnError
from omni_live.engines.options import Options, param_int, param_real
from omni_live.models.silero import Vad, VadState
from omni_live.models.whisper import Whisper
from omni_live.pipelines.voice.completeness import completeness, prosody
from omni_live.pipelines.voice.listener import Listener, Pcm, Report, Settle, Transcribe
from omni_live.sessions.findings import Finding, Heard, write_finding
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.settings import TurnDetection
from omni_live.sessions.stamp import SessionKey

log = logging.getLogger(__name__)

FRAMES_A_STEP: Final = 64
MAX_WAITING_JOBS: Final = 256


@dataclass(order=True, slots=True)
class Job:
    """One transcript to be made; ordered by urgency."""

    speculative: bool
    order: int
    session: SessionKey = field(compare=False)
    wanted: Transcribe = field(compare=False)


@dataclass(slots=True)
class Ear:
    """One session's microphone."""

    listener: Listener
    vad: VadState
    frames: deque[Pcm] = field(default_factory=deque)
    heard: Heard | None = None
    """The latest transcript."""
    running: Transcribe | None = None
    """The latest transcript asked for."""
    settle: Settle | None = None
    """A commit that waits for the running transcript."""


class Ears:
    """Engine of the ears stage. Options: recognisers (threads)."""

    inline = False

    def __init__(self, options: EngineOptions) -> None:
        read = Options("ears", options)
        self._parallel = read.whole("recognisers", 2, 1, 16)
        read.done()
        self._ears: dict[SessionKey, Ear] = {}
        self._jobs: list[Job] = []
        self._order = 0
        self._results: deque[tuple[SessionKey, Transcribe, str, float]] = deque()
        self._lock = threading.Condition()
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def load(self, host: Host) -> None:
        self._host = host
        self._vad = Vad()
        self._whisper = Whisper(parallel=self._parallel)
        self._whisper.transcribe(np.zeros(16_000, np.float32))
        self._vad.probability(VadState(), np.zeros(512, np.float32))
        for number in range(self._parallel):
            thread = threading.Thread(target=self._recognise, name=f"recogniser-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    # -- sessions ------------------------------------------------------------------------------------------------

    def open(self, session: SessionKey, params: Mapping[str, Scalar]) -> None:
        self._ears[session] = Ear(Listener(TurnDetection()), VadState())

    def close(self, session: SessionKey) -> None:
        self._ears.pop(session, None)
        with self._lock:
            self._jobs = [job for job in self._jobs if job.session != session]
            heapq.heapify(self._jobs)

    def fork(self, session: SessionKey, into: SessionKey) -> None:
        """A fork hears from its own beginning on."""
        self.open(into, {})

    def snapshot(self, session: SessionKey) -> Payload:
        return Payload("nothing")

    def restore(self, session: SessionKey, payload: Payload) -> None:
        """What was said before a restore is in the conversation's items."""

    def listen(self, session: SessionKey, payload: Payload) -> None:
        ear = self._ears.get(session)
        if ear is None:
            raise SessionError(session, "unknown_session")
        match payload.kind:
            case "pcm":
                ear.frames.extend(ear.listener.take(np.frombuffer(payload.body, "<i2").astype(np.int16)))
            case "commit":
                self._hear_all(session, ear)
                self._commit(session, ear, param_int(payload.meta, "utterance", 0))
            case "discard":
                self._hear_all(session, ear)
                if ear.listener.open_utterance == param_int(payload.meta, "utterance", 0):
                    ear.listener.clear()
            case "clear":
                self._hear_all(session, ear)  # positions count what is forgotten, too
                ear.listener.clear()
                ear.settle = ear.running = None
            case "configure":
                self._configure(session, ear, payload.meta)
            case _:
                raise SessionError(session, "unknown_input")

    def _commit(self, session: SessionKey, ear: Ear, utterance: int) -> None:
        reports = ear.listener.commit(utterance or None)
        self._report(session, ear, reports)
        if not utterance and not reports:
            at = ear.listener.at
            self._find(session, Heard(ear.listener.nothing(), at, at, "", 0.0, True))

    def _configure(self, session: SessionKey, ear: Ear, meta: Mapping[str, Scalar]) -> None:
        self._hear_all(session, ear)
        detection = TurnDetection(
            threshold=param_real(meta, "threshold", 0.5),
            prefix_padding_ms=param_int(meta, "prefix_padding_ms", 300),
            silence_duration_ms=param_int(meta, "silence_duration_ms", 736),
            speculative_ms=param_int(meta, "speculative_ms", 96),
            min_speech_ms=param_int(meta, "min_speech_ms", 96),
        )
        ear.listener.go_on_from(param_int(meta, "position", 0), param_int(meta, "utterance", 0))
        self._report(session, ear, ear.listener.configure(detection if meta.get("detect") else None))

    # -- turns: transcription alone ------------------------------------------------------------------------------

    def begin(self, turn: Turn) -> None:
        raise TurnError(turn, "unsupported_input")

    def drop(self, turn: Turn) -> None:
        """No turn runs here."""

    # -- hearing -------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        while self._results:
            self._heard(*self._results.popleft())
        left = FRAMES_A_STEP
        for session, ear in list(self._ears.items()):
            while ear.frames and left:
                left -= 1
                self._hear(session, ear, ear.frames.popleft())
        return any(ear.frames for ear in self._ears.values())

    def _hear_all(self, session: SessionKey, ear: Ear) -> None:
        """A command counts from the last sample that came before it."""
        while ear.frames:
            self._hear(session, ear, ear.frames.popleft())

    def _hear(self, session: SessionKey, ear: Ear, frame: Pcm) -> None:
        probability = self._vad.probability(ear.vad, frame.astype(np.float32) / np.float32(32768))
        self._report(session, ear, ear.listener.hear(frame, probability))

    def _report(self, session: SessionKey, ear: Ear, reports: list[Report]) -> None:
        for report in reports:
            match report:
                case Transcribe():
                    self._want(session, ear, report)
                case Settle():
                    self._settle(session, ear, report)
                case _:
                    self._find(session, report)

    def _find(self, session: SessionKey, finding: Finding) -> None:
        self._host.find(session, write_finding(finding))

    def _settle(self, session: SessionKey, ear: Ear, settle: Settle) -> None:
        """A commit that an earlier transcript answers, or will."""
        heard = ear.heard
        if heard is not None and (heard.utterance, heard.end) == (settle.utterance, settle.end):
            self._find(session, Heard(heard.utterance, heard.start, heard.end, heard.text, 1.0, True))
        else:
            ear.settle = settle
            self._hurry(session, settle.utterance)

    def _hurry(self, session: SessionKey, utterance: int) -> None:
        """The transcript of it is awaited now: nothing overtakes it any more."""
        with self._lock:
            for job in self._jobs:
                if job.session == session and job.wanted.utterance == utterance:
                    job.speculative = False
            heapq.heapify(self._jobs)

    # -- recognition ---------------------------------------------------------------------------------------------

    def _want(self, session: SessionKey, ear: Ear, wanted: Transcribe) -> None:
        ear.running = wanted
        with self._lock:
            # a speculative job that has not begun is overtaken by a later one of the same session
            self._jobs = [job for job in self._jobs if job.session != session or not job.speculative]
            heapq.heapify(self._jobs)
            full = len(self._jobs) >= MAX_WAITING_JOBS
            if not full:
                self._order += 1
                heapq.heappush(self._jobs, Job(not wanted.final, self._order, session, wanted))
                self._lock.notify()
        if full:  # nothing was understood, and the session learns that at once
            self._heard(session, wanted, "", 0.0)

    def _recognise(self) -> None:
        """Runs in each helper thread until the engine shuts."""
        while (job := self._next_job()) is not None:
            wanted = job.wanted
            transcript = self._whisper.transcribe(wanted.pcm.astype(np.float32) / np.float32(32768))
            text = transcript.text
            finished = completeness(text, prosody(wanted.pcm, wanted.speech_end - wanted.start))
            self._results.append((job.session, wanted, text, finished))
            self._host.wake()

    def _next_job(self) -> Job | None:
        with self._lock:
            while not self._jobs and not self._stopping:
                self._lock.wait()
            return None if self._stopping else heapq.heappop(self._jobs)

    def _heard(self, session: SessionKey, wanted: Transcribe, text: str, finished: float) -> None:
        ear = self._ears.get(session)
        if ear is None:
            return
        settle = ear.settle
        settles = settle is not None and (settle.utterance, settle.end) == (wanted.utterance, wanted.end)
        if settles:
            ear.settle = None
        heard = Heard(wanted.utterance, wanted.start, wanted.end, text, finished, wanted.final or settles)
        ear.heard = heard
        if ear.running is wanted:
            ear.running = None
        self._find(session, heard)

    def load_now(self) -> Load:
        with self._lock:
            waiting = len(self._jobs)
        return Load(len(self._ears), 0, waiting, 0, 0)

    def shut(self) -> None:
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(timeout=2.0)
        self._whisper.close()
