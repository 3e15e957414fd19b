"""Drive simulated robots by what a server serves, and see how well and how fast it does it.

That is a policy, or with `--planner world` a world model, in which a planner here dreams what its actions would do.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Final

import numpy as np

from omni_live.clients.chunks import Rules
from omni_live.clients.drive import CannotRender, Plan, Progress, Result, check_film, drive, report, write_film
from omni_live.clients.envs.table import CONTRACT
from omni_live.clients.planner import Outcome, Planner, RandomPolicy, drive_table
from omni_live.clients.planner_link import ServedDreams
from omni_live.clients.planning import Search
from omni_live.clients.robot_link import RobotError
from omni_live.clients.world import connect
from omni_live.clients.world_errors import WorldError

DEFAULT_URL: Final = "ws://127.0.0.1:8765/openpi"
WORLD_URL: Final = "ws://127.0.0.1:8765/v1/world"
KEY_VARIABLE: Final = "OMNI_LIVE_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default=None, help=f"the policy (default: {DEFAULT_URL}), or the planner's world ({WORLD_URL})"
    )
    parser.add_argument(
        "--planner",
        choices=("world", "random"),
        default=None,
        help="no policy: plan by dreaming in a world model, with a random policy beside it; or only that one",
    )
    parser.add_argument(
        "--branches", type=_count, default=32, metavar="N", help="of a planner's round (default: %(default)s)"
    )
    parser.add_argument("--api-key", default=None, help=f"default: the environment variable {KEY_VARIABLE}")
    parser.add_argument("--env", choices=("table",), default="table", help="the simulator (default: %(default)s)")
    parser.add_argument("--robots", type=_count, default=1, metavar="N", help="at once (default: %(default)s)")
    parser.add_argument("--episodes", type=_count, default=10, metavar="M", help="of each robot (default: %(default)s)")
    parser.add_argument("--max-steps", type=_count, default=150, help="of an episode (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the worlds (default: %(default)s)")
    parser.add_argument(
        "--execute",
        type=_count,
        default=4,
        metavar="K",
        help="steps of a chunk before the next is asked for (default: %(default)s)",
    )
    parser.add_argument(
        "--async",
        dest="overlaps",
        action="store_true",
        help="ask for the next chunk while one is executed: the arm never waits",
    )
    parser.add_argument(
        "--rtc",
        action="store_true",
        help="real-time chunking: --async, and each chunk is made to agree with the last one",
    )
    parser.add_argument(
        "--rate",
        type=_rate,
        default=None,
        metavar="HZ",
        help="control steps per second, 0 as fast as it goes (default: 0; with --async the policy's rate)",
    )
    parser.add_argument("--jpeg", action="store_true", help="send images as JPEG")
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="for an answer (default: %(default)s)"
    )
    parser.add_argument("--render", type=Path, default=None, metavar="GIF", help="film the first robot")
    parser.add_argument(
        "--min-success", type=float, default=None, metavar="SHARE", help="fail below this share, 0 to 1"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate_hz = float(text)
    except ValueError:
        rate_hz = -1.0
    if not 0 <= rate_hz <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate from 0 to 1000")
    return rate_hz


def run(args: argparse.Namespace) -> int:
    """Drive; the exit status: 0, or 1 with a sentence on standard error."""
    return _run_policy(args) if args.planner is None else _run_planner(args)


def _run_policy(args: argparse.Namespace) -> int:
    try:
        if args.render is not None:
            check_film()
        plan = _plan(args)
        result = asyncio.run(drive(plan, None if args.json else Progress(plan.robots * plan.episodes)))
        if args.render is not None:
            write_film(result.film, args.render)
    except (RobotError, CannotRender) as error:
        print(f"omni-live drive: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"omni-live drive: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(json.dumps(result.figures()) if args.json else report(result))
    return _verdict(result, args.min_success)


def _plan(args: argparse.Namespace) -> Plan:
    overlaps = args.overlaps or args.rtc
    rate_hz = args.rate if args.rate is not None else CONTRACT.rate_hz if overlaps else 0.0
    return Plan(
        url=args.url or DEFAULT_URL,
        robots=args.robots,
        episodes=args.episodes,
        rules=Rules(args.execute, overlaps=overlaps, continues=args.rtc),
        rate_hz=rate_hz,
        max_steps=args.max_steps,
        seed=args.seed,
        jpeg=args.jpeg,
        api_key=args.api_key or os.environ.get(KEY_VARIABLE),
        timeout_s=args.timeout,
        films=args.render is not None,
    )


def _verdict(result: Result, min_success: float | None) -> int:
    if not result.is_stated:
        print("omni-live drive: the server states no contract; it is taken to be for this robot", file=sys.stderr)
    if min_success is None or result.success >= min_success:
        return 0
    print(f"omni-live drive: success {result.success:.0%} is below {min_success:.0%}", file=sys.stderr)
    return 1


# -- planners


def _run_planner(args: argparse.Namespace) -> int:
    if args.robots != 1 or args.render is not None:
        print("omni-live drive: a planner drives one robot, and is not filmed", file=sys.stderr)
        return 1
    began = time.monotonic()
    try:
        outcome, chance = asyncio.run(_planned(args))
    except WorldError as error:
        print(f"omni-live drive: {error}", file=sys.stderr)
        return 1
    figures = {**outcome.figures(), "random_success": round(chance.share, 4)}
    if args.json:
        print(json.dumps({**figures, "wall_s": round(time.monotonic() - began, 3)}))
    else:
        print(_told(outcome, chance))
    if args.min_success is None or outcome.share >= args.min_success:
        return 0
    print(f"omni-live drive: success {outcome.share:.0%} is below {args.min_success:.0%}", file=sys.stderr)
    return 1


async def _planned(args: argparse.Namespace) -> tuple[Outcome, Outcome]:
    """How it went, and how a random policy does on the same tables."""
    chance = RandomPolicy(np.random.default_rng(args.seed))
    beside = await drive_table(chance, args.episodes, seed=args.seed, max_steps=args.max_steps)
    if args.planner == "random":
        return beside, beside
    api_key = args.api_key or os.environ.get(KEY_VARIABLE)
    async with connect(args.url or WORLD_URL, api_key=api_key) as link, aclosing(ServedDreams(link)) as dreams:
        planner = Planner(dreams, Search(branches=args.branches), np.random.default_rng(args.seed))
        return await drive_table(planner, args.episodes, seed=args.seed, max_steps=args.max_steps), beside


def _told(outcome: Outcome, chance: Outcome) -> str:
    figures = outcome.figures()
    return (
        f"success   {outcome.share:.0%} of {figures['episodes']} episodes; a random policy: {chance.share:.0%}\n"
        f"steps     {figures['steps']}\n"
        f"decisions {figures['decisions']}, {figures['decision_ms_p50']} ms at the median"
    )
