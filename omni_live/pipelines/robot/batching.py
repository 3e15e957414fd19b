"""When a step begins and whom it serves, as a pure decision: times come in as nanoseconds, nothing waits here.

The most urgent go first. A step that could take more is put off only for sessions that are about to ask, as far as
their rhythm tells (see Rhythm), and only for a time that is small beside what they would otherwise wait: never longer
than a step takes, since in that time the step could be over. So a robot that is alone never waits, and neither does
one among others that ask at other times; but robots that ask together are served together, and then go on doing so.
Without that, whoever comes a moment late falls into a second group, and the two take turns: half the throughput.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from omni_live.sessions.stamp import SessionKey

UNDATED_NS: Final = 100_000_000
"""A query without a deadline counts as due so long after it came: urgent ones go before it, but not forever."""
LEAST_HOLD_NS: Final = 300_000
"""Where a step is shorter than this, no timer is worth setting."""
MOST_HOLD_NS: Final = 5_000_000
"""No query is held back longer, whatever a step takes."""
_PART: Final = 8
"""A step may be put off by this part of its length, where that is more than the window."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A query that waits for a step."""

    session: SessionKey
    since_ns: int
    deadline_ns: int = 0
    """0: none. One that was over when the query came says how urgent it is; there is nothing left to keep."""
    alone: bool = False
    """It is to be the only one in its batch."""

    @property
    def due_ns(self) -> int:
        return self.deadline_ns or self.since_ns + UNDATED_NS


class Span(NamedTuple):
    """When somebody who is absent should ask again."""

    early_ns: int
    late_ns: int


@dataclass(frozen=True, slots=True)
class Rule:
    max_batch: int
    window_ns: int
    """How long a query is held back while the engine could serve it; an eighth of a step where that is longer. 0: it
    never is."""

    def hold_ns(self, step_ns: int) -> int:
        if not self.window_ns or step_ns < LEAST_HOLD_NS:
            return 0
        return min(step_ns, max(self.window_ns, step_ns // _PART), MOST_HOLD_NS)


@dataclass(frozen=True, slots=True)
class Go:
    """Begin a step."""

    chosen: tuple[int, ...]
    """Positions of those it serves, most urgent first."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Ask again then, or when somebody comes."""

    until_ns: int


class Steps(NamedTuple):
    """What is known of the engine's steps."""

    length_ns: int = 0
    """How long one takes; 0: not known yet."""
    free_ns: int = 0
    """When the last one was over."""


def decide(waiting: Sequence[Waiting], absent: Iterable[Span], rule: Rule, steps: Steps, now_ns: int) -> Go | Hold:
    """What to do with those that wait, at least one; `absent` are the sessions that do not."""
    order = sorted(range(len(waiting)), key=lambda i: (waiting[i].due_ns, waiting[i].since_ns))
    if waiting[order[0]].alone:
        return Go((order[0],))
    chosen = tuple(i for i in order if not waiting[i].alone)[: rule.max_batch]
    hold_ns = rule.hold_ns(steps.length_ns)
    if len(chosen) == rule.max_batch or not hold_ns:
        return Go(chosen)
    until_ns = min(_latest_ns(waiting[i], hold_ns, steps) for i in chosen)
    until_ns = min(until_ns, max((late for early, late in absent if early <= until_ns), default=0))
    return Go(chosen) if until_ns <= now_ns else Hold(until_ns)


def _latest_ns(query: Waiting, hold_ns: int, steps: Steps) -> int:
    """When a step that serves the query must begin."""
    until_ns = max(query.since_ns, steps.free_ns) + hold_ns
    if query.deadline_ns > query.since_ns:
        return min(until_ns, query.deadline_ns - steps.length_ns)
    return until_ns


FIRST_NS: Final = 20_000_000
"""So long a session whose rhythm is not known is waited for after its first answer."""
SLACK_NS: Final = 1_000_000


@dataclass(slots=True)
class Pace:
    """How long a session takes from an answer to its next question: the mean, and how far it strays from it.

    Estimated as TCP estimates round trips (RFC 6298), with a quarter as both gains.
    """

    answered_ns: int | None = None
    """None while its question is here."""
    mean_ns: float = 0.0
    stray_ns: float = FIRST_NS / 2

    def asked(self, now_ns: int) -> None:
        if self.answered_ns is None:
            return
        took_ns = now_ns - self.answered_ns
        self.answered_ns = None
        if not self.mean_ns:
            self.mean_ns, self.stray_ns = took_ns, took_ns / 2
            return
        self.stray_ns += (abs(took_ns - self.mean_ns) - self.stray_ns) / 4
        self.mean_ns += (took_ns - self.mean_ns) / 4

    def span(self) -> Span | None:
        """When the next question should come; None while one is here."""
        if self.answered_ns is None:
            return None
        at_ns, give_ns = self.answered_ns + round(self.mean_ns), round(2 * self.stray_ns) + SLACK_NS
        return Span(at_ns - give_ns, at_ns + give_ns)


class Rhythm:
    """When which session should ask again."""

    def __init__(self) -> None:
        self._paces: dict[SessionKey, Pace] = {}

    def asked(self, session: SessionKey, now_ns: int) -> None:
        self._paces.setdefault(session, Pace()).asked(now_ns)

    def answered(self, session: SessionKey, now_ns: int) -> None:
        pace = self._paces.get(session)
        if pace is not None:
            pace.answered_ns = now_ns

    def forget(self, session: SessionKey) -> None:
        """It is not waited for until it has asked and been answered again."""
        self._paces.pop(session, None)

    def absent(self) -> list[Span]:
        return [span for pace in self._paces.values() if (span := pace.span()) is not None]
