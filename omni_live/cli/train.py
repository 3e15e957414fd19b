"""Train a policy that ships with the server, on demonstrations made on the spot. `robot`: the table-top policy."""

import argparse
import sys
from pathlib import Path
from typing import Final

from omni_live.bench.report import Progress
from omni_live.clients.envs.table import TASKS, TableEnv, expert
from omni_live.pipelines.robot.demonstrations import collect
from omni_live.pipelines.robot.training import BadCheckpoint, Settings, train

OUT: Final = Path("out/table_policy.safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", choices=("robot",), help="what to train")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--iterations", type=_count, default=4000, metavar="N", help="default: %(default)s")
    parser.add_argument("--episodes", type=_count, default=1200, metavar="N", help="demonstrations (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=_count, default=1, metavar="N", help="the bits depend on it (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on where an earlier training was stopped")


def run(asked: argparse.Namespace) -> int:
    """0, or 1 with a sentence on standard error."""
    settings = Settings(asked.seed, asked.iterations, asked.episodes, asked.threads)
    progress = Progress(settings.episodes + settings.iterations)
    table = TableEnv(settings.seed)
    try:
        shown = collect(table, lambda: expert(table), TASKS, settings.episodes, settings.seed, progress)
        loss = train(shown, asked.out, settings, progress, resume=asked.resume)
    except BadCheckpoint as error:
        print(f"omni-live train: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"omni-live train: {error.filename or asked.out}: {error.strerror or error}", file=sys.stderr)
        return 1
    finally:
        progress.close()
    print(f"{asked.out}: loss {loss:.4f} after {settings.iterations} iterations")
    return 0


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
