"""Print what a deploy file leads to, or the line that does not fit; starts nothing."""

import argparse
import sys
from pathlib import Path

from omni_live.config.document import ConfigError
from omni_live.config.plan import check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE")


def run(asked: argparse.Namespace) -> int:
    try:
        print(check(asked.file), end="")
    except ConfigError as error:
        print(f"omni-live: {error}", file=sys.stderr)
        return 1
    return 0
