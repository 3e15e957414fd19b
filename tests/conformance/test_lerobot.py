"""LeRobot's own class behind the adapter, in a process that has LeRobot and the versions it pins before ours."""

from .apart import HERE, run_tests


def test_lerobot_s_act_policy_answers_through_the_adapter_as_by_itself() -> None:
    # LeRobot warns as it likes
    assert run_tests(["lerobot"], "-o", "filterwarnings=", str(HERE / "lerobot_act.py")).startswith("4 passed")
