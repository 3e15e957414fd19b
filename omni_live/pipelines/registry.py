"""The pipelines in the box. Other packages add theirs by the entry point group `omni_live.pipelines`."""

from omni_live.pipelines.spec import EdgeSpec, PipelineSpec, SessionKind, StageSpec
from omni_live.protocols.openpi.fake_contract import CONTRACT as FAKE
from omni_live.protocols.openpi.tabletop import CONTRACT as TABLETOP
from omni_live.protocols.world.contract import TABLE_TOP
from omni_live.sessions.payload import Scalar

KIB = 1024
MIB = 1024 * KIB

VOICE = PipelineSpec(
    name="voice",
    kind=SessionKind.CONVERSATION,
    hears_hz=16_000,
    speaks_hz=24_000,
    stages=(
        StageSpec("ears", "omni_live.pipelines.voice.ears:Ears", bytes_per_session=2 * MIB),
        # 22.5 KiB of KV per token (30 layers, 3 KV heads of 64, bfloat16), 2048 tokens of context.
        StageSpec("thinker", "omni_live.pipelines.voice.thinker:Thinker", bytes_per_session=46 * MIB),
        StageSpec("talker", "omni_live.pipelines.voice.talker:Talker", bytes_per_session=1 * MIB),
        StageSpec("code2wav", "omni_live.pipelines.voice.code2wav:Code2Wav", bytes_per_session=1 * MIB),
    ),
    # No edge leaves the ears: what they find goes to the session, and only the session decides what it means.
    edges=(EdgeSpec("thinker", "talker"), EdgeSpec("talker", "code2wav")),
    entries={"audio": "ears", "text": "thinker", "speech": "talker"},
    outputs={"text": "thinker", "audio": "code2wav", "transcript": "ears"},
    fused=(("talker", "code2wav"),),
)

POLICY_STEP_S = 180.0
"""A policy's first inference may compile for minutes."""

ROBOT = PipelineSpec(
    name="robot",
    stages=(
        StageSpec(
            "policy",
            "omni_live.pipelines.robot.policy:PolicyEngine",
            {"policy": "omni_live.pipelines.robot.table_policy:TablePolicy"},
            bytes_per_session=4 * KIB,  # the last chunk
        ),
    ),
    entries={"observation": "policy"},
    outputs={"actions": "policy"},
    contract=TABLETOP,
)

WORLD = PipelineSpec(
    name="world",
    kind=SessionKind.ROLLOUT,
    stages=(
        # 322 latents at most, each of 32 bytes that take 64; so 43 pages of 8, of which the first and the last may be
        # nearly empty.
        StageSpec(
            "dynamics",
            "omni_live.pipelines.world.dynamics:Dynamics",
            {"rewind_steps": 256, "pool_bytes": 256 * MIB},
            bytes_per_session=22 * KIB,
        ),
        StageSpec("decoder", "omni_live.pipelines.world.decoder:Decoder"),
    ),
    edges=(EdgeSpec("dynamics", "decoder"),),
    entries={"actions": "dynamics"},
    outputs={"frame": "decoder", "latent": "dynamics"},
    world=TABLE_TOP,
)


def _fake_robot(name: str, delay_ms: float) -> PipelineSpec:
    """A policy without a model, of the size of pi0's: for tests and for `bench robots`."""
    step_s = POLICY_STEP_S if delay_ms else 0.0
    options: dict[str, Scalar] = {
        "policy": "omni_live.pipelines.robot.fake:FakePolicy",
        "delay_ms": delay_ms,
        "inline": not delay_ms,
    }
    return PipelineSpec(
        name=name,
        stages=(StageSpec("policy", "omni_live.pipelines.robot.policy:PolicyEngine", options, 8 * KIB, step_s),),
        entries={"observation": "policy"},
        outputs={"actions": "policy"},
        contract=FAKE,
    )


FAKE_ROBOT = _fake_robot("fake-robot", 0.0)
SLOW_FAKE_ROBOT = _fake_robot("slow-fake-robot", 100.0)

# Three stages that hand on what they get: for tests and for `bench hops`, which measures everything but models.
ECHO = PipelineSpec(
    name="echo",
    stages=tuple(StageSpec(name, "omni_live.engines.fake:FakeEcho") for name in ("first", "second", "third")),
    edges=(EdgeSpec("first", "second"), EdgeSpec("second", "third")),
    entries={"payload": "first"},
    outputs={"payload": "third"},
)

PIPELINES: tuple[PipelineSpec, ...] = (VOICE, ROBOT, WORLD, ECHO, FAKE_ROBOT, SLOW_FAKE_ROBOT)
