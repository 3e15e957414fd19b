"""`omni-live demo`: hear it. A server is started and spoken to in three turns, the second of which is interrupted.

The user is recorded (the repository's tests/data/voice), the answers are made by the models. What was heard, answered
and how fast is printed; the sound of the answers is written as one wav file, cut off where it was interrupted.
"""

import argparse
import asyncio
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from omni_live.bench.server import Endpoint, NoServer, own_server
from omni_live.bench.wavs import RATE_HZ, NoWavs, load_wavs
from omni_live.clients.converse import Plan, converse
from omni_live.clients.duplex import DuplexError, Options, connect
from omni_live.clients.jitter import Pcm
from omni_live.clients.playback import Player, WrongRate
from omni_live.clients.turns import TurnReport, Utterance
from omni_live.clients.wav import write_wav

SCRIPT: Final = ("00_kokf.wav", "01_kokm.wav", "06_kokf.wav")
"""A question, a request for a story, and a wish to hear no more of it."""
INTERRUPTED: Final = 2
INTERRUPT_S: Final = 1.5
"""So far into the second reply the third recording begins; the speech in it half a second later."""
BETWEEN_S: Final = 0.5
"""Silence between the replies in the wav file."""
MODEL: Final = "voice"
WIDTH: Final = 96


class Disappointed(Exception):
    """The conversation did not go as it should have; the text says how."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("out/demo.wav"), metavar="WAV", help="default: %(default)s")
    parser.add_argument("--wavs", type=Path, metavar="DIR", help="other recordings: the first three of the folder")


def run(args: argparse.Namespace) -> int:
    """0, or 1 with a sentence on standard error."""
    try:
        asyncio.run(_demo(choose(load_wavs(args.wavs)), args.out))
    except (NoWavs, NoServer, DuplexError, WrongRate, Disappointed) as error:
        print(f"omni-live demo: {error}", file=sys.stderr)
    except OSError as error:
        print(f"omni-live demo: {error.filename or args.out}: {error.strerror or error}", file=sys.stderr)
    else:
        return 0
    return 1


def choose(utterances: Sequence[Utterance]) -> list[Utterance]:
    """The three that are said: those of the script where they are there, else the first three. Raises NoWavs."""
    named = {utterance.name: utterance for utterance in utterances}
    if all(name in named for name in SCRIPT):
        return [named[name] for name in SCRIPT]
    if len(utterances) < len(SCRIPT):
        raise NoWavs(f"the demo needs {len(SCRIPT)} recordings, and there are {len(utterances)}")
    return list(utterances[: len(SCRIPT)])


async def _demo(utterances: Sequence[Utterance], out: Path) -> None:
    print("Starting a server with the voice pipeline ...", flush=True)
    async with own_server(MODEL) as endpoint:
        print(f"It was ready after {endpoint.ready_s or 0.0:.1f} s. The user speaks from recordings.\n", flush=True)
        player = Player(record=True)
        reports = await _converse(endpoint, utterances, player)
    check(reports)
    sound = joined([reply.played_sound() for reply in player.replies.values()], player.rate_hz)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_wav(out, sound, player.rate_hz)
    print(f"The answers as they were heard: {out} ({len(sound) / player.rate_hz:.1f} s)")


async def _converse(endpoint: Endpoint, utterances: Sequence[Utterance], player: Player) -> list[TurnReport]:
    async with connect(endpoint.url, model=MODEL, options=Options()) as session:
        return await converse(
            session,
            utterances,
            player=player,
            rate_hz=RATE_HZ,
            plan=Plan(interrupts={INTERRUPTED: INTERRUPT_S}),
            on_turn=lambda report: print(told(report), flush=True),
        )


def told(report: TurnReport) -> str:
    """A turn as the demo prints it."""
    lines = [f"Turn {report.index}"]
    if report.said:
        lines += _part("said", report.said)
    lines += _part("heard", report.heard or "(nothing)")
    lines += _part("answer", report.answered or "(none)")
    cut = next((reply for reply in report.replies if reply.status == "cancelled"), None)
    if cut is not None:
        lines += _part("", f"interrupted after {cut.played_ms / 1000:.1f} s")
    if report.stop_ms is not None:
        lines += _part("silence", f"the reply before fell silent {report.stop_ms:.0f} ms after the user began to speak")
    lines += _part("latency", _latency(report))
    return "\n".join([*lines, ""])


def _latency(report: TurnReport) -> str:
    if report.v2v_ms is None:
        return "no answer was heard"
    parts = [f"{report.v2v_ms:.0f} ms from the last word to the answer"]
    if report.v2v_played_ms is not None:
        parts.append(f"{report.v2v_played_ms:.0f} ms until it sounds")
    if report.underruns:
        parts.append(f"{report.underruns} gaps in it")
    return ", ".join(parts)


def _part(name: str, text: str) -> list[str]:
    first, *rest = textwrap.wrap(text, WIDTH) or [""]
    return [f"  {name:<9}{first}".rstrip(), *(f"  {'':<9}{line}" for line in rest)]


def check(reports: Sequence[TurnReport]) -> None:
    """Raises Disappointed unless three turns were heard and answered and the second reply was interrupted."""
    if len(reports) < len(SCRIPT):
        raise Disappointed(f"the server ended the conversation after {len(reports)} of {len(SCRIPT)} turns")
    for report in reports:
        if not report.heard:
            raise Disappointed(f"the server did not understand turn {report.index}")
        if report.v2v_ms is None:
            raise Disappointed(f"turn {report.index} was not answered")
    if not any(reply.status == "cancelled" for reply in reports[INTERRUPTED - 1].replies):
        raise Disappointed("the second reply was not interrupted by the third turn")
    if reports[INTERRUPTED].stop_ms is None:
        raise Disappointed("the interrupted reply did not fall silent")


def joined(sounds: Sequence[Pcm], rate_hz: int) -> Pcm:
    """One sound after the other, with a short silence between them."""
    silence = np.zeros(round(BETWEEN_S * rate_hz), np.int16)
    parts = [part for sound in sounds for part in (sound, silence)]
    return np.concatenate([np.zeros(0, np.int16), *parts[:-1]])
