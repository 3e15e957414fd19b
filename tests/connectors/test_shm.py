import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_live.connectors.contract import ArenaFull, ArenaUnavailable, Connector, Key, Ticket, TicketInvalid
from omni_live.connectors.inproc import Inproc
from omni_live.connectors.shm import (
    Arena,
    Reader,
    RunDirectory,
    segment_path,
    start_time,
    sweep_dead,
    unlink_segments,
)
from omni_live.sessions.payload import ArraySpec, Payload
from omni_live.sessions.stamp import SessionKey, session_key

KEY = Key(session_key(1, 1), 3, 7)
CAPACITY = 64 * 1024


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(segment_path(tmp_path, "w1", 0), 0, CAPACITY)


@pytest.fixture(params=["inproc", "shm"])
def connector(request: pytest.FixtureRequest, arena: Arena) -> Connector:
    return Inproc() if request.param == "inproc" else arena


def _payload(body: bytes, kind: str = "pcm") -> Payload:
    return Payload(kind, {"rate": 16000}, body, (ArraySpec("a", "|u1", (len(body),)),))


def _forged(ticket: Ticket, **changes: int) -> Ticket:
    fields = {"segment": ticket.segment, "offset": ticket.offset, "nbytes": ticket.nbytes}
    fields |= {"generation": ticket.generation} | changes
    return Ticket(**fields, kind=ticket.kind, meta=ticket.meta, arrays=ticket.arrays)


# -- what every connector does


def test_what_is_put_is_what_is_got(connector: Connector) -> None:
    payload = _payload(bytes(range(200)) * 30)
    got = connector.get(connector.put(KEY, payload))
    assert (got.kind, dict(got.meta), bytes(got.body), got.arrays) == (
        payload.kind,
        dict(payload.meta),
        payload.body,
        payload.arrays,
    )


def test_a_released_ticket_gives_nothing(connector: Connector) -> None:
    ticket = connector.put(KEY, _payload(b"secret" * 1000))
    connector.release(ticket)
    with pytest.raises(TicketInvalid):
        connector.get(ticket)


def test_a_second_release_is_an_error(connector: Connector) -> None:
    ticket = connector.put(KEY, _payload(b"x" * 5000))
    connector.release(ticket)
    with pytest.raises(TicketInvalid):
        connector.release(ticket)


def test_a_sweep_frees_the_older_epochs_of_one_session_only(connector: Connector) -> None:
    other = Key(session_key(2, 1), 1)
    old = connector.put(Key(KEY.session, 1), _payload(b"old"))
    current = connector.put(Key(KEY.session, 2), _payload(b"current"))
    others = connector.put(other, _payload(b"other"))
    assert connector.sweep(KEY.session, 2) == 1
    with pytest.raises(TicketInvalid):
        connector.get(old)
    assert bytes(connector.get(current).body) == b"current"
    assert bytes(connector.get(others).body) == b"other"


def test_stats_count_what_lies_there(connector: Connector) -> None:
    tickets = [connector.put(KEY, _payload(b"x" * 100)) for _ in range(3)]
    connector.release(tickets[1])
    stats = connector.stats()
    assert (stats.tickets, stats.puts) == (2, 3)
    assert stats.bytes_used >= 200


def test_inproc_hands_on_the_very_payload() -> None:
    connector, payload = Inproc(), _payload(b"x")
    assert connector.get(connector.put(KEY, payload)) is payload


# -- the arena


def test_a_full_arena_says_so_and_takes_more_after_a_release(arena: Arena) -> None:
    tickets = [arena.put(KEY, _payload(bytes(5000))) for _ in range(CAPACITY // (64 + 5056))]
    with pytest.raises(ArenaFull):
        arena.put(KEY, _payload(bytes(5000)))
    assert arena.stats().refused == 1
    arena.release(tickets[0])
    arena.put(KEY, _payload(bytes(5000)))


def test_a_payload_larger_than_the_arena_never_fits(arena: Arena) -> None:
    with pytest.raises(ArenaUnavailable):
        arena.put(KEY, _payload(bytes(CAPACITY)))


def test_one_ticket_that_is_held_for_long_stops_nobody(arena: Arena) -> None:
    held = arena.put(KEY, _payload(b"h" * 5000))
    for number in range(1000):
        body = number.to_bytes(4, "little") * 4000
        ticket = arena.put(KEY, _payload(body))
        assert arena.get(ticket).body == body
        arena.release(ticket)
    assert bytes(arena.get(held).body) == b"h" * 5000


def test_bodies_are_aligned(arena: Arena) -> None:
    offsets = [arena.put(KEY, _payload(bytes(length))).offset for length in (1, 7, 8, 9, 63, 64, 65)]
    assert all(offset % 64 == 0 for offset in offsets)


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 1},
        {"offset": 64},
        {"offset": -64},
        {"offset": CAPACITY},
        {"offset": 2**62},
        {"nbytes": 1},
        {"nbytes": -1},
        {"nbytes": 2**40},
    ],
)
def test_a_forged_ticket_gives_nothing(arena: Arena, tmp_path: Path, changes: dict[str, int]) -> None:
    ticket = _forged(arena.put(KEY, _payload(bytes(5000))), **changes)
    with pytest.raises(TicketInvalid):
        arena.get(ticket)
    with pytest.raises(TicketInvalid):
        Reader(tmp_path, "w1").get(ticket)


def test_a_stale_ticket_does_not_open_what_took_its_place(arena: Arena, tmp_path: Path) -> None:
    stale = arena.put(KEY, _payload(b"mine!" * 1000))
    arena.release(stale)
    arena.put(KEY, _payload(b"yours" * 1000))
    with pytest.raises(TicketInvalid):
        Reader(tmp_path, "w1").get(stale)
    with pytest.raises(TicketInvalid):
        arena.release(stale)


def test_a_reader_of_a_segment_that_is_gone_gets_an_error(tmp_path: Path) -> None:
    with pytest.raises(TicketInvalid):
        Reader(tmp_path, "w1").get(Ticket(3, 0, 10, 1, "x", {}, ()))


def test_a_reader_sees_the_bytes_where_they_lie_and_cannot_write_them(arena: Arena, tmp_path: Path) -> None:
    body = os.urandom(10_000)
    got = Reader(tmp_path, "w1").get(arena.put(KEY, _payload(body)))
    assert isinstance(got.body, memoryview)
    assert got.body == body
    assert got.body.readonly


def test_only_the_holder_frees_by_name(arena: Arena) -> None:
    ticket = arena.put(KEY, _payload(bytes(100)))
    with pytest.raises(TicketInvalid):
        arena.free(ticket.offset, ticket.generation, holder=8)
    arena.free(ticket.offset, ticket.generation, holder=7)


def test_all_of_a_dead_holder_is_freed_and_nothing_else(arena: Arena) -> None:
    for holder in (1, 2, 1, 3):
        arena.put(Key(KEY.session, 1, holder), _payload(bytes(100)))
    assert arena.forget(1) == 2
    assert arena.stats().tickets == 2


def test_a_retired_arena_goes_with_its_last_payload_and_is_never_written_again(arena: Arena, tmp_path: Path) -> None:
    dead, living = (arena.put(Key(KEY.session, 1, holder), _payload(os.urandom(100))) for holder in (1, 2))
    views = [Reader(tmp_path, "w1").get(ticket) for ticket in (dead, living)]
    bytes_then = [bytes(view.body) for view in views]
    arena.forget(1)
    arena.retire()
    assert segment_path(tmp_path, "w1", 0).exists()
    arena.free(living.offset, living.generation, 2)
    assert not segment_path(tmp_path, "w1", 0).exists()
    assert [bytes(view.body) for view in views] == bytes_then
    with pytest.raises(TicketInvalid):
        arena.release(living)


@given(data=st.data())
def test_live_payloads_never_overlap_and_all_space_comes_back(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    arena = Arena(tmp_path_factory.mktemp("arena") / "segment", 0, 4096)
    live: list[tuple[Ticket, bytes]] = []
    for step in range(data.draw(st.integers(1, 30))):
        if live and bool(data.draw(st.booleans())):
            arena.release(live.pop(data.draw(st.integers(0, len(live) - 1)))[0])
            continue
        body = bytes([step]) * data.draw(st.integers(0, 1500))
        try:
            live.append((arena.put(KEY, _payload(body)), body))
        except ArenaFull:
            assert live
        for ticket, expected in live:
            assert arena.get(ticket).body == expected
    for ticket, _ in live:
        arena.release(ticket)
    assert arena.stats().bytes_used == 0
    arena.put(KEY, _payload(bytes(4096 - 64)))  # in one piece again
    arena.close()


def test_no_space_is_a_typed_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaUnavailable) as caught:
        Arena(tmp_path / "segment", 0, CAPACITY)
    assert caught.value.code == "resource_exhausted"
    assert not list(tmp_path.iterdir())


def test_the_space_of_an_arena_is_reserved_before_use(tmp_path: Path) -> None:
    Arena(tmp_path / "segment", 0, CAPACITY)
    assert (tmp_path / "segment").stat().st_blocks * 512 >= CAPACITY


def test_segments_of_one_owner_are_unlinked_by_name(tmp_path: Path) -> None:
    for name in ("w1.0", "w1.1", "w11.0", "s1.0"):
        (tmp_path / name).touch()
    assert unlink_segments(tmp_path, "w1") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s1.0", "w11.0"]


# -- run directories


def test_a_run_directory_is_private_and_leaves_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.path.stat().st_mode & 0o777 == 0o700
    (directory.path / "w1.0").touch()
    directory.remove()
    assert not list(tmp_path.iterdir())


def test_a_sweep_spares_the_living(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert sweep_dead(tmp_path) == 0
    assert directory.path.exists()
    directory.remove()


def test_a_sweep_removes_what_a_killed_server_left(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from omni_live.connectors.shm import RunDirectory; "
        "d = RunDirectory(Path(sys.argv[1])); (d.path / 'w1.0').touch(); print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        assert sweep_dead(tmp_path) == 0
        server.send_signal(signal.SIGKILL)
        server.wait()
    assert sweep_dead(tmp_path) == 1
    assert not list(tmp_path.iterdir())


def test_a_sweep_removes_the_directory_of_a_reused_pid(tmp_path: Path) -> None:
    started = start_time(os.getpid())
    assert started is not None
    (tmp_path / f"omni-live.{os.getpid()}.{started - 1}").mkdir()
    assert sweep_dead(tmp_path) == 1


def test_a_sweep_spares_a_locked_directory_whose_pid_means_nothing_here(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    foreign = tmp_path / "omni-live.999999999.1"
    directory.path.rename(foreign)  # as a server in another pid namespace would look
    assert sweep_dead(tmp_path) == 0
    assert foreign.exists()


def test_a_sweep_touches_nothing_that_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "omni-live.1234").write_text("a file")
    (tmp_path / "other").mkdir()
    (tmp_path / "omni-live.5.6").symlink_to(tmp_path / "other")
    assert sweep_dead(tmp_path) == 0
    assert (tmp_path / "other").is_dir()


def test_start_time_of_nobody_is_none() -> None:
    assert start_time(2**30) is None


def test_a_session_key_in_a_key_is_the_session(arena: Arena) -> None:
    arena.put(Key(SessionKey(5), 1), _payload(b"x"))
    assert arena.sweep(SessionKey(6), 9) == 0
    assert arena.sweep(SessionKey(5), 9) == 1
