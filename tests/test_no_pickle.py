"""Nothing in the tree turns bytes into code: no pickle on any socket, in any segment, from any file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("omni_live", "sessions", "protocols", "clients", "scripts", "tests")

# multiprocessing and its executors pickle what they hand over; torch's fork of it does too.
MODULES = frozenset(
    {"_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "multiprocessing", "pickle", "shelve"}
    | {"torch.multiprocessing"}
)
NAMES = frozenset({"ProcessPoolExecutor", "Pickler", "Unpickler"})
CALLS = frozenset(
    {"eval", "exec", "compile", "torch.load", "torch.save", "torch.jit.load", "torch.hub.load"}
    | {f"yaml.{name}" for name in ("load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all")}
)


def _dotted(node: ast.expr) -> str:
    """`torch.load` for the expression torch.load; empty for what is no plain dotted name."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            prefix = _dotted(value)
            return f"{prefix}.{attr}" if prefix else ""
        case _:
            return ""


def _is_unsafe_module(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in MODULES)


def _imports(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules and the names that an import statement could bind."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]


def _unpickles_arrays(call: ast.Call) -> bool:
    return any(
        keyword.arg == "allow_pickle" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
        for keyword in call.keywords
    )


def _offences(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import() | ast.ImportFrom():
            names = _imports(node)
            yield from (n for n in names if _is_unsafe_module(n) or n in CALLS or n.split(".")[-1] in NAMES)
        case ast.Call(func=func):
            name = _dotted(func)
            if name in CALLS or name.split(".")[-1] in NAMES:
                yield name
            if _unpickles_arrays(node):
                yield "allow_pickle"
            if name in ("__import__", "importlib.import_module", "import_module"):
                names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                yield from (n for n in names if _is_unsafe_module(n))
        case _:
            return


def offences(source: str) -> list[str]:
    """Each use of something that executes what it reads, in the order of the source."""
    found = [
        (n.lineno, what)
        for n in ast.walk(ast.parse(source))
        for what in _offences(n)
        if isinstance(n, ast.stmt | ast.expr)
    ]
    return [what for _, what in sorted(found)]


def _sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_nothing_in_the_tree_executes_what_it_reads() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {what}"
        for path in _sources()
        for what in offences(path.read_text(encoding="utf-8"))
    }
    assert not found


def test_every_folder_is_looked_through() -> None:
    seen = {path.relative_to(ROOT).parts[0] for path in _sources()}
    assert {"omni_live", "sessions", "protocols", "clients", "tests"} <= seen


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("import marshal as m", "marshal"),
        ("from pickle import loads", "pickle"),
        ("from multiprocessing import shared_memory", "multiprocessing"),
        ("import torch.multiprocessing", "torch.multiprocessing"),
        ("from torch import load", "torch.load"),
        ("from concurrent.futures import ProcessPoolExecutor", "concurrent.futures.ProcessPoolExecutor"),
        ("import concurrent.futures as f\nf.ProcessPoolExecutor()", "f.ProcessPoolExecutor"),
        ("import importlib\nimportlib.import_module('pickle')", "pickle"),
        ("import torch\ntorch.load('weights.pt', weights_only=True)", "torch.load"),
        ("import numpy\nnumpy.load('a.npy', allow_pickle=True)", "allow_pickle"),
        ("def load(path, flag):\n    return read(path, allow_pickle=flag)", "allow_pickle"),
        ("import yaml\nyaml.load('a: 1', Loader=yaml.SafeLoader)", "yaml.load"),
        ("value = eval('1')", "eval"),
    ],
)
def test_what_executes_its_input_is_noticed(source: str, what: str) -> None:
    assert what in offences(source)


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import re\nre.compile('a')",
        "import numpy\nnumpy.load('a.npy', allow_pickle=False)",
        "import yaml\nyaml.safe_load('a: 1')",
        "from concurrent.futures import ThreadPoolExecutor",
        "word = 'no pickle here'",
    ],
)
def test_what_only_looks_alike_is_left_alone(source: str) -> None:
    assert offences(source) == []
