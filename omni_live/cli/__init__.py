"""`omni-live`: the command line. A command's module is imported when it is asked for, so that a client loads no server.

Each module has `add_arguments(parser)` and `run(arguments)`, which returns the exit status.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Final, NamedTuple, Protocol, cast

from omni_live import __version__


class Command(NamedTuple):
    module: str
    help: str


COMMANDS: Final[Mapping[str, Command]] = MappingProxyType(
    {
        "serve": Command("omni_live.cli.serve", "run the server"),
        "check": Command("omni_live.cli.check", "check a deploy file and print what it leads to"),
        "talk": Command("omni_live.clients.talk", "talk to a server, with a microphone or with wav files"),
        "drive": Command("omni_live.cli.drive", "drive simulated robots with a policy of a server"),
        "dream": Command("omni_live.cli.dream", "dream in a world model of a server, beside what truly happens"),
        "train": Command("omni_live.cli.train", "train an embedded model anew"),
        "demo": Command("omni_live.cli.demo", "hear it: a server, and a conversation with it"),
        "bench": Command("omni_live.bench.cli", "measure it"),
    }
)

USAGE: Final = 2


class _Runs(Protocol):
    """What a command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    asked = parser.parse_args(given[:1])
    command = COMMANDS.get(asked.command or "")
    if command is None:
        parser.print_help(sys.stderr)
        return USAGE
    module = _import(command.module)
    inner = argparse.ArgumentParser(prog=f"omni-live {asked.command}", description=module.__doc__)
    runs = cast("_Runs", module)
    runs.add_arguments(inner)
    try:
        return runs.run(inner.parse_args(given[1:]))
    except KeyboardInterrupt:
        return 130


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("omni_live"):
            raise
        raise SystemExit(f"omni-live: {error.name} is missing; pip install 'omni-live[server]' brings it") from None


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:<8}{command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="omni-live",
        usage="omni-live [--version] COMMAND ...",
        description="A session server for interactive models.",
        epilog=f"commands:\n{commands}\n\nomni-live COMMAND --help says more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"omni-live {__version__}")
    parser.add_argument("command", nargs="?", choices=tuple(COMMANDS), metavar="COMMAND", help=argparse.SUPPRESS)
    return parser
