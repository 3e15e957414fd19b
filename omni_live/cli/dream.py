"""Dream a rollout of the table in a served world model, beside what truly happens; or play in the dream."""

import argparse
import asyncio
import json
import os
import signal
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Final

from omni_live.clients.dream import CannotDream, Plan, Progress, check, dream, report
from omni_live.clients.dream_game import play
from omni_live.clients.drive import CannotRender, check_film, write_film
from omni_live.clients.envs.table import TableEnv
from omni_live.clients.keyboard import Screen, keys_at_once, pressed
from omni_live.clients.world import connect
from omni_live.clients.world_errors import WorldError

DEFAULT_URL: Final = "ws://127.0.0.1:8765/v1/world"
KEY_VARIABLE: Final = "OMNI_LIVE_API_KEY"
FRAME_MS: Final = 100
"""Of a film: twice as fast as the table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="the world's door (default: %(default)s)")
    parser.add_argument("--api-key", default=None, help=f"default: the environment variable {KEY_VARIABLE}")
    parser.add_argument("--steps", type=_count, default=64, metavar="N", help="frames (default: %(default)s)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="S", help="of table and dream (default: %(default)s)")
    parser.add_argument(
        "--actions",
        default="expert",
        metavar="expert|random|FILE",
        help="a scripted expert's, random ones, or those of a file, JSON lines or .npy: [x, y] from -1 to 1, "
        "two for each frame (default: %(default)s)",
    )
    parser.add_argument(
        "--render", type=Path, default=None, metavar="GIF", help="film both, the true table on the left (needs Pillow)"
    )
    parser.add_argument("--interactive", action="store_true", help="play in the dream with the arrow keys")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**53:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Dream; the exit status: 0, or 1 with a sentence on standard error."""
    plan = Plan(
        args.url,
        args.steps,
        args.seed,
        args.actions,
        args.api_key or os.environ.get(KEY_VARIABLE),
        films=args.render is not None,
    )
    try:
        return _play(plan) if args.interactive else _dream(plan, args)
    except (WorldError, CannotDream, CannotRender) as error:
        print(f"omni-live dream: {error}", file=sys.stderr)
    except OSError as error:
        print(f"omni-live dream: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
    return 1


def _dream(plan: Plan, args: argparse.Namespace) -> int:
    if args.render is not None:
        check_film()
    result = asyncio.run(dream(plan, None if args.json else Progress(plan.steps)))
    if args.render is not None:
        write_film(result.film, args.render, FRAME_MS)
    print(json.dumps(result.figures()) if args.json else report(result))
    return 0


def _play(plan: Plan) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("omni-live dream: --interactive needs a terminal", file=sys.stderr)
        return 1
    return asyncio.run(_played(plan))


async def _played(plan: Plan) -> int:
    """A game on this terminal; what ends the process goes past the restoring of it."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    ended: list[int] = []

    def end(number: int) -> None:
        ended.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    try:
        async with connect(plan.url, api_key=plan.api_key) as link:
            check(link.facts)
            world = await link.open(seed=plan.seed, image=TableEnv(plan.seed).render())
            with keys_at_once(sys.stdin), Screen() as screen:
                async with aclosing(pressed()) as keys:
                    await play(world, keys, screen)
    except asyncio.CancelledError:
        if not ended:
            raise
        return 128 + ended[0]
    return 0
