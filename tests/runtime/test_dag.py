"""Which stages a turn runs on and when they are opened; by example, and for any graph."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_live.pipelines.registry import VOICE
from omni_live.pipelines.spec import BadSpec, EdgeSpec, Handover, PipelineSpec, StageSpec
from omni_live.runtime.dag import Course, Dag, UnroutableError

CHUNK, WHOLE = Handover.CHUNK, Handover.WHOLE


def pipeline(stages: str, *edges: tuple[str, str, Handover]) -> PipelineSpec:
    return PipelineSpec(
        "test",
        tuple(StageSpec(stage, "nowhere:Engine") for stage in stages),
        outputs={stage: stage for stage in stages},
        entries={stage: stage for stage in stages},
        edges=tuple(EdgeSpec(*edge) for edge in edges),
    )


def names(course: Course) -> list[str]:
    return [step.stage for step in course.first]


@pytest.mark.parametrize(
    ("entry", "outputs", "opened"),
    [
        ("thinker", {"code2wav"}, ["code2wav", "talker", "thinker"]),
        ("thinker", {"thinker", "code2wav"}, ["code2wav", "talker", "thinker"]),
        ("thinker", {"thinker"}, ["thinker"]),
        ("talker", {"code2wav"}, ["code2wav", "talker"]),
        ("ears", {"ears"}, ["ears"]),
    ],
)
def test_a_voice_turn_runs_on_what_its_outputs_need(entry: str, outputs: set[str], opened: list[str]) -> None:
    assert names(Dag(VOICE).course(entry, frozenset(outputs))) == opened


def test_what_the_ears_find_is_no_edge() -> None:
    with pytest.raises(UnroutableError, match="no path from 'ears' to code2wav"):
        Dag(VOICE).course("ears", frozenset({"code2wav"}))


@pytest.mark.parametrize(("entry", "outputs"), [("x", {"a"}), ("a", {"x"}), ("a", set())])
def test_unknown_names_and_no_outputs_are_refused(entry: str, outputs: set[str]) -> None:
    with pytest.raises(UnroutableError):
        Dag(pipeline("ab", ("a", "b", CHUNK))).course(entry, frozenset(outputs))


def test_each_step_knows_its_place_its_producers_and_its_receivers() -> None:
    course = Dag(pipeline("abc", ("a", "c", CHUNK), ("b", "c", CHUNK), ("a", "b", CHUNK))).course("a", frozenset("c"))
    assert {stage: (step.index, step.inputs, step.final) for stage, step in course.steps.items()} == {
        "a": (0, 1, False),
        "b": (1, 1, False),
        "c": (2, 2, True),
    }
    assert {edge.consumer for edge in course.steps["a"].edges} == {"b", "c"}


def test_producers_beside_the_path_are_not_waited_for() -> None:
    course = Dag(pipeline("abc", ("a", "c", CHUNK), ("b", "c", CHUNK))).course("a", frozenset("c"))
    assert course.steps["c"].inputs == 1


def test_a_stage_behind_a_whole_edge_is_opened_later_with_all_that_hangs_on_it() -> None:
    course = Dag(pipeline("abc", ("a", "b", WHOLE), ("b", "c", CHUNK))).course("a", frozenset("c"))
    assert names(course) == ["a"]
    assert [step.stage for step in course.later["a"]] == ["c", "b"]


def test_a_stage_with_one_chunk_edge_is_opened_at_once_whatever_its_other_edges_are() -> None:
    course = Dag(pipeline("abc", ("a", "b", CHUNK), ("a", "c", WHOLE), ("b", "c", CHUNK))).course("a", frozenset("c"))
    assert names(course) == ["c", "b", "a"]


def test_a_circle_is_refused_with_the_stages_it_runs_through() -> None:
    with pytest.raises(BadSpec, match=r"circle: (a -> b -> a|b -> a -> b)"):
        pipeline("ab", ("a", "b", CHUNK), ("b", "a", CHUNK))


EDGES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from((CHUNK, WHOLE))),
    max_size=12,
    unique_by=lambda edge: edge[:2],
)


@given(EDGES, st.integers(0, 5), st.sets(st.integers(0, 5), min_size=1))
def test_of_any_graph_every_active_stage_is_opened_and_no_consumer_after_its_chunk_producer(
    edges: list[tuple[int, int, Handover]], entry: int, outputs: set[int]
) -> None:
    stages = "abcdef"
    forward = [(stages[low], stages[high], how) for low, high, how in edges if low < high]
    dag = Dag(pipeline(stages, *forward))
    try:
        course = dag.course(stages[entry], frozenset(stages[output] for output in outputs))
    except UnroutableError:
        return
    opened: list[str] = [step.stage for step in course.first]
    for stage in sorted(course.steps):  # stages are in topological order here, so producers end in this order
        assert stage in opened
        opened += [step.stage for step in course.later.get(stage, ()) if step.stage not in opened]
    assert sorted(opened) == sorted(course.steps)
    for producer, consumer, how in forward:
        if how is CHUNK and producer in course.steps and consumer in course.steps:
            assert opened.index(consumer) < opened.index(producer)
