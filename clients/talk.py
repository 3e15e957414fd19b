"""`omni-live talk`: a conversation with a microphone and a loudspeaker, or with wav files in their place."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np

from omni_live.clients.clock import MS, Clock, MonotonicClock
from omni_live.clients.converse import Plan, Talking, acknowledge, converse, listen, load_utterance
from omni_live.clients.duplex import DuplexError, Options, Session, connect
from omni_live.clients.duplex_events import Committed, Detached, Event, Reattached, Refusal, ReplyEnded, SpeechStarted
from omni_live.clients.echo import EchoGuard, level
from omni_live.clients.jitter import Pcm
from omni_live.clients.playback import ACK_MS, Player, WrongRate
from omni_live.clients.soundcard import (
    NoSound,
    SoundCard,
    devices,
    loudspeaker_side,
    microphone_side,
    parse_device,
)
from omni_live.clients.turns import Conversation, TurnReport, Utterance, as_json
from omni_live.clients.wav import BadWav, write_wav

DEFAULT_URL = "ws://127.0.0.1:8765/v1/duplex"
KEY_VARIABLE = "OMNI_LIVE_API_KEY"
LOUD = 0.01
"""A microphone block of this level (-40 dB) may be speech: for the latency that is shown, nothing hangs on it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `omni-live talk`."""
    parser.add_argument("--url", default=DEFAULT_URL, help="the server's duplex endpoint (default: %(default)s)")
    parser.add_argument("--model", default="voice", help="the pipeline to talk to (default: %(default)s)")
    parser.add_argument("--api-key", default=None, help=f"default: the environment variable {KEY_VARIABLE}")
    parser.add_argument("--instructions", default=None, help="the system prompt")
    parser.add_argument("--voice", default=None, help="one of the pipeline's voices")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="print one JSON object per turn")
    parser.add_argument("--text-frames", action="store_true", help="JSON frames with base64 audio, not msgpack")
    card = parser.add_argument_group("with a sound card")
    card.add_argument("--list-devices", action="store_true", help="show the sound devices and exit")
    card.add_argument("--input-device", default=None, metavar="N|NAME", help="the microphone")
    card.add_argument("--output-device", default=None, metavar="N|NAME", help="the loudspeaker")
    card.add_argument(
        "--headset",
        action="store_true",
        help="the microphone does not hear the loudspeaker: send it as it is, also while a reply plays. Without this, "
        "it is turned down then, unless you are clearly louder than the echo",
    )
    files = parser.add_argument_group("with wav files")
    files.add_argument("--in", dest="inputs", action="append", type=Path, default=[], metavar="WAV", help="say this")
    files.add_argument("--out", type=Path, default=None, metavar="WAV", help="write what was played of the replies")
    files.add_argument(
        "--interrupt-at",
        action="append",
        default=[],
        type=parse_interrupt,
        metavar="[N:]SECONDS",
        help="begin the next wav so many seconds into the reply to the Nth (default: the first)",
    )
    files.add_argument("--reply-timeout", type=float, default=30.0, metavar="SECONDS", help="(default: %(default)s)")
    files.add_argument(
        "--drop-socket-at",
        action="append",
        default=[],
        type=float,
        metavar="SECONDS",
        help="lose the socket, to try it",
    )


def parse_interrupt(text: str) -> tuple[int, float]:
    """`[N:]SECONDS`; raises argparse.ArgumentTypeError."""
    number, _, seconds = text.rpartition(":")
    try:
        parsed = (int(number or "1"), float(seconds))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not [N:]SECONDS") from None
    if parsed[0] < 1 or parsed[1] < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: utterances count from 1, and time does not run backwards")
    return parsed


def run(args: argparse.Namespace) -> int:
    """Talk; returns the exit status: 0, or 1 with a sentence on standard error. Ctrl-C cuts short what files say."""
    try:
        if args.list_devices:
            print(devices())
            return 0
        return asyncio.run(_talk_files(args) if args.inputs else _talk_live(args))
    except (DuplexError, BadWav, NoSound, WrongRate) as error:
        print(f"omni-live talk: {error}", file=sys.stderr)
    except OSError as error:
        print(f"omni-live talk: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
    return 1


# -- with files ------------------------------------------------------------------------------------------------------


async def _talk_files(args: argparse.Namespace) -> int:
    utterances = [load_utterance(path) for path in args.inputs]
    options = _options(args)
    player = Player(options.output_rate_hz, record=True)
    plan = Plan(
        interrupts=dict(args.interrupt_at), reply_timeout_s=args.reply_timeout, drops_s=tuple(args.drop_socket_at)
    )
    async with _session(args, options) as session:
        reports = await converse(session, utterances, player=player, plan=plan, on_turn=_printer(args.json))
        drops, resumes = session.counts.drops, session.counts.resumes
    if args.out is not None:
        write_wav(args.out, played_replies(player), player.rate_hz)
    if drops and not args.json:
        print(f"the socket was lost {_times(drops)} and the session resumed {_times(resumes)}")
    return _verdict(utterances, reports)


def _verdict(utterances: Sequence[Utterance], reports: Sequence[TurnReport]) -> int:
    if len(reports) < len(utterances):
        print("omni-live talk: the server closed the session before everything was said", file=sys.stderr)
        return 1
    unanswered = [report.source for report in reports if report.timed_out]
    if unanswered:
        print(f"omni-live talk: no answer in time to {', '.join(unanswered)}", file=sys.stderr)
    return 1 if unanswered else 0


def played_replies(player: Player) -> Pcm:
    """All replies one after another as they were played, without the pauses."""
    return np.concatenate([np.zeros(0, np.int16), *(reply.played_sound() for reply in player.replies.values())])


def _options(args: argparse.Namespace, input_rate_hz: int = 16_000, output_rate_hz: int = 24_000) -> Options:
    return Options(
        input_rate_hz=input_rate_hz,
        output_rate_hz=output_rate_hz,
        instructions=args.instructions,
        voice=args.voice,
        omni_live={} if args.seed is None else {"seed": args.seed},
    )


def _session(args: argparse.Namespace, options: Options) -> contextlib.AbstractAsyncContextManager[Session]:
    key = args.api_key or os.environ.get(KEY_VARIABLE)
    return connect(args.url, model=args.model, api_key=key, binary=not args.text_frames, options=options)


# -- with a sound card -----------------------------------------------------------------------------------------------


async def _talk_live(args: argparse.Namespace) -> int:
    microphone = microphone_side(parse_device(args.input_device))
    loudspeaker = loudspeaker_side(parse_device(args.output_device))
    player = Player(loudspeaker.rate_hz, record=args.out is not None)
    guard = None if args.headset else EchoGuard()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with _session(args, _options(args, microphone.rate_hz, loudspeaker.rate_hz)) as session:
        with SoundCard(microphone, loudspeaker, player, guard.played if guard else None) as card:
            print("Talk. Ctrl-C ends the conversation.", file=sys.stderr, flush=True)
            hear = guard.heard if guard else None
            await live(session, card.blocks(), player, stop=stop, hear=hear, on_turn=_printer(args.json))
    if args.out is not None:
        write_wav(args.out, played_replies(player), player.rate_hz)
    return 0


async def live(
    session: Talking,
    microphone: AsyncIterator[Pcm],
    player: Player,
    *,
    stop: asyncio.Event,
    hear: Callable[[Pcm], Pcm] | None = None,
    on_turn: Callable[[TurnReport], None] | None = None,
    clock: Clock | None = None,
) -> list[TurnReport]:
    """A conversation with a person until `stop` is set or the session is closed; returns a report per turn.

    `hear` says what of each microphone block is sent. Raises what ends the session, NoSound.
    """
    clock = clock or MonotonicClock()
    ear = _Ear(Conversation(player), clock, on_turn)

    async def speak() -> None:
        async for block in microphone:
            sent = hear(block) if hear else block
            ear.note(sent)
            await session.send_audio(sent.astype("<i2").tobytes())

    async def tell() -> None:
        while True:
            await clock.sleep_until_ns(clock.now_ns() + ACK_MS * MS)
            await acknowledge(session, player)

    tasks: list[asyncio.Task[object]] = [
        asyncio.create_task(speak()),
        asyncio.create_task(tell()),
        asyncio.create_task(listen(session, player, ear.take)),
        asyncio.create_task(stop.wait()),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [ear.conversation.report(turn) for turn in ear.conversation.turns]


class _Ear:
    """Divides a conversation with a person into turns: one begins when the user starts to speak after an answer."""

    def __init__(self, conversation: Conversation, clock: Clock, on_turn: Callable[[TurnReport], None] | None) -> None:
        self.conversation = conversation
        self._clock = clock
        self._on_turn = on_turn
        self._loud_ns: int | None = None
        """When the microphone last took something that may be speech."""

    def note(self, pcm: Pcm) -> None:
        if level(pcm) > LOUD:
            self._loud_ns = self._clock.now_ns()

    def take(self, event: Event) -> None:
        last = self.conversation.turn
        if isinstance(event, SpeechStarted) and (last is None or last.replies):
            self.conversation.begin("microphone", event.at_ns)
        self.conversation.take(event)
        match event:
            case Committed() if (turn := self.conversation.turn_of(event.item_id)) is not None:
                turn.speech_end_ns = self._loud_ns
            case ReplyEnded() if (turn := self.conversation.turn_of(event.response_id)) is not None:
                if self._on_turn is not None:
                    self._on_turn(self.conversation.report(turn))
            case Detached():
                print("omni-live talk: the connection is lost, trying to get it back", file=sys.stderr)
            case Reattached():
                print(f"omni-live talk: back after {event.away_ms:.0f} ms", file=sys.stderr)
            case Refusal():
                print(f"omni-live talk: {event.code}: {event.message}", file=sys.stderr)
            case _:
                pass


# -- what is shown ---------------------------------------------------------------------------------------------------


def _printer(as_objects: bool) -> Callable[[TurnReport], None]:
    def show(report: TurnReport) -> None:
        print(json.dumps(as_json(report)) if as_objects else "\n".join(lines(report)), flush=True)

    return show


def lines(report: TurnReport) -> list[str]:
    """A turn for people to read."""
    shown = [f"turn {report.index} ({report.source})"]
    if report.said:
        shown.append(f"  said      {report.said}")
    shown.append(f"  heard     {report.heard or '(nothing)'}")
    shown.append(f"  answered  {report.answered or '(nothing)'}")
    shown.append(f"  latency   {_latency(report)}")
    if report.stop_ms is not None:
        shown.append(f"  stopped   the reply before, {report.stop_ms:.0f} ms after this began to be spoken")
    if report.interrupted:
        played_s = sum(reply.played_ms for reply in report.replies) / 1000
        shown.append(f"  cut off   after {played_s:.2f} s")
    if report.underruns:
        shown.append(f"  underruns {report.underruns}")
    return shown


def _latency(report: TurnReport) -> str:
    if report.v2v_ms is None:
        return "no answer in time" if report.timed_out else "no answer"
    heard = "" if report.v2v_played_ms is None else f", {report.v2v_played_ms:.0f} ms until it could be heard"
    return f"{report.v2v_ms:.0f} ms from the last of your words to the first of the answer{heard}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
