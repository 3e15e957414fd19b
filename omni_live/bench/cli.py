"""`omni-live bench`: measure it. `voice` is how a conversation feels, `hops` what the runtime costs.

`robots` is what robots get from the OpenPI door, beside a server of the pattern that they use today; `world` is how
true and how fast a world model's dreams are.
"""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Final

from omni_live.bench import robots as robot_bench
from omni_live.bench import world as world_bench
from omni_live.bench.figures import ROWS
from omni_live.bench.report import Progress, Row, flat, table
from omni_live.bench.server import NoServer
from omni_live.bench.voice import SECTIONS, Asked, Bench
from omni_live.bench.wavs import NoWavs, load_wavs
from omni_live.clients.duplex import DuplexError

KEY_VARIABLE: Final = "OMNI_LIVE_API_KEY"
HOPS_ROWS: Final = (
    Row("hop_us_p50", "one hop, median", "us", 1),
    Row("hop_us_p99", "one hop, 99 of 100", "us", 1),
    Row("cpu_ms_per_request", "processor time of a request", "ms", 3),
    Row("chain_1mib_ms_p50", "1 MiB through the chain, median", "ms", 2),
    Row("units_per_s_8", "units with 8 sessions", "/s"),
    Row("bare_hop_us_p50", "one hop of the bare chain, median", "us", 1),
    Row("bare_cpu_ms_per_request", "processor time of a request, bare", "ms", 3),
    Row("hop_ratio", "hop over bare hop", "", 2),
    Row("cpu_ratio", "processor time over bare", "", 2),
    Row("runs", "rounds"),
    Row("load1_before", "load of the machine before", "", 2),
    Row("load1_after", "load of the machine after", "", 2),
    Row("cpus", "processors"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(title="benches", dest="bench", metavar="BENCH", required=True)
    add_voice(benches.add_parser("voice", help="latency, interruptions and turn taking of a voice conversation"))
    hops_parser = benches.add_parser("hops", help="what the runtime costs between stages, beside a bare socket chain")
    hops_parser.add_argument("--json", action="store_true", help="print one flat JSON object on the last line")
    hops_parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs")
    add_robots(benches.add_parser("robots", help="what robots get, beside a server of OpenPI's pattern"))
    add_world(benches.add_parser("world", help="how true and how fast a world model's dreams are"))


def run(args: argparse.Namespace) -> int:
    match args.bench:
        case "hops":
            return hops(json=args.json, quick=args.quick)
        case "robots":
            return robots(args)
        case "world":
            return world(args)
        case _:
            return voice(args)


# -- voice -----------------------------------------------------------------------------------------------------------


def add_voice(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print one flat JSON object on the last line")
    add("--wavs", type=Path, metavar="DIR", help="wav files and transcripts.json (in the repository: tests/data/voice)")
    add("--only", type=parse_sections, default=SECTIONS, metavar="LIST", help=f"of {', '.join(SECTIONS)}")
    add("--runs", type=int, default=2, help="how often each conversation is held (%(default)s)")
    add("--seed", type=int, default=1, help="of where the pauses are and of what sounds when (%(default)s)")
    add("--model", default="voice", help="the pipeline (%(default)s)")
    add(
        "--set",
        dest="settings",
        action="append",
        type=parse_setting,
        default=[],
        metavar="NAME=VALUE",
        help="a session setting that is not the default, such as min_silence_ms=350 (again for more)",
    )
    add(
        "--sweep-min-silence",
        type=parse_sweep,
        default=(),
        metavar="MS,MS,...",
        help="also the share of turns cut off, and their latency, for each of these min_silence_ms",
    )
    add("--url", help="measure a server that runs already: ws://HOST:PORT/v1/duplex")
    add("--api-key", help=f"for --url (or ${KEY_VARIABLE})")


def voice(args: argparse.Namespace) -> int:
    """Measure and print; 0, or 1 with a sentence where something could not be measured."""
    asked = Asked(
        sections=args.only,
        runs=max(1, args.runs),
        seed=args.seed,
        model=args.model,
        settings=tuple(args.settings),
        sweep=args.sweep_min_silence,
        url=args.url,
        api_key=args.api_key or os.environ.get(KEY_VARIABLE),
    )
    try:
        bench = Bench(asked, load_wavs(args.wavs))
        values = asyncio.run(bench.run())
    except (NoWavs, NoServer, DuplexError) as error:
        print(f"omni-live bench voice: {error}", file=sys.stderr)
        return 1
    for problem in bench.problems:
        print(f"omni-live bench voice: {problem}", file=sys.stderr)
    for note in bench.notes:
        print(note)
    print(flat(ROWS, values) if args.json else table(ROWS, values))
    return 1 if bench.problems else 0


def parse_sections(text: str, among: tuple[str, ...] = SECTIONS) -> tuple[str, ...]:
    """Section names in the order in which they run; raises argparse.ArgumentTypeError."""
    asked = text.split(",")
    unknown = [name for name in asked if name not in among]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose of {', '.join(among)}")
    return tuple(name for name in among if name in asked)


def parse_setting(text: str) -> tuple[str, float]:
    """NAME=NUMBER; raises argparse.ArgumentTypeError."""
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER") from None
    return name, int(number) if number.is_integer() else number


def parse_sweep(text: str) -> tuple[int, ...]:
    """Milliseconds, separated by commas; raises argparse.ArgumentTypeError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of milliseconds") from None


# -- hops ------------------------------------------------------------------------------------------------------------


def hops(*, json: bool, quick: bool) -> int:
    """Measure on the server's own kind of event loop, and print."""
    import uvloop

    from omni_live.bench.hops import QUICK, Work, measure

    progress = Progress(100)

    def tell(what: str, share: float) -> None:
        progress.done = round(100 * share)
        progress.enter(what)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        values = runner.run(measure(QUICK if quick else Work(), tell))
    progress.close()
    print(flat(HOPS_ROWS, values) if json else table(HOPS_ROWS, values))
    return 0


# -- robots ----------------------------------------------------------------------------------------------------------


def add_robots(parser: argparse.ArgumentParser) -> None:
    def parse(text: str) -> tuple[str, ...]:
        return parse_sections(text, robot_bench.SECTIONS)

    sections = robot_bench.SECTIONS
    parser.add_argument("--json", action="store_true", help="print one flat JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="a fraction of the work, to see that it runs")
    parser.add_argument("--only", type=parse, default=sections, metavar="LIST", help=f"of {', '.join(sections)}")


def robots(args: argparse.Namespace) -> int:
    """Measure and print; 0, or 1 with a sentence where something could not be measured."""
    bench = robot_bench.Bench(args.only, robot_bench.QUICK if args.quick else robot_bench.Work())
    try:
        values = asyncio.run(bench.run())  # asyncio's own loop, which robots run on
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    for problem in bench.problems:
        print(f"omni-live bench robots: {problem}", file=sys.stderr)
    print(flat(robot_bench.ROWS, values) if args.json else table(robot_bench.ROWS, values))
    return 1 if bench.problems else 0


# -- world -----------------------------------------------------------------------------------------------------------


def add_world(parser: argparse.ArgumentParser) -> None:
    def parse(text: str) -> tuple[str, ...]:
        return parse_sections(text, world_bench.SECTIONS)

    sections = world_bench.SECTIONS
    parser.add_argument("--json", action="store_true", help="print one flat JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="a fraction of the work, to see that it runs")
    parser.add_argument("--only", type=parse, default=sections, metavar="LIST", help=f"of {', '.join(sections)}")
    parser.add_argument("--planner", action="store_true", help="also let the planner drive the table: a minute more")


def world(args: argparse.Namespace) -> int:
    """Measure and print; 0, or 1 with a sentence where something could not be measured."""
    sections = (*args.only, world_bench.PLANNER) if args.planner else args.only
    bench = world_bench.Bench(sections, world_bench.QUICK if args.quick else world_bench.Work())
    values = asyncio.run(bench.run())
    for problem in bench.problems:
        print(f"omni-live bench world: {problem}", file=sys.stderr)
    print(flat(world_bench.ROWS, values) if args.json else table(world_bench.ROWS, values))
    return 1 if bench.problems else 0
