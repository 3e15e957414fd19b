"""`omni-live bench world`: what it prints, and what it says where there is nothing to measure."""

import asyncio
import json

import numpy as np
import pytest

from omni_live.bench import world
from omni_live.bench.report import flat
from omni_live.clients.world import connect
from omni_live.clients.world_errors import WorldError


def test_every_promised_figure_has_a_row() -> None:
    keys = {row.key for row in world.ROWS}
    promised = {"ms_per_frame", "batch_speedup_8", "fork_ms_p50", "fork_share", "action_to_frame_ms_p95", "late_frames"}
    promised |= {f"{name}_{at}" for name in ("psnr", "disc_err_px", "lost") for at in (1, 8, 16, 32)}
    promised |= {"deterministic_cost", "planner_success", "random_success", "runs", "load1_before", "load1_after"}
    assert promised <= keys
    assert len(keys) == len(world.ROWS)
    assert set(json.loads(flat(world.ROWS, {}))) == keys


def test_the_pool_is_read_off_the_metrics() -> None:
    page = (
        'omni_live_stage_bytes{pipeline="world",stage="decoder"} 7.0\n'
        'omni_live_stage_bytes{pipeline="world",stage="dynamics"} 4096.0\n'
    )
    found = world._POOL.search(page)
    assert found is not None
    assert float(found[1]) == 4096.0


def test_actions_are_the_same_for_the_same_seed_and_within_bounds() -> None:
    one, other = world.actions(5, 3), world.actions(5, 3)
    assert one.shape == (5, 2, 2)
    assert one.tobytes() == other.tobytes()
    assert np.abs(one).max() <= 1


def test_a_door_that_is_not_there_is_a_world_error() -> None:
    async def knock() -> None:
        async with connect("ws://127.0.0.1:9/v1/world"):
            pass

    with pytest.raises(WorldError, match="connect_failed"):
        asyncio.run(knock())
