import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from omni_live.protocols.arrays import DTYPES, Array, BadPayload, array, pack
from omni_live.sessions.payload import ArraySpec, Payload

ARRAYS = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: nps.arrays(dtype, nps.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), ARRAYS, min_size=1))
def test_arrays_come_back_as_they_were_packed(arrays: dict[str, Array]) -> None:
    payload = pack("hidden", {"step": 3}, **arrays)
    for name, expected in arrays.items():
        got = array(payload, name)
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        np.testing.assert_array_equal(got, expected)


def test_one_array_is_neither_copied_in_nor_out() -> None:
    samples = np.arange(1000, dtype=np.float32)
    assert np.shares_memory(array(pack("pcm", samples=samples), "samples"), samples)


def test_a_view_with_strides_is_packed_in_order() -> None:
    grid = np.arange(12, dtype=np.int16).reshape(3, 4)
    np.testing.assert_array_equal(array(pack("grid", turned=grid.T), "turned"), grid.T)


def test_each_array_is_aligned() -> None:
    payload = pack("x", a=np.zeros(3, np.uint8), b=np.zeros(1, np.float64), c=np.zeros(5, np.uint8))
    assert payload.nbytes == 24
    assert array(payload, "b").ctypes.data % 8 == 0


@pytest.mark.parametrize(
    "bad",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array([1j]),
        np.array([1.0], ">f4"),
        np.array([1], np.longdouble),
        np.array(["2024-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", "f4"), ("b", "O")]),
        np.zeros(2, "V8"),
    ],
    ids=lambda bad: bad.dtype.str,
)
def test_only_plain_numbers_are_packed(bad: Array) -> None:
    with pytest.raises(BadPayload):
        pack("x", bad=bad)


@pytest.mark.parametrize(
    "spec",
    [
        ArraySpec("a", "|O", (1,)),
        ArraySpec("a", "f4,O", (1,)),
        ArraySpec("a", "<c8", (1,)),
        ArraySpec("a", ">f4", (1,)),
        ArraySpec("a", "|S0", (10**18,)),
        ArraySpec("a", "no such type", (1,)),
        ArraySpec("a", "<f4", (-1,)),
        ArraySpec("a", "<f4", (-2, -4)),
        ArraySpec("a", "<f4", (9,)),
        ArraySpec("a", "<f4", (2**40, 2**40)),
        ArraySpec("a", "|u1", (1,) * 33),
    ],
)
def test_a_spec_that_lies_is_refused(spec: ArraySpec) -> None:
    with pytest.raises(BadPayload):
        array(Payload("x", body=bytes(32), arrays=(spec,)), "a")


def test_a_lie_about_an_earlier_array_is_noticed_too() -> None:
    specs = (ArraySpec("a", "<f4", (10**12,)), ArraySpec("b", "<f4", (1,)))
    with pytest.raises(BadPayload):
        array(Payload("x", body=bytes(32), arrays=specs), "b")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(BadPayload):
        array(pack("x", a=np.zeros(1)), "b")
