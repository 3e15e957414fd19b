"""The deploy file: what it may say, and that each thing it may not say is one line with file, line and key."""

import math
import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_live.config.deploy import (
    Balance,
    Deploy,
    Door,
    EdgeDeploy,
    PipelineDeploy,
    Server,
    StageDeploy,
    is_loopback,
    load,
    loads,
)
from omni_live.config.document import ConfigError
from omni_live.pipelines.spec import Connector, Handover
from omni_live.sessions.limits import MIB, Limits

WHOLE_FILE = """\
server:
  host: 0.0.0.0
  port: 8765
  openpi_port: 8001
  metrics_port: 9000
  api_keys: {team-a: env:TEAM_A, team-b: secret-b}
  origins: ["https://example.org"]
  hosts: [example.org]
  doors: [duplex, openai]
limits: {idle_lease_s: 120, client_frame_bytes: 8 MiB, lead_ms: 0, max_sessions: 12}
pipelines:
  voice:
    max_sessions: 8
    max_bytes: 2 GiB
    stages:
      thinker:
        replicas: 2
        devices: ["cuda:0", "cuda:1"]
        threads: 2
        balance: round_robin
        environment: {HF_HUB_OFFLINE: "1"}
        options: {max_tokens: 200, greedy: true, voice: null}
      talker: {device: cpu, bytes_per_session: 1 MiB, engine: "my.talker:Fast"}
    edges:
      thinker -> talker: {handover: whole, connector: shared_memory, credits: 4}
    fuse: [[talker, code2wav]]
  echo:
"""


def read(text: str) -> Deploy:
    return loads(text, "deploy.yaml", {"TEAM_A": "secret-a"})


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read(text)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_everything_a_file_may_say_is_read() -> None:
    deploy = read(WHOLE_FILE)
    assert deploy.server == Server(
        host="0.0.0.0",
        port=8765,
        openpi_port=8001,
        metrics_port=9000,
        api_keys={"team-a": "secret-a", "team-b": "secret-b"},
        origins=("https://example.org",),
        hosts=("example.org",),
        doors=(Door.DUPLEX, Door.OPENAI),
    )
    assert deploy.limits == Limits(idle_lease_s=120, client_frame_bytes=8 * MIB, lead_ms=0, max_sessions=12)
    voice, echo = deploy.pipelines
    assert (voice.name, voice.max_sessions, voice.max_bytes, voice.fuse) == (
        "voice",
        8,
        2048 * MIB,
        (("talker", "code2wav"),),
    )
    thinker, talker = voice.stages["thinker"], voice.stages["talker"]
    assert (thinker.replicas, thinker.devices, thinker.threads) == (2, ("cuda:0", "cuda:1"), 2)
    assert thinker.balance is Balance.ROUND_ROBIN
    assert thinker.environment == {"HF_HUB_OFFLINE": "1"}
    assert thinker.options == {"max_tokens": 200, "greedy": True, "voice": None}
    assert (talker.devices, talker.bytes_per_session, talker.engine) == (("cpu",), MIB, "my.talker:Fast")
    edge = voice.edges["thinker->talker"]
    assert (edge.handover, edge.connector, edge.credits) == (Handover.WHOLE, Connector.SHARED_MEMORY, 4)
    assert (echo.name, echo.stages, echo.fuse) == ("echo", {}, None)


def test_a_file_that_says_nothing_leaves_every_default() -> None:
    deploy = read("pipelines: {voice: {}}")
    assert (deploy.server, deploy.limits) == (Server(), Limits())
    assert Server().host == "127.0.0.1"
    (voice,) = deploy.pipelines
    assert (voice.stages, voice.edges, voice.fuse) == ({}, {}, None)


def test_what_is_read_cannot_be_changed() -> None:
    deploy = read(WHOLE_FILE)
    with pytest.raises(FrozenInstanceError):
        deploy.limits.lead_ms = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        deploy.pipelines[0].stages["x"] = deploy.pipelines[0].stages["talker"]  # type: ignore[index]


def test_keys_are_not_in_the_text_of_the_configuration() -> None:
    assert "secret" not in repr(read(WHOLE_FILE))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pipelines:\n  voice:\n    stagse: {}", "deploy.yaml:3: pipelines.voice.stagse: unknown key; known are edges"),
        ("pipelines: {voice: }\nlimits:\n  idle_s: 3", "deploy.yaml:3: limits.idle_s: unknown key"),
        ("pipelines: {voice: }\nport: 1", "deploy.yaml:2: port: unknown key; known are limits, pipelines, server"),
        (
            "pipelines:\n  voice:\n    stages:\n      ears: {device: cpu}\n      ears: {device: cpu}",
            "deploy.yaml:5: pipelines.voice.stages.ears: appears twice",
        ),
        ("pipelines: {voice: }\npipelines: {echo: }", "deploy.yaml:2: pipelines: appears twice"),
        ("pipelines: {1: {}}", "deploy.yaml:1: pipelines: expected a name as key, got '1'"),
        ("server: {}", "deploy.yaml:1: pipelines: missing"),
        ("pipelines: {}", "deploy.yaml:1: pipelines: expected at least one pipeline"),
        ("pipelines: [voice]", "deploy.yaml:1: pipelines: expected a mapping, got a list"),
        ("", "deploy.yaml: is empty"),
        ("pipelines: {voice: }\n---\n", "deploy.yaml:2: is not YAML"),
        ("pipelines: {voice: \n  - x: [", "deploy.yaml:2: is not YAML"),
        ("pipelines: \x00", "deploy.yaml: is not YAML"),
        ('pipelines: {"a\\nb": 3}', "deploy.yaml:1: 'pipelines.a\\nb': expected a mapping"),
        ("[" * 5000, "deploy.yaml: is nested too deeply"),
        ("x" * 1_100_000, "deploy.yaml: is longer than"),
    ],
)
def test_a_file_of_another_shape_is_refused(text: str, expected: str) -> None:
    assert expected in complaint(text)


def stage(value: str) -> str:
    return f"pipelines:\n  voice:\n    stages:\n      thinker:\n        {value}\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("replicas: true", "thinker.replicas: expected a whole number, got 'true'"),
        ("replicas: 0", "thinker.replicas: expected at least 1, got '0'"),
        ("replicas: -1", "thinker.replicas: expected at least 1, got '-1'"),
        ("replicas: 1.0", "thinker.replicas: expected a whole number, got '1.0'"),
        ('replicas: "2"', "thinker.replicas: expected a whole number, got '2'"),
        ("replicas:", "thinker.replicas: expected a whole number, got nothing"),
        ("replicas: [2]", "thinker.replicas: expected a single value, got a list"),
        ("replicas: 100000", "thinker.replicas: expected at most 256"),
        ("replicas: 2020-01-01", "thinker.replicas: expected a number, a flag or text, got '2020-01-01'"),
        ("replicas: !!python/name:os.system x", "thinker.replicas: expected a number, a flag or text"),
        ("replicas: !!int x", "thinker.replicas: expected a number, a flag or text"),
        ("threads: .inf", "thinker.threads: expected a whole number, got '.inf'"),
        ("device: /dev/sda", "thinker.device: expected a device such as cpu or cuda:0, got '/dev/sda'"),
        ("devices: []", "thinker.devices: expected at least one device"),
        ("devices: cpu", "thinker.devices: expected a list, got 'cpu'"),
        ("{device: cpu, devices: [cpu]}", "thinker.device: devices are given already"),
        ("balance: random", "thinker.balance: expected one of least_loaded, round_robin, got 'random'"),
        ("engine: ../evil.py", "thinker.engine: expected module:Class"),
        ("environment: {A-B: c}", "thinker.environment.A-B: expected the name of an environment variable"),
        ("environment: {A: 1}", "thinker.environment.A: expected text, got '1'"),
        ("options: {deep: {a: 1}}", "thinker.options.deep: expected a single value, got a mapping"),
        ("step_s: long", "step_s: expected a finite number, got 'long'"),
        ("bytes_per_session: 3 apples", "bytes_per_session: expected a size such as 16 MiB, got '3 apples'"),
        ("at: here", "thinker.at: unknown key"),
    ],
)
def test_a_value_that_is_none_of_a_stages_is_refused_where_it_stands(value: str, expected: str) -> None:
    text = complaint(stage(value))
    assert text.startswith("deploy.yaml:5: ")
    assert expected in text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("idle_lease_s: true", "expected a finite number, got 'true'"),
        ("idle_lease_s: -1", "expected at least 0.001, got '-1'"),
        ("idle_lease_s: 0", "expected at least 0.001, got '0'"),
        ("idle_lease_s: .nan", "expected a finite number, got '.nan'"),
        ("idle_lease_s: .inf", "expected a finite number, got '.inf'"),
        (f"idle_lease_s: 1{'0' * 400}", "expected at most 1e+09"),
        ("outbox_bytes: -5", "expected at least 1"),
        ("outbox_bytes: 0 MiB", "expected at least 1"),
        ("outbox_bytes: 1.5 MiB", "expected a size"),
        ("max_sessions: 0", "expected at least 1"),
        ("max_sessions: 99999999999", "expected at most"),
        ("max_age_s: 30", "max_age_warning_s must be less than max_age_s"),
    ],
)
def test_a_limit_that_limits_nothing_is_refused(value: str, expected: str) -> None:
    text = complaint(f"pipelines: {{voice: }}\nlimits:\n  {value}\n")
    assert text.startswith("deploy.yaml:3: limits.")
    assert expected in text


def test_every_limit_can_be_set() -> None:
    for one in fields(Limits):
        value = 70 if one.name != "max_age_s" else 90_000
        deploy = read(f"pipelines: {{voice: }}\nlimits: {{{one.name}: {value}}}")
        assert getattr(deploy.limits, one.name) == value


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("port: 70000", "server.port: expected at most 65535"),
        ("port: -1", "server.port: expected at least 0"),
        ("{port: 9000, metrics_port: 9000}", "server.metrics_port: port 9000 is taken by server.port"),
        ("openpi_port: 8765", "server.openpi_port: port 8765 is taken by server.port"),
        ("host: 0.0.0.0", "server.host: '0.0.0.0' is reachable from other machines: that takes server.api_keys"),
        ("host: example.org", "server.host: 'example.org' is reachable"),
        ("api_keys: {a: env:GONE}", "server.api_keys.a: the environment variable GONE is not set"),
        ("api_keys: {a: same, b: same}", "server.api_keys.b: is the key of another label too"),
        ("api_keys: {a: ''}", "server.api_keys.a: expected text"),
        ("doors: [duplex, telnet]", "server.doors[1]: expected one of duplex"),
        ("origins: [a, a]", "server.origins[1]: 'a' appears twice"),
    ],
)
def test_a_server_that_cannot_listen_or_lets_in_anybody_is_refused(server: str, expected: str) -> None:
    assert f"deploy.yaml:3: {expected}" in complaint(f"pipelines: {{voice: }}\nserver:\n  {server}\n")


def test_any_free_port_may_be_taken_more_than_once() -> None:
    assert read("pipelines: {voice: }\nserver: {port: 0, metrics_port: 0}").server.metrics_port == 0


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("::", False), ("10.0.0.1", False)],
)
def test_only_this_machine_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("edge", "expected"),
    [
        ("handover: sometimes", "expected one of whole, chunk"),
        ("connector: pigeon", "expected one of auto"),
        ("credits: 0", "expected at least 1"),
    ],
)
def test_a_value_that_is_none_of_an_edges_is_refused(edge: str, expected: str) -> None:
    text = complaint(f"pipelines:\n  voice:\n    edges:\n      thinker->talker:\n        {edge}")
    assert text.startswith("deploy.yaml:5: pipelines.voice.edges.thinker->talker.")
    assert expected in text


@pytest.mark.parametrize(
    ("fuse", "expected"),
    [
        ("[[ears]]", "expected at least two stages"),
        ("[ears, thinker]", "expected a list, got 'ears'"),
        ("[[a, b], [b, c]]", "stage 'b' is in another group already"),
        ("[[a, a]]", "'a' appears twice"),
    ],
)
def test_a_group_that_is_none_is_refused(fuse: str, expected: str) -> None:
    assert expected in complaint(f"pipelines:\n  voice:\n    fuse: {fuse}")


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read: No such file"):
        load(tmp_path / "gone.yaml", {})
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load(path, {})


def test_a_file_is_read_from_its_path(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text("pipelines: {echo: }", encoding="utf-8")
    assert load(path, {}).pipelines[0].name == "echo"


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=8))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
)
KEYS = ("replicas", "device", "devices", "threads", "options", "environment", "balance", "parallel", "x")


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4), VALUES)
def test_whatever_stands_in_a_file_it_is_read_or_refused_in_one_line(stage: dict[str, object], limit: object) -> None:
    import yaml

    text = yaml.safe_dump(
        {"pipelines": {"voice": {"stages": {"thinker": stage}}}, "limits": {"idle_lease_s": limit}}, allow_unicode=True
    )
    try:
        deploy = read(text)
    except ConfigError as error:
        lines = str(error).splitlines()
    else:
        lines = [f"a lease of {deploy.limits.idle_lease_s} s"]
        assert math.isfinite(deploy.limits.idle_lease_s)
    assert len(lines) == 1


def test_the_page_of_the_configuration_has_every_key_with_the_servers_defaults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = {
        key: default
        for keys, default in re.findall(r"^\| (`[^|]+`) \| ([^|]*) \|", page, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", keys)
    }
    known = {one.name for kind in (Server, StageDeploy, EdgeDeploy, PipelineDeploy) for one in fields(kind)}
    assert set(rows) == known - {"at", "name"} | {"device"}
    assert (rows["host"], rows["port"]) == (Server().host, str(Server().port))
