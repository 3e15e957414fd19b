"""Run the server until SIGTERM or SIGINT: the first lets running turns finish, the second ends it now."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import uvloop

from omni_live.config.deploy import Deploy, Server, load
from omni_live.config.document import ConfigError
from omni_live.config.plan import plan
from omni_live.runtime.memory import keep_freed_memory
from omni_live.server.supervise import StartError, serve

KEY_VARIABLE: Final = "OMNI_LIVE_API_KEY"
"""An environment variable keeps a key out of the process list."""

DEFAULT_PIPELINES: Final = ("voice", "robot", "world")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="the deploy file")
    parser.add_argument("--pipeline", action="append", metavar="NAME", help="serve this one (again for more)")
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (8765)")
    parser.add_argument(
        "--openpi-port", type=int, metavar="PORT", help="also listen there for OpenPI clients, whose default is 8000"
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="[NAME=]KEY",
        help=f"let in who shows this key (again for more; also ${KEY_VARIABLE})",
    )
    parser.add_argument("--ready-file", type=Path, metavar="PATH", help="write the port there when ready")
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))


def run(asked: argparse.Namespace) -> int:
    logging.basicConfig(level=asked.log_level.upper(), format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    keep_freed_memory()
    try:
        plan_to_serve = plan(_deploy(asked))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(plan_to_serve, _say, _writing(asked.ready_file)))
    except (ConfigError, StartError) as error:
        print(f"omni-live: {error}", file=sys.stderr)
        return 1
    return 0


def _deploy(asked: argparse.Namespace) -> Deploy:
    if asked.config is not None:
        deploy = load(asked.config, os.environ)
        if asked.pipeline:
            deploy = replace(deploy, pipelines=tuple(one for one in deploy.pipelines if one.name in asked.pipeline))
    else:
        deploy = Deploy.of(*(asked.pipeline or DEFAULT_PIPELINES))
    return replace(deploy, server=_server(deploy.server, asked))


def _server(server: Server, asked: argparse.Namespace) -> Server:
    return replace(
        server,
        host=server.host if asked.host is None else asked.host,
        port=server.port if asked.port is None else asked.port,
        openpi_port=server.openpi_port if asked.openpi_port is None else asked.openpi_port,
        api_keys={**server.api_keys, **key_names(asked.api_key, os.environ)},
    )


def key_names(given: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Name -> key; a key that is given without a name is called by its number."""
    keys: dict[str, str] = {}
    shown = [*given, *filter(None, [environment.get(KEY_VARIABLE)])]
    for number, text in enumerate(shown, start=1):
        name, _, key = text.partition("=")
        if name.isidentifier() and key.strip("="):
            keys[name] = key
        else:
            keys[f"key{number}"] = text
    return keys


def _say(line: str) -> None:
    print(line, flush=True)


def _writing(path: Path | None) -> Callable[[str, int], None]:
    """Writes the port to a file, whole or not at all."""

    def write(_: str, port: int) -> None:
        if path is not None:
            unfinished = path.with_name(f".{path.name}.{os.getpid()}")
            unfinished.write_text(f"{port}\n")
            unfinished.replace(path)

    return write
