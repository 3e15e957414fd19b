"""The bench of the runtime, with little work: what it says, not how fast it is."""

import argparse
import json
import math

import pytest

from omni_live.bench import hops
from omni_live.bench.cli import HOPS_ROWS, add_arguments, run
from omni_live.bench.hops import Bystander, Work
from omni_live.sessions.effects import Emit
from omni_live.sessions.events import TurnDone

LITTLE = Work(rounds=2, requests=40, big=3, units=50, warm_up=5)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["hops", *arguments])


def test_the_last_line_is_one_flat_object_with_every_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hops, "QUICK", LITTLE)
    assert run(parsed("--json", "--quick")) == 0
    out, progress = capsys.readouterr()
    figures = json.loads(out.splitlines()[-1])
    assert list(figures) == [row.key for row in HOPS_ROWS]
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in figures.values())
    assert figures["runs"] == 2
    assert figures["hop_us_p99"] >= figures["hop_us_p50"] > 0
    assert figures["hop_ratio"] == pytest.approx(figures["hop_us_p50"] / figures["bare_hop_us_p50"], rel=1e-3)
    assert all(figures[key] > 0 for key in ("chain_1mib_ms_p50", "units_per_s_8", "bare_hop_us_p50", "cpus"))
    assert [line for line in progress.splitlines() if "one request at a time" in line]


async def test_every_unit_of_every_session_arrives() -> None:
    async with hops.echo(30, 3) as clients:
        for client in clients:
            await client.ask(hops.TINY)
            await client.ask(hops.TINY)
        assert [client.mailbox.units for client in clients] == [60] * 3


async def test_the_bare_chain_hands_everything_round() -> None:
    chain = hops.BareChain()
    async with chain.opened():
        for body in (b"x", b"", bytes(200_000)):
            assert await chain.ask(body) > 0


def test_a_turn_that_ends_badly_is_no_figure() -> None:
    mailbox = Bystander()
    mailbox.take([Emit(TurnDone("", 1, "failed", "stage_error"), 1)])
    assert mailbox.failed == "failed: stage_error"


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 3.0), (0.99, 5.0), (1.0, 5.0)])
def test_quantiles_are_nearest_ranks(share: float, value: float) -> None:
    assert hops.quantile([5.0, 1.0, 3.0, 4.0, 2.0], share) == value
