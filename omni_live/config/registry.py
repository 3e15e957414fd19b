"""The first layer: which pipelines there are, by name or by the model type they run.

The box brings some (omni_live.pipelines.registry). Any other package adds its own by an entry point in the group
`omni_live.pipelines` that names a PipelineSpec or a tuple of them:

    [project.entry-points."omni_live.pipelines"]
    mine = "my_package.specs:MINE"
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from omni_live.pipelines.registry import PIPELINES
from omni_live.pipelines.spec import BadSpec, PipelineSpec

GROUP = "omni_live.pipelines"


class RegistryError(ValueError):
    """A pipeline is unknown, a name is taken twice, or an entry point gives no pipeline."""


def registry(points: Iterable[EntryPoint] | None = None) -> Mapping[str, PipelineSpec]:
    """Every pipeline by its name and by its model types.

    `points` are those of the installed packages unless given. Raises RegistryError for the first thing wrong, with
    the entry point's name in it: a package that is broken must not go unnoticed until somebody misses its pipeline.
    """
    found: dict[str, PipelineSpec] = {}
    for spec in PIPELINES:
        _add(found, spec, "the box")
    for point in entry_points(group=GROUP) if points is None else points:
        for spec in _load(point):
            _add(found, spec, f"entry point {point.value!r}")
    return MappingProxyType(found)


def find(name: str, among: Mapping[str, PipelineSpec]) -> PipelineSpec:
    """The pipeline with this name or model type. Raises RegistryError that lists the known ones."""
    try:
        return among[name]
    except KeyError:
        raise RegistryError(f"unknown pipeline {name!r}; known are {', '.join(sorted(among))}") from None


def _load(point: EntryPoint) -> tuple[PipelineSpec, ...]:
    try:
        loaded: object = point.load()
    except (ImportError, AttributeError, BadSpec) as error:
        raise RegistryError(f"entry point {point.value!r} cannot be loaded: {error}") from error
    specs = loaded if isinstance(loaded, tuple) else (loaded,)
    for spec in specs:
        if not isinstance(spec, PipelineSpec):
            raise RegistryError(f"entry point {point.value!r} gives a {type(spec).__name__}, not a PipelineSpec")
    return specs


def _add(found: dict[str, PipelineSpec], spec: PipelineSpec, whence: str) -> None:
    for name in (spec.name, *spec.model_types):
        if name in found:
            raise RegistryError(f"pipeline {name!r} of {whence} is taken by pipeline {found[name].name!r}")
        found[name] = spec
