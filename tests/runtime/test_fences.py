import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_live.runtime.fences import BadFenceTable, FenceTable
from omni_live.sessions.stamp import LANES, Fence, Stamp

SESSIONS = 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fences"


@pytest.fixture
def table(path: Path) -> FenceTable:
    return FenceTable.create(path, SESSIONS)


def test_a_new_table_admits_nothing(table: FenceTable) -> None:
    stamps = [Stamp(slot, generation, 0, 1) for slot in range(SESSIONS * LANES) for generation in (0, 1)]
    assert not any(table.admits(stamp) for stamp in stamps)


def test_a_worker_sees_what_the_server_writes(table: FenceTable, path: Path) -> None:
    worker = FenceTable.open(path)
    fence = Fence(5, 3)
    table.write(fence)
    assert worker.admits(fence.stamp(1))
    table.write(fence.raised())
    assert not worker.admits(fence.stamp(1))
    assert worker.admits(fence.raised().stamp(2))


def test_another_process_sees_what_the_server_writes(table: FenceTable, path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from omni_live.runtime.fences import FenceTable; "
        "from omni_live.sessions.stamp import Stamp; table = FenceTable.open(Path(sys.argv[1]));\n"
        "for line in sys.stdin: print(table.admits(Stamp(2, 7, int(line), 1)), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        asks, answers = reader.stdin, reader.stdout
        assert asks is not None
        assert answers is not None

        def asked(epoch: int) -> str:
            asks.write(f"{epoch}\n")
            asks.flush()
            return answers.readline().strip()

        table.write(Fence(2, 7, 1))
        assert asked(1) == "True"
        table.write(Fence(2, 7, 2))
        assert (asked(1), asked(2)) == ("False", "True")
        asks.close()


def test_a_closed_row_admits_nothing(table: FenceTable) -> None:
    table.write(Fence(0, 1, 5))
    table.write(Fence(0, 2, 0))
    assert not any(table.admits(Stamp(0, generation, epoch, 1)) for generation in (1, 2) for epoch in (0, 1, 5))


@pytest.mark.parametrize("slot", [-1, SESSIONS * LANES, 2**40])
def test_a_stamp_of_a_row_that_does_not_exist_is_stale(table: FenceTable, slot: int) -> None:
    assert not table.admits(Stamp(slot, 1, 1, 1))
    with pytest.raises(IndexError):
        table.write(Fence(slot, 1, 1))


@pytest.mark.parametrize("fence", [Fence(0, 2**32, 1), Fence(0, 1, 2**32), Fence(0, -1, 1)])
def test_a_number_that_does_not_fit_is_refused(table: FenceTable, fence: Fence) -> None:
    with pytest.raises(OverflowError):
        table.write(fence)


@given(
    st.lists(st.builds(Fence, st.integers(0, 15), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=30),
    st.builds(Stamp, st.integers(0, 15), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.just(1)),
)
def test_a_row_admits_exactly_what_was_written_last(
    tmp_path_factory: pytest.TempPathFactory, fences: list[Fence], stamp: Stamp
) -> None:
    table = FenceTable.create(tmp_path_factory.mktemp("fences") / "fences", SESSIONS)
    last = {fence.slot: fence for fence in fences}
    for fence in fences:
        table.write(fence)
    for fence in last.values():
        assert table.admits(fence.stamp(1)) == (fence.epoch > 0)
    other = last.get(stamp.slot)
    assert table.admits(stamp) == (other is not None and stamp.epoch > 0 and other.admits(stamp))


def test_moves_count_writes(table: FenceTable, path: Path) -> None:
    worker = FenceTable.open(path)
    before = worker.moves
    table.write(Fence(0, 1, 1))
    table.write(Fence(0, 1, 2))
    assert worker.moves == before + 2


def test_a_worker_cannot_write(table: FenceTable, path: Path) -> None:
    with pytest.raises(TypeError):
        FenceTable.open(path).write(Fence(0, 1, 1))


@pytest.mark.parametrize("content", [b"", b"x" * 63, b"x" * 64, bytes(640)])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(BadFenceTable):
        FenceTable.open(path)


def test_a_table_is_never_created_over_another(table: FenceTable, path: Path) -> None:
    with pytest.raises(FileExistsError):
        FenceTable.create(path, SESSIONS)
