"""Which stages a turn runs on, and in which order they are opened.

A turn runs on the stages that lie on a path from its entry to one of its outputs. Nothing is made before there is a
place for it: a stage with one producer, which hands on chunks, is opened by that producer before it makes anything, so
that a chain costs the server one message (`Step.rides`); others are opened here, consumers before their producers. A
stage that is fed by whole edges alone waits: its replica is looked up and its turn opened when a producer has ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from omni_live.pipelines.spec import EdgeSpec, Handover, PipelineSpec, order


class UnroutableError(ValueError):
    """No path leads from the entry to an output, or a name is not the pipeline's."""


@dataclass(frozen=True, slots=True)
class Step:
    """One stage's part of a turn."""

    stage: str
    index: int
    """Of the stage in its pipeline; goes into stamps."""
    inputs: int
    """Producers that will say last: active ones, or the orchestrator for the entry."""
    edges: tuple[EdgeSpec, ...]
    """Out-edges to active stages."""
    final: bool
    rides: bool
    """Its one producer hands on chunks and opens it, too."""
    entry: bool
    """It gets the client's input."""
    keeps: bool
    """Some of its output waits until it has ended."""


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """How a turn with this entry and these outputs runs. There is one for each pair of them."""

    entry: str
    steps: Mapping[str, Step]
    first: tuple[Step, ...]
    """Opened at once, consumers first."""
    later: Mapping[str, tuple[Step, ...]]
    """Producer -> what is opened when it has ended, consumers first, if it is not open yet."""


class Dag:
    """One pipeline's stages and edges, asked for the course of a turn. Courses are kept: there are few."""

    def __init__(self, pipeline: PipelineSpec) -> None:
        self._pipeline = pipeline
        self._order = order(pipeline)
        self._courses: dict[tuple[str, frozenset[str]], Course] = {}

    def course(self, entry: str, outputs: frozenset[str]) -> Course:
        """Raises UnroutableError where an output cannot be reached from the entry."""
        course = self._courses.get((entry, outputs))
        if course is None:
            course = self._courses[entry, outputs] = self._plot(entry, outputs)
        return course

    def _plot(self, entry: str, outputs: frozenset[str]) -> Course:
        active = self._active(entry, outputs)
        edges = [edge for edge in self._pipeline.edges if edge.producer in active and edge.consumer in active]
        names = self._pipeline.stage_names
        steps = {
            stage: Step(
                stage,
                names.index(stage),
                1 if stage == entry else sum(edge.consumer == stage for edge in edges),
                tuple(edge for edge in edges if edge.producer == stage),
                stage in outputs,
                [edge.handover for edge in edges if edge.consumer == stage] == [Handover.CHUNK],
                stage == entry,
                any(edge.handover is Handover.WHOLE for edge in edges if edge.producer == stage),
            )
            for stage in self._order
            if stage in active
        }
        later = {
            stage: tuple(
                self._opened_with([edge.consumer for edge in step.edges if edge.handover is Handover.WHOLE], steps)
            )
            for stage, step in steps.items()
        }
        return Course(
            entry, steps, self._opened_with([entry], steps), {stage: rest for stage, rest in later.items() if rest}
        )

    def _active(self, entry: str, outputs: frozenset[str]) -> frozenset[str]:
        unknown = ({entry} | outputs) - set(self._order)
        if unknown or not outputs:
            what = ", ".join(sorted(unknown)) or "no outputs"
            raise UnroutableError(f"pipeline {self._pipeline.name!r} cannot run a turn with {what}")
        reached = {entry}
        for stage in self._order:
            if stage in reached:
                reached.update(edge.consumer for edge in self._pipeline.edges if edge.producer == stage)
        needed = set(outputs)
        for stage in reversed(self._order):
            if stage in needed:
                needed.update(edge.producer for edge in self._pipeline.edges if edge.consumer == stage)
        missed = outputs - reached
        if missed:
            raise UnroutableError(
                f"pipeline {self._pipeline.name!r}: no path from {entry!r} to {', '.join(sorted(missed))}"
            )
        return frozenset(reached & needed)

    def _opened_with(self, stages: list[str], steps: Mapping[str, Step]) -> tuple[Step, ...]:
        """The stages and whatever hangs on them by chunk edges, consumers first."""
        opened = set(stages)
        for stage in self._order:
            if stage in opened:
                opened.update(edge.consumer for edge in steps[stage].edges if edge.handover is Handover.CHUNK)
        return tuple(steps[stage] for stage in reversed(self._order) if stage in opened)
