"""Admission: whether a session may open, must wait, or is refused.

A session costs itself, the bytes that its stages keep for it, and a share of a replica's time. Each is capped per
pipeline and over all of them. What does not fit waits in one bounded queue, first come first served: whoever lacks
room in its own pipeline holds up only that pipeline's later ones, whoever lacks room in the whole holds up everyone,
so that a large session is never starved by small ones. Pure: times are monotonic nanoseconds and come in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from omni_live.sessions.limits import Limits

NS_PER_S = 1_000_000_000


class AdmissionError(RuntimeError):
    """A place was given back that is not held; a bug of ours."""


class Amount(NamedTuple):
    """What is capped: a cost, a use or a cap."""

    sessions: int = 1
    nbytes: int = 0
    duty_permille: int = 0
    """Share of one replica's time, in thousandths."""

    def plus(self, other: "Amount") -> "Amount":
        return Amount(
            self.sessions + other.sessions, self.nbytes + other.nbytes, self.duty_permille + other.duty_permille
        )

    def minus(self, other: "Amount") -> "Amount":
        return Amount(
            self.sessions - other.sessions, self.nbytes - other.nbytes, self.duty_permille - other.duty_permille
        )

    def within(self, cap: "Amount") -> bool:
        return self.sessions <= cap.sessions and self.nbytes <= cap.nbytes and self.duty_permille <= cap.duty_permille


NOTHING = Amount(0, 0, 0)
ONE_SESSION = Amount()


@dataclass(frozen=True, slots=True)
class Caps:
    """The most that may be admitted, over all pipelines and of each."""

    whole: Amount
    pipeline: Amount
    of: Mapping[str, Amount] = field(default_factory=lambda: MappingProxyType({}))
    """Pipelines with caps of their own."""

    @classmethod
    def from_limits(cls, limits: Limits, of: Mapping[str, Amount] = MappingProxyType({})) -> "Caps":
        return cls(
            Amount(limits.max_sessions, limits.max_bytes, limits.max_duty_permille),
            Amount(limits.max_sessions_per_pipeline, limits.max_bytes_per_pipeline, limits.max_duty_permille),
            of,
        )

    def for_pipeline(self, pipeline: str) -> Amount:
        return self.of.get(pipeline, self.pipeline)


@dataclass(frozen=True, slots=True)
class Cost:
    """What opening a session of this pipeline takes."""

    pipeline: str
    amount: Amount = ONE_SESSION


@dataclass(frozen=True, slots=True)
class Admitted:
    """The session may open. `place` must be given back exactly once."""

    place: int


@dataclass(frozen=True, slots=True)
class Queued:
    """The session waits; `give_back` or `lapse` says what became of `place`. Giving it back leaves the queue."""

    place: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The session may not open. `retry_after_s` is None where asking again is of no use."""

    reason: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class _Asking:
    cost: Cost
    deadline_ns: int


class Admission:
    """What is admitted and who waits. Never over a cap; never under one while somebody waits who fits."""

    def __init__(self, caps: Caps, wait_queue: int, wait_deadline_s: float) -> None:
        self._caps = caps
        self._wait_queue = wait_queue
        self._wait_ns = int(wait_deadline_s * NS_PER_S)
        self._whole = NOTHING
        self._used: dict[str, Amount] = {}
        self._held: dict[int, Cost] = {}
        self._queue: dict[int, _Asking] = {}
        """By place, in the order of asking; deadlines are in the same order."""
        self._last = 0

    def ask(self, cost: Cost, now_ns: int) -> Admitted | Queued | Refused:
        """Ask for a place."""
        if not (cost.amount.within(self._caps.whole) and cost.amount.within(self._caps.for_pipeline(cost.pipeline))):
            return Refused("too_large", None)
        self._last += 1
        place = self._last
        self._queue[place] = _Asking(cost, now_ns + self._wait_ns)
        if self._settle():  # nobody who asked before can be among them: room is given away when it comes up
            return Admitted(place)
        if len(self._queue) <= self._wait_queue:
            return Queued(place, self._queue[place].deadline_ns)
        first = next(iter(self._queue.values()))
        del self._queue[place]
        return Refused("overloaded", max(first.deadline_ns - now_ns, NS_PER_S) / NS_PER_S)

    def give_back(self, place: int) -> list[Admitted]:
        """A session closed, or one that waits does not want to any more; whoever fits now is admitted, in order.

        Raises AdmissionError where the place is not held: it was given back before, or has lapsed.
        """
        if self._queue.pop(place, None) is None:
            try:
                cost = self._held.pop(place)
            except KeyError:
                raise AdmissionError(f"place {place} is not held") from None
            self._whole = self._whole.minus(cost.amount)
            left = self._used[cost.pipeline].minus(cost.amount)
            if left == NOTHING:
                del self._used[cost.pipeline]
            else:
                self._used[cost.pipeline] = left
        return self._settle()

    def lapse(self, now_ns: int) -> tuple[list[int], list[Admitted]]:
        """(places that waited too long and are refused, places that are admitted because those are gone)."""
        late = [place for place, asking in self._queue.items() if asking.deadline_ns <= now_ns]
        for place in late:
            del self._queue[place]
        return late, self._settle() if late else []

    @property
    def next_lapse_ns(self) -> int | None:
        """When `lapse` has something to do; None while nobody waits."""
        return next((asking.deadline_ns for asking in self._queue.values()), None)

    @property
    def admitted(self) -> Amount:
        """What is admitted over all pipelines."""
        return self._whole

    def admitted_of(self, pipeline: str) -> Amount:
        return self._used.get(pipeline, NOTHING)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def _settle(self) -> list[Admitted]:
        """Admit from the front whoever fits and stands behind nobody who lacks the same room."""
        admitted: list[Admitted] = []
        full: set[str] = set()
        for place, asking in tuple(self._queue.items()):
            pipeline, amount = asking.cost.pipeline, asking.cost.amount
            if pipeline in full:
                continue
            used = self.admitted_of(pipeline).plus(amount)
            if not used.within(self._caps.for_pipeline(pipeline)):
                full.add(pipeline)
                continue
            whole = self._whole.plus(amount)
            if not whole.within(self._caps.whole):
                break
            del self._queue[place]
            self._whole, self._used[pipeline], self._held[place] = whole, used, asking.cost
            admitted.append(Admitted(place))
        return admitted
