"""From a deploy file to workers: what the defaults place where, and what does not fit the pipelines."""

from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from omni_live.config.deploy import Balance, Deploy, loads
from omni_live.config.document import ConfigError
from omni_live.config.plan import Plan, check, plan
from omni_live.config.registry import GROUP, RegistryError, find, registry
from omni_live.pipelines.registry import ECHO, PIPELINES, VOICE
from omni_live.pipelines.spec import BadSpec, EdgeSpec, Handover, PipelineSpec, StageSpec
from omni_live.sessions.admission import Amount
from omni_live.sessions.limits import MIB, Limits


def planned(text: str) -> Plan:
    return plan(loads(text, "deploy.yaml", {}))


def hosts(placed: Plan) -> list[str]:
    return [worker.name for worker in placed.workers]


def test_voice_by_default_is_three_workers_with_the_talker_and_the_vocoder_in_one() -> None:
    placed = plan(Deploy.of("voice"))
    assert hosts(placed) == ["ears", "thinker", "talker+code2wav"]
    assert [(worker.devices, worker.threads) for worker in placed.workers] == [(("cpu",), 1)] * 3
    assert [pool.stages for pool in placed.pools] == [("ears",), ("thinker",), ("talker", "code2wav")]
    assert [pool.roles for pool in placed.pools] == [(0,), (1,), (2,)]


def test_edges_without_credits_get_the_limit() -> None:
    placed = plan(Deploy(Deploy.of("voice").pipelines, limits=Limits(chunk_credits=5)))
    assert {edge.credits for edge in placed.pipeline("voice").edges} == {5}


def test_replicas_become_workers_alike_and_roles_count_on_over_pipelines() -> None:
    placed = planned(
        "pipelines:\n  echo:\n  voice:\n    stages: {thinker: {replicas: 2, balance: round_robin, threads: 2}}"
    )
    assert hosts(placed) == ["first", "second", "third", "ears", "thinker", "thinker", "talker+code2wav"]
    assert [worker.role for worker in placed.workers] == list(range(7))
    thinker = next(pool for pool in placed.pools if pool.stages == ("thinker",))
    assert (thinker.roles, thinker.balance) == ((4, 5), Balance.ROUND_ROBIN)
    assert [worker.threads for worker in placed.workers if worker.name == "thinker"] == [2, 2]


@pytest.mark.parametrize(
    ("fuse", "expected"),
    [
        ("[]", ["ears", "thinker", "talker", "code2wav"]),
        ("[[code2wav, thinker, talker]]", ["ears", "thinker+talker+code2wav"]),
        ("[[ears, thinker], [talker, code2wav]]", ["ears+thinker", "talker+code2wav"]),
    ],
)
def test_fusing_is_the_deploy_files_business(fuse: str, expected: list[str]) -> None:
    assert hosts(planned(f"pipelines:\n  voice:\n    fuse: {fuse}")) == expected


def test_what_is_said_of_one_fused_stage_holds_for_its_worker() -> None:
    placed = planned("pipelines: {voice: {stages: {code2wav: {threads: 2, environment: {A: b}}}}}")
    worker = placed.workers[2]
    assert (worker.threads, worker.environment) == (2, {"A": "b"})


def test_options_are_laid_over_those_of_the_pipeline() -> None:
    spec = replace(ECHO, stages=(StageSpec("first", "x:Y", {"a": 1, "b": 2}), *ECHO.stages[1:]))
    deploy = loads(
        'pipelines: {echo: {stages: {first: {options: {b: 3}, engine: "z:Z", bytes_per_session: 7}}}}', "f", {}
    )
    (first, *_) = plan(deploy, {"echo": spec}).workers
    assert first.stages == (StageSpec("first", "z:Z", {"a": 1, "b": 3}, 7),)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("{replicas: 2, devices: ['cuda:0', 'cuda:1']}", [("cuda:0",), ("cuda:1",)]),
        ("{replicas: 2, device: 'cuda:0'}", [("cuda:0",), ("cuda:0",)]),
        ("{parallel: 2, devices: ['cuda:0', 'cuda:1']}", [("cuda:0", "cuda:1")]),
        (
            "{replicas: 2, parallel: 2, devices: ['cuda:0', 'cuda:1', 'cuda:2', 'cuda:3']}",
            [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")],
        ),
        ("{replicas: 2, parallel: 2, devices: ['cuda:0', 'cuda:1']}", [("cuda:0", "cuda:1"), ("cuda:0", "cuda:1")]),
    ],
)
def test_devices_are_dealt_out_to_the_replicas(stage: str, expected: list[tuple[str, ...]]) -> None:
    placed = planned(f"pipelines:\n  voice:\n    stages:\n      thinker: {stage}")
    assert [worker.devices for worker in placed.workers if worker.name == "thinker"] == expected


@pytest.mark.parametrize(
    ("voice", "line", "expected"),
    [
        ("stages:\n      speaker: {}", 4, "stages.speaker: pipeline 'voice' has the stages ears, thinker, talker, cod"),
        ("edges:\n      ears->thinker: {}", 4, "edges.ears->thinker: pipeline 'voice' has the edges thinker->talker"),
        ("fuse: [[ears, nose]]", 2, "voice.fuse: pipeline 'voice' has no stage 'nose'"),
        (
            "stages:\n      thinker: {replicas: 3, devices: ['cuda:0', 'cuda:1']}",
            4,
            "stages.thinker: 3 replicas of parallel size 1 take 3 or 1 devices, got 2",
        ),
        ("stages:\n      thinker: {parallel: 2}", 4, "1 replicas of parallel size 2 take 2 devices, got 1"),
        (
            "stages:\n      talker: {threads: 1}\n      code2wav: {threads: 2}",
            5,
            "stages.code2wav.threads: differs from that of a stage in the same worker",
        ),
        ("edges:\n      talker->code2wav: {connector: ray}", 4, "both ends share a worker"),
        ("edges:\n      thinker->talker: {connector: ray}", 4, "one machine speak auto, shared_memory only"),
    ],
)
def test_what_does_not_fit_the_pipeline_is_refused_where_it_stands(voice: str, line: int, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(f"pipelines:\n  voice:\n    {voice}")
    assert str(refused.value).startswith(f"deploy.yaml:{line}: pipelines.voice.")
    assert expected in str(refused.value)


def test_an_unknown_pipeline_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"deploy\.yaml:1: pipelines\.vice: unknown pipeline 'vice'; known are .*voice"
    ):
        planned("pipelines: {vice: }")


def test_a_pipeline_is_served_once_whatever_it_is_called() -> None:
    spec = replace(ECHO, model_types=("parrot",))
    with pytest.raises(ConfigError, match="pipeline 'echo' is served already"):
        plan(Deploy.of("echo", "parrot"), {"echo": spec, "parrot": spec})


def test_caps_of_a_pipeline_are_laid_over_the_limits_and_a_session_costs_what_its_stages_keep() -> None:
    placed = planned("pipelines:\n  voice: {max_sessions: 3}\n  echo:")
    assert placed.caps().for_pipeline("voice") == Amount(3, Limits().max_bytes_per_pipeline, 1_000_000)
    assert placed.caps().for_pipeline("echo").sessions == Limits().max_sessions_per_pipeline
    assert placed.cost("voice").amount.nbytes == sum(stage.bytes_per_session for stage in VOICE.stages) > 45 * MIB
    assert placed.cost("voice").pipeline == "voice"


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("limits: {rewind_steps: 300}\npipelines:\n  world:", "3: pipelines.world.stages.dynamics.rewind_steps"),
        (
            "pipelines:\n  world:\n    stages:\n      dynamics: {options: {rewind_steps: 8}}",
            "4: pipelines.world.stages.dynamics.options.rewind_steps",
        ),
    ],
)
def test_an_engine_that_keeps_fewer_frames_than_rollouts_may_go_back_is_refused(text: str, at: str) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(text)
    assert str(refused.value).startswith(f"deploy.yaml:{at}: ")


def test_an_engine_may_keep_as_many_frames_as_rollouts_may_go_back_or_more() -> None:
    options = "pipelines: {world: {stages: {dynamics: {options: {rewind_steps: 300}}}}}"
    for limit in (300, 8):
        assert planned(f"limits: {{rewind_steps: {limit}}}\n{options}").limits.rewind_steps == limit


def test_no_more_sessions_are_admitted_than_the_pools_of_their_replicas_have_room_for() -> None:
    dynamics = "{replicas: 2, bytes_per_session: 20 KiB, options: {pool_bytes: 100000}}"
    for own, sessions in (("", 8), ("max_sessions: 3, ", 3)):
        placed = planned(f"pipelines: {{world: {{{own}stages: {{dynamics: {dynamics}}}}}}}")
        assert placed.caps().for_pipeline("world") == Amount(sessions, Limits().max_bytes_per_pipeline, 1_000_000)
    with pytest.raises(ConfigError, match=r"options\.pool_bytes: 1000 B are no room for a session of 22 KiB"):
        planned("pipelines: {world: {stages: {dynamics: {options: {pool_bytes: 1000}}}}}")


def test_the_text_of_a_plan_names_every_worker_edge_and_cap(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text(
        "server: {port: 8080, api_keys: {a: hush}}\npipelines:\n  voice:\n    max_sessions: 3\n"
        "    stages: {thinker: {replicas: 2, devices: ['cuda:0', 'cuda:1'], threads: 4}}\n",
        encoding="utf-8",
    )
    text = check(path, {})
    for line in (
        "listen    127.0.0.1:8080, 1 API key",
        "at most 3 sessions, 16 GiB",
        "worker 1  thinker on cuda:0, 4 threads",
        "worker 2  thinker on cuda:1, 4 threads",
        "worker 3  talker+code2wav on cpu, 1 thread",
        "edge      thinker -> talker chunk, auto, 8 credits",
        "edge      talker -> code2wav chunk, by reference, 8 credits",
    ):
        assert line in text
    assert "hush" not in text


def test_a_file_that_does_not_fit_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text("pipelines: {vice: }", encoding="utf-8")
    with pytest.raises(ConfigError):
        check(path, {})


# -- the registry ----------------------------------------------------------------------------------------------------


def test_the_box_brings_its_pipelines() -> None:
    assert {spec.name for spec in PIPELINES} <= set(registry(()))
    assert find("voice", registry(())) is VOICE


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(RegistryError, match=r"unknown pipeline '\.\./etc/passwd'; known are echo, "):
        find("../etc/passwd", registry(()))


MINE = replace(ECHO, name="mine", model_types=("parrot",))
TWO = (replace(ECHO, name="one"), replace(ECHO, name="two"))
NOT_ONE = "echo"
CLASH = replace(ECHO, name="other", model_types=("voice",))


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> dict[str, EntryPoint]:
    """Entry points of a module that holds the specs above."""
    import sys
    from types import ModuleType

    module = ModuleType("a_package_of_specs")
    for name, value in (("MINE", MINE), ("TWO", TWO), ("NOT_ONE", NOT_ONE), ("CLASH", CLASH)):
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = ("MINE", "TWO", "NOT_ONE", "CLASH", "GONE")
    return {name: EntryPoint(name, f"a_package_of_specs:{name}", GROUP) for name in names}


def test_other_packages_add_pipelines_by_name_and_model_type(points: dict[str, EntryPoint]) -> None:
    known = registry([points["MINE"], points["TWO"]])
    assert known["mine"] is known["parrot"] is MINE
    assert {"one", "two"} <= set(known)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NOT_ONE", "entry point 'a_package_of_specs:NOT_ONE' gives a str, not a PipelineSpec"),
        ("GONE", "entry point 'a_package_of_specs:GONE' cannot be loaded"),
        ("CLASH", "pipeline 'voice' of entry point 'a_package_of_specs:CLASH' is taken by pipeline 'voice'"),
    ],
)
def test_a_broken_entry_point_is_named(points: dict[str, EntryPoint], name: str, expected: str) -> None:
    with pytest.raises(RegistryError, match=expected):
        registry([points[name]])


# -- specs -----------------------------------------------------------------------------------------------------------

A, B = StageSpec("a", "x:Y"), StageSpec("b", "x:Y")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"stages": ()}, "has no stages"),
        ({"stages": (A, A, B)}, "stage 'a' appears twice"),
        ({"edges": (EdgeSpec("a", "b"), EdgeSpec("a", "b", Handover.WHOLE))}, "edge 'a->b' appears twice"),
        ({"edges": (EdgeSpec("a", "z"),)}, "edge a->z names stage 'z', which it does not have"),
        ({"edges": (EdgeSpec("a", "b"), EdgeSpec("b", "a"))}, "edges lead in a circle"),
        ({"edges": (EdgeSpec("a", "a"),)}, "edges lead in a circle: a -> a"),
        ({"outputs": {"x": "z"}}, "output 'x' names stage 'z'"),
        ({"entries": {"x": "z"}}, "entry 'x' names stage 'z'"),
        ({"fused": (("a", "z"),)}, "a fused group names stage 'z'"),
        ({"fused": (("a", "b"), ("a",))}, "fused stage 'a' appears twice"),
    ],
)
def test_a_spec_that_contradicts_itself_cannot_be_made(change: dict[str, object], expected: str) -> None:
    sound = PipelineSpec("test", (A, B), outputs={"x": "b"}, entries={"x": "a"}, edges=(EdgeSpec("a", "b"),))
    with pytest.raises(BadSpec, match=f"pipeline 'test'.*{expected}"):
        replace(sound, **change)
