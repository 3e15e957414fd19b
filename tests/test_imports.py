"""Who may import whom. The contracts about libraries stand in pyproject.toml; here are those about our own folders."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "omni_live"
MAY_IMPORT = {
    "sessions": set[str](),
    "protocols": {"sessions"},
    "clients": {"protocols"},
}
HEAVY = ("ctranslate2", "fastapi", "msgspec", "onnxruntime", "scipy", "starlette", "torch", "uvicorn", "uvloop")


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph(PACKAGE, include_external_packages=True, cache_dir=None)


def _folder(module: str) -> str:
    """The first-level sub-package that a module of ours belongs to; empty for `omni_live`, which holds a version."""
    return module.split(".")[1] if module.count(".") else ""


def _edges(imports: grimp.ImportGraph) -> list[tuple[str, str]]:
    return [
        (module, other) for module in imports.modules for other in imports.find_modules_directly_imported_by(module)
    ]


def _is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def _beyond_what_is_allowed(edges: list[tuple[str, str]], folder: str) -> list[str]:
    allowed = MAY_IMPORT[folder] | {folder, ""}
    ours = [(module, other) for module, other in edges if _is_ours(module) and _is_ours(other)]
    return [f"{a} imports {b}" for a, b in ours if _folder(a) == folder and _folder(b) not in allowed]


def _past_an_adapter(edges: list[tuple[str, str]]) -> list[str]:
    """Codecs and clients that import an ASGI adapter, and with it asyncio."""
    adapters = [(a, b) for a, b in edges if _is_ours(b) and b.split(".")[-1] == "asgi"]
    return [
        f"{a} imports {b}"
        for a, b in adapters
        if _folder(a) in ("sessions", "protocols", "clients") and a.split(".")[-1] != "asgi"
    ]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_the_folders_below_it(imports: grimp.ImportGraph, folder: str) -> None:
    assert f"{PACKAGE}.{folder}" in imports.modules
    assert not _beyond_what_is_allowed(_edges(imports), folder)


def test_an_import_of_a_folder_above_is_noticed() -> None:
    planted = [("omni_live.sessions.turn", "omni_live.protocols.duplex"), ("omni_live.clients.voice", "omni_live.cli")]
    assert _beyond_what_is_allowed(planted, "sessions") == [
        "omni_live.sessions.turn imports omni_live.protocols.duplex"
    ]
    assert _beyond_what_is_allowed(planted, "clients") == ["omni_live.clients.voice imports omni_live.cli"]


def test_the_core_imports_the_standard_library_only(imports: grimp.ImportGraph) -> None:
    outside = {b for a, b in _edges(imports) if _folder(a) == "sessions" and not _is_ours(b)}
    assert outside <= set(sys.stdlib_module_names)


def test_only_the_server_imports_an_asgi_adapter(imports: grimp.ImportGraph) -> None:
    assert not _past_an_adapter(_edges(imports))


def test_a_codec_that_imports_an_asgi_adapter_is_noticed() -> None:
    planted = [
        ("omni_live.protocols.duplex", "omni_live.protocols.duplex.asgi"),
        ("omni_live.server", "omni_live.protocols.duplex.asgi"),
    ]
    assert _past_an_adapter(planted) == ["omni_live.protocols.duplex imports omni_live.protocols.duplex.asgi"]


def _lint_imports(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the contracts over the tree in `folder`, which the linter puts ahead of what is installed."""
    command = [f"{sysconfig.get_path('scripts')}/lint-imports", "--no-cache", "--no-logo", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_the_import_contracts_are_kept() -> None:
    outcome = _lint_imports(ROOT)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


PLANTED = [
    ("core", {"sessions/planted.py": "import time"}),
    ("codecs", {"protocols/planted.py": "import asyncio"}),
    ("light", {"clients/planted.py": "import torch"}),
    ("light", {"clients/planted.py": "import omni_live.protocols.planted", "protocols/planted.py": "import uvicorn"}),
    ("acyclic", {"sessions/planted.py": "import omni_live.clients", "clients/planted.py": "import omni_live.sessions"}),
]


@pytest.mark.parametrize(("contract", "files"), PLANTED)
def test_a_broken_import_contract_is_noticed_through_the_links(
    tmp_path: Path, contract: str, files: dict[str, str]
) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    package = tmp_path / PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    for folder in MAY_IMPORT:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
        (package / folder).symlink_to(f"../{folder}")
    assert _lint_imports(tmp_path).returncode == 0
    for path, source in files.items():
        (tmp_path / path).write_text(f"{source}\n")
    assert _lint_imports(tmp_path, "--contract", contract).returncode == 1


def test_an_asgi_adapter_may_wait(tmp_path: Path) -> None:
    door = tmp_path / PACKAGE / "protocols" / "door"
    door.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for folder in (tmp_path / PACKAGE, door.parent, door):
        (folder / "__init__.py").touch()
    (door / "asgi.py").write_text("import asyncio\n")
    assert _lint_imports(tmp_path, "--contract", "codecs").returncode == 0


@pytest.mark.parametrize("module", ["omni_live", "omni_live.sessions", "omni_live.protocols", "omni_live.clients"])
def test_what_a_client_imports_loads_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert outcome.stdout.split() == []
