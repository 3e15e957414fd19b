"""Reads an engine's options: every one has a default, and an unknown or wrong one is refused by name."""

from collections.abc import Mapping

from omni_live.engines.contract import EngineOptions


class BadOption(ValueError):
    """A stage's option is unknown, of the wrong type, or out of range."""


class Options:
    """Takes options one by one; `done` refuses what nobody took."""

    def __init__(self, stage: str, options: EngineOptions) -> None:
        self._stage = stage
        self._left: dict[str, object] = dict(options.values)

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise BadOption(f"{self._stage}: {name} is a whole number from {least} to {most}, not {value!r}")
        return value

    def real(self, name: str, default: float, least: float, most: float) -> float:
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise BadOption(f"{self._stage}: {name} is a number from {least} to {most}, not {value!r}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self._left.pop(name, default)
        if not isinstance(value, str):
            raise BadOption(f"{self._stage}: {name} is a text, not {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._left.pop(name, default)
        if not isinstance(value, bool):
            raise BadOption(f"{self._stage}: {name} is true or false, not {value!r}")
        return value

    def done(self) -> None:
        if self._left:
            raise BadOption(f"{self._stage}: unknown option {min(self._left)}")


def param_int(params: Mapping[str, object], name: str, default: int) -> int:
    """A turn's whole-number option; the session checked it before."""
    value = params.get(name, default)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def param_real(params: Mapping[str, object], name: str, default: float) -> float:
    value = params.get(name, default)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def param_text(params: Mapping[str, object], name: str, default: str) -> str:
    value = params.get(name, default)
    return value if isinstance(value, str) and value else default
