"""Pages: what sequences keep in a pool, alone and shared with forks."""

import gc
from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from numpy.typing import NDArray

from omni_live.engines.pages import Closed, NotKept, PagePool, Pages, PagesError, PoolFull, record_bytes

Floats = NDArray[np.float32]
SHAPE: Final = (2, 3)
STRIDE: Final = record_bytes(SHAPE, np.float32)
PER_PAGE: Final = 4
PAGE: Final = PER_PAGE * STRIDE


def pool(pages: int = 64) -> PagePool:
    return PagePool(PAGE, pages * PAGE)


def record(number: int) -> Floats:
    return np.arange(6, dtype=np.float32).reshape(SHAPE) + 10 * number


def filled(where: PagePool, count: int, start: int = 0) -> Pages:
    pages = Pages(where, SHAPE, np.float32, start)
    for number in range(start, start + count):
        assert pages.append(record(number)) == number
    return pages


def content(pages: Pages) -> list[float]:
    return [float(kept.flat[0]) / 10 for kept in pages.span(pages.first, pages.end)]


def snug(where: PagePool, pages: Pages) -> bool:
    """It holds all of the pool that is used."""
    return where.used_bytes == pages.held_bytes


# -- one sequence


def test_what_was_appended_is_there_by_number_and_at_the_end() -> None:
    pages = filled(pool(), 10)
    assert len(pages) == 10 and pages.first == 0 and pages.end == 10
    for number in range(10):
        np.testing.assert_array_equal(pages.get(number), record(number))
    np.testing.assert_array_equal(pages.last(6), np.stack([record(number) for number in range(4, 10)]))
    assert pages.last(0).shape == (0, *SHAPE)


def test_a_sequence_holds_as_many_pages_as_its_records_fill() -> None:
    where = pool()
    pages = filled(where, 0)
    for count in range(1, 14):
        pages.append(record(0))
        assert pages.held_bytes == where.used_bytes == -(-count // PER_PAGE) * PAGE


def test_what_is_read_is_a_copy() -> None:
    pages = filled(pool(), 3)
    pages.get(1)[...] = -1
    pages.last(3)[...] = -1
    assert content(pages) == [0, 1, 2]


def test_a_record_of_another_shape_or_dtype_is_refused_and_changes_nothing() -> None:
    where = pool()
    pages = filled(where, PER_PAGE)
    for wrong in (np.zeros((3, 2), np.float32), np.zeros(SHAPE, np.float64), np.zeros((1, *SHAPE), np.float32)):
        with pytest.raises(ValueError, match="a record of"):
            pages.append(wrong)
    assert len(pages) == PER_PAGE and where.used_bytes == PAGE


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (0, 6), (6, 7), (3, 2)])
def test_records_that_are_not_there_cannot_be_read(begin: int, end: int) -> None:
    with pytest.raises(NotKept):
        filled(pool(), 5).span(begin, end)


def test_truncating_frees_pages_and_what_follows_takes_the_place() -> None:
    where = pool()
    pages = filled(where, 10)
    pages.truncate(5)
    assert content(pages) == [0, 1, 2, 3, 4] and where.used_bytes == 2 * PAGE
    pages.append(record(77))
    assert content(pages) == [0, 1, 2, 3, 4, 77]
    pages.truncate(0)
    assert len(pages) == 0 and where.used_bytes == 0
    for end in (-1, 1):
        with pytest.raises(NotKept):
            pages.truncate(end)


def test_trimming_frees_the_front_and_keeps_the_numbers() -> None:
    where = pool()
    pages = filled(where, 10)
    pages.trim(5)
    assert (pages.first, pages.end) == (5, 10) and content(pages) == [5, 6, 7, 8, 9]
    assert where.used_bytes == 2 * PAGE  # the page of 4 to 7, and that of 8 and 9
    assert pages.append(record(10)) == 10
    np.testing.assert_array_equal(pages.get(5), record(5))
    for gone in (0, 4):
        with pytest.raises(NotKept):
            pages.get(gone)
    with pytest.raises(NotKept):
        pages.truncate(4)
    pages.trim(100)
    assert pages.first == 5
    pages.trim(0)
    assert len(pages) == 0 and pages.append(record(11)) == 11 and content(pages) == [11]
    with pytest.raises(ValueError, match="kept"):
        pages.trim(-1)


def test_a_sliding_sequence_of_any_length_takes_the_same_memory() -> None:
    where = pool(4)
    pages = filled(where, 0)
    for number in range(2_000):
        pages.append(record(number))
        pages.trim(9)
        assert pages.held_bytes <= 3 * PAGE + PAGE
    assert content(pages) == list(range(1_991, 2_000)) and snug(where, pages)


def test_a_sequence_may_start_at_any_number() -> None:
    pages = filled(pool(), 6, start=137)
    assert (pages.first, pages.end) == (137, 143) and content(pages) == list(range(137, 143))
    pages.trim(2)
    assert content(pages.fork()) == [141, 142]


# -- forks


def test_a_fork_costs_nothing_until_somebody_appends() -> None:
    where = pool()
    parent = filled(where, 10)
    forks = [parent.fork() for _ in range(50)]
    assert where.used_bytes == 3 * PAGE
    assert all(content(fork) == content(parent) for fork in forks)
    forks[0].append(record(50))
    assert where.used_bytes == 4 * PAGE  # the copy of the last page
    forks[0].append(record(51))
    assert where.used_bytes == 4 * PAGE


def test_neither_sees_what_the_other_appends() -> None:
    parent = filled(pool(), 6)
    child = parent.fork()
    parent.append(record(60))
    child.append(record(61))
    child.append(record(62))
    assert content(parent) == [0, 1, 2, 3, 4, 5, 60]
    assert content(child) == [0, 1, 2, 3, 4, 5, 61, 62]


def test_a_full_page_is_never_copied() -> None:
    where = pool()
    parent = filled(where, 2 * PER_PAGE)
    child = parent.fork()
    child.append(record(9))
    assert child.held()[:2] == parent.held() and where.used_bytes == 3 * PAGE


def test_who_is_left_alone_with_a_page_writes_to_it_without_a_copy() -> None:
    where = pool(1)
    parent = filled(where, 2)
    child = parent.fork()
    parent.close()
    child.append(record(2))
    assert content(child) == [0, 1, 2] and snug(where, child)


def test_a_fork_that_is_cut_back_leaves_the_records_of_its_parent_alone() -> None:
    where = pool()
    parent = filled(where, 10)
    child = parent.fork()
    child.truncate(2)
    child.append(record(99))
    assert content(child) == [0, 1, 99] and content(parent) == list(range(10))


def test_a_fork_outlives_its_parent_and_the_front_that_it_trimmed() -> None:
    where = pool()
    parent = filled(where, 10)
    child = parent.fork()
    parent.trim(1)
    parent.close()
    assert content(child) == list(range(10)) and snug(where, child)


def test_a_copy_takes_nothing_along_that_another_sequence_wrote() -> None:
    where = pool()
    parent = filled(where, 2)
    child = parent.fork()
    parent.truncate(1)
    child.close()
    parent.append(record(88))
    parent.append(record(89))
    other = parent.fork()
    other.truncate(1)
    other.append(record(5))
    assert bytes(where.memory(other.held()[0])[2 * STRIDE :]) == bytes(2 * STRIDE)


def test_64_forks_of_64_records_add_less_than_a_tenth_of_64_copies() -> None:
    where = pool(2048)
    parent = filled(where, 64)
    alone = where.used_bytes
    forks = [parent.fork() for _ in range(64)]
    assert where.used_bytes - alone < 0.1 * 64 * alone
    for at, fork in enumerate(forks):
        fork.append(record(100 + at))
    assert where.used_bytes == alone + 64 * PAGE
    for fork in forks:
        fork.close()
    assert where.used_bytes == alone


# -- the pool


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    where = pool(2)
    first, second = filled(where, PER_PAGE), filled(where, 2)
    twin = second.fork()  # takes no page
    for full, held in ((first, list(range(PER_PAGE))), (twin, [0, 1])):
        with pytest.raises(PoolFull) as refused:
            full.append(record(9))
        assert refused.value.code == "pool_full"
        assert content(full) == held and where.used_bytes == 2 * PAGE and where.free_pages == 0
    second.close()
    twin.append(record(2))
    assert content(twin) == [0, 1, 2]


def test_the_cap_is_reachable_exactly() -> None:
    where = PagePool(PAGE, 3 * PAGE + PAGE // 2)
    assert where.cap_bytes == 3 * PAGE and where.free_pages == 3
    pages = filled(where, 3 * PER_PAGE)
    assert where.used_bytes == where.cap_bytes
    with pytest.raises(PoolFull):
        pages.append(record(0))


def test_freeable_pages_are_those_that_closing_frees() -> None:
    where = pool()
    parent = filled(where, 10)
    child = parent.fork()
    assert parent.freeable() == child.freeable() == 0
    child.append(record(10))
    assert parent.freeable() == child.freeable() == 1
    before = where.free_pages
    child.close()
    assert where.free_pages == before + 1 and parent.freeable() == 3


def test_pages_are_given_back_once_however_often_a_sequence_is_closed() -> None:
    where = pool()
    parent = filled(where, 10)
    child = parent.fork()
    child.close()
    child.close()
    assert [where.holders(page) for page in parent.held()] == [1, 1, 1]
    for act in (child.fork, lambda: child.append(record(0)), lambda: child.truncate(0), lambda: child.trim(0)):
        with pytest.raises(Closed):
            act()
    with pytest.raises(Closed):
        child.get(0)


def test_a_forgotten_sequence_gives_its_pages_back() -> None:
    where = pool()
    pages = filled(where, 10)
    fork = pages.fork()
    del pages, fork
    gc.collect()
    assert where.used_bytes == 0


def test_a_page_that_nobody_holds_can_be_neither_shared_nor_given_back() -> None:
    where = pool(2)
    page = where.take()
    where.give_back(page)
    for act in (where.share, where.give_back):
        for wrong in (page, 1, 7, -1):
            with pytest.raises(ValueError, match="nobody holds"):
                act(wrong)
    assert where.free_pages == 2


@pytest.mark.parametrize(("page", "cap"), [(0, 640), (65, 650), (128, 127), (-64, 64)])
def test_a_pool_without_a_whole_page_is_refused(page: int, cap: int) -> None:
    with pytest.raises(ValueError, match="no page"):
        PagePool(page, cap)


def test_a_record_must_fit_a_page_and_have_bytes() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Pages(PagePool(64, 640), (100,), np.float32)
    with pytest.raises(ValueError, match="no bytes"):
        Pages(PagePool(64, 640), (0, 4), np.float32)


@pytest.mark.parametrize(("shape", "dtype"), [((), "<f8"), ((1,), "|u1"), ((5, 7), "<u2"), ((3, 4, 4), "<f4")])
def test_records_of_any_shape_and_dtype_come_back_to_the_bit(shape: tuple[int, ...], dtype: str) -> None:
    pages = Pages(PagePool(256, 256 * 64), shape, dtype)
    random = np.random.default_rng(1)
    given = [np.asarray(random.integers(0, 200, shape)).astype(dtype) for _ in range(9)]
    for each in given:
        pages.append(each)
    assert pages.last(9).tobytes() == b"".join(each.tobytes() for each in given)
    assert pages.get(4).shape == shape and pages.get(4).dtype == np.dtype(dtype)


# -- any order of anything


@dataclass(eq=False)
class Twin:
    """A sequence, and what it should hold."""

    pages: Pages
    first: int
    kept: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.kept)


class PagesMachine(RuleBasedStateMachine):
    """Many sequences over one small pool, beside plain lists."""

    sequences: "Bundle[Twin]" = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(12)
        self.alive: list[Twin] = []
        self.next = 0

    def born(self, twin: Twin) -> Twin:
        self.alive.append(twin)
        return twin

    @rule(target=sequences, start=st.integers(0, 9))
    def open(self, start: int) -> Twin:
        return self.born(Twin(Pages(self.pool, SHAPE, np.float32, start), start, []))

    @rule(twin=sequences, count=st.integers(1, 6))
    def append(self, twin: Twin, count: int) -> None:
        for _ in range(count):
            self.next += 1
            used, held = self.pool.used_bytes, twin.pages.held()
            try:
                twin.pages.append(record(self.next))
            except PoolFull:
                assert self.pool.free_pages == 0
                assert (self.pool.used_bytes, twin.pages.held()) == (used, held)
                return
            twin.kept.append(self.next)

    @rule(target=sequences, twin=sequences)
    def fork(self, twin: Twin) -> Twin:
        used = self.pool.used_bytes
        child = Twin(twin.pages.fork(), twin.first, twin.kept.copy())
        assert self.pool.used_bytes == used
        return self.born(child)

    @rule(twin=sequences, share=st.floats(0, 1))
    def truncate(self, twin: Twin, share: float) -> None:
        count = round(share * len(twin.kept))
        twin.pages.truncate(twin.first + count)
        del twin.kept[count:]

    @rule(twin=sequences, keep=st.integers(0, 12))
    def trim(self, twin: Twin, keep: int) -> None:
        twin.pages.trim(keep)
        gone = max(0, len(twin.kept) - keep)
        del twin.kept[:gone]
        twin.first += gone

    @rule(twin=consumes(sequences))
    def close(self, twin: Twin) -> None:
        free, freeable = self.pool.free_pages, twin.pages.freeable()
        twin.pages.close()
        assert self.pool.free_pages == free + freeable
        self.alive.remove(twin)

    @invariant()
    def every_sequence_holds_what_it_should(self) -> None:
        for twin in self.alive:
            assert (twin.pages.first, twin.pages.end) == (twin.first, twin.end)
            assert content(twin.pages) == twin.kept

    @invariant()
    def every_page_has_as_many_holders_as_hold_it(self) -> None:
        holders = Counter(page for twin in self.alive for page in twin.pages.held())
        for page in range(self.pool.cap_bytes // PAGE):
            assert self.pool.holders(page) == holders[page]
        assert self.pool.used_bytes == len(holders) * PAGE
        assert self.pool.used_bytes + self.pool.free_pages * PAGE == self.pool.cap_bytes

    def teardown(self) -> None:
        for twin in self.alive:
            twin.pages.close()
        assert self.pool.used_bytes == 0


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- a transformer's keys and values, the pool's other user


class Attention:
    """Two layers of causal self-attention over random weights, one token at a time. A record is one token's keys and
    values, float32 (layers, 2, width)."""

    LAYERS: Final = 2
    WIDTH: Final = 8

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        self.embedding = random.standard_normal((32, self.WIDTH)).astype(np.float32)
        self.weights = (random.standard_normal((self.LAYERS, 3, self.WIDTH, self.WIDTH)) / 3).astype(np.float32)

    def cache(self, where: PagePool) -> Pages:
        return Pages(where, (self.LAYERS, 2, self.WIDTH), np.float32)

    def feed(self, cache: Pages, token: int) -> Floats:
        """The token's hidden state, given what the cache holds; the token's own keys and values are added to it."""
        past = np.asarray(cache.last(len(cache)), np.float32)
        state = self.embedding[token]
        own = np.empty((self.LAYERS, 2, self.WIDTH), np.float32)
        for layer, (query, key, value) in enumerate(self.weights):
            own[layer] = state @ key, state @ value
            keys, values = (np.concatenate([past[:, layer, part], own[layer, part][None]]) for part in (0, 1))
            shares = np.exp(keys @ (state @ query) / np.sqrt(np.float32(self.WIDTH)))
            state = state + (shares / shares.sum()) @ values
        cache.append(own)
        return np.asarray(state, np.float32)

    def afresh(self, tokens: list[int]) -> Floats:
        cache = self.cache(PagePool(512, 512 * 64))
        return [self.feed(cache, token) for token in tokens][-1]


def test_attention_over_forked_and_truncated_pages_is_as_if_computed_afresh() -> None:
    model = Attention()
    where = PagePool(512, 512 * 64)
    prompt = [3, 1, 4, 1, 5, 9, 2]
    parent = model.cache(where)
    for token in prompt:
        model.feed(parent, token)
    child, other = parent.fork(), parent.fork()
    np.testing.assert_array_equal(model.feed(child, 6), model.afresh([*prompt, 6]))
    np.testing.assert_array_equal(model.feed(parent, 8), model.afresh([*prompt, 8]))
    other.truncate(3)
    np.testing.assert_array_equal(model.feed(other, 7), model.afresh([3, 1, 4, 7]))
    np.testing.assert_array_equal(model.feed(child, 6), model.afresh([*prompt, 6, 6]))
    for cache in (parent, child, other):
        cache.close()
    assert where.used_bytes == 0


def test_caches_of_tokens_and_latents_share_a_pool() -> None:
    where = PagePool(512, 512 * 3)
    latents = Pages(where, (3, 4, 4), np.float32)
    model = Attention()
    cache = model.cache(where)
    latents.append(np.ones((3, 4, 4), np.float32))
    seen = model.feed(cache, 1)
    np.testing.assert_array_equal(seen, model.afresh([1]))
    assert where.used_bytes == 2 * 512 and issubclass(PoolFull, PagesError)
