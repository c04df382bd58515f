from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from backlight.store.errors import RunFormatError
from backlight.store.format import row_codec

SHAPES = st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(1, 4))
FLOATS = st.floats() | st.floats(width=32) | st.sampled_from([0.0, -0.0, np.nan, np.inf, 1e300, 5e-324])
INTS = st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 200)


@given(SHAPES.flatmap(lambda s: hnp.arrays(np.float64, s, elements=FLOATS)))
def test_floats_round_trip_bit_identical(values_SPK: npt.NDArray[np.float64]) -> None:
    S, P, K = values_SPK.shape
    stored = [(S, row_codec.encode_floats(values_SPK))]
    for k in range(K):
        back = row_codec.decode_column(stored, "f", P, K, k)
        assert back.shape == values_SPK[:, :, k].shape
        assert np.array_equal(back.view(np.int64), np.ascontiguousarray(values_SPK[:, :, k]).view(np.int64))


@pytest.mark.slow
@given(SHAPES.flatmap(lambda s: hnp.arrays(np.int64, s, elements=INTS)))
def test_integers_round_trip(values_SPK: npt.NDArray[np.int64]) -> None:
    S, P, K = values_SPK.shape
    stored = [(S, row_codec.encode_integers(values_SPK))]
    for k in range(K):
        assert np.array_equal(row_codec.decode_column(stored, "i", P, K, k), values_SPK[:, :, k])


def test_blobs_of_different_layouts_are_read_in_order() -> None:
    first = np.full((2, 3, 1), 7.0)
    second = np.arange(6.0).reshape(2, 3, 1) + 0.1
    stored = [(2, row_codec.encode_floats(values)) for values in (first, second, first)]
    expected = np.concatenate([first, second, first])[:, :, 0]
    assert np.array_equal(row_codec.decode_column(stored, "f", 3, 1, 0), expected)


def test_constant_columns_take_few_bytes() -> None:
    P = 1000
    numel = np.arange(P, dtype=np.int64) + 10**9
    ints = np.zeros((1, P, 3), dtype=np.int64)
    ints[0, :, 0], ints[0, :, 1], ints[0, 5, 2] = 1, numel, 100
    blob = row_codec.encode_integers(ints, numel)
    assert len(blob) == 3 + 8 + 0 + P
    assert np.array_equal(row_codec.decode_column([(1, blob)], "i", P, 3, 1, numel)[0], numel)
    narrow = np.random.default_rng(0).standard_normal((1, P, 1)).astype(np.float32).astype(np.float64)
    assert len(row_codec.encode_floats(narrow)) == 1 + 4 * P


def test_nan_payload_is_preserved() -> None:
    payload = np.array([0x7FF8_0000_0000_0001, 0x3FF0_0000_0000_0000], dtype=np.int64).view(np.float64)
    stored = [(1, row_codec.encode_floats(payload.reshape(1, 2, 1)))]
    assert np.array_equal(
        row_codec.decode_column(stored, "f", 2, 1, 0).view(np.int64), payload.view(np.int64)[None]
    )


@pytest.mark.parametrize(
    ("blob", "match"),
    [
        (b"", "expected 1 letters"),
        (b"z" + b"\0" * 8, "starts with b'z'"),
        (b"d" + b"\0" * 8, "has 9 bytes, expected 17"),
        (b"b" + b"\0" * 2, "starts with b'b'"),
    ],
)
def test_damaged_blob_is_rejected(blob: bytes, match: str) -> None:
    with pytest.raises(RunFormatError, match=match):
        row_codec.decode_column([(1, blob)], "f", 2, 1, 0)


def test_unknown_sizes_are_rejected() -> None:
    with pytest.raises(RunFormatError, match="refers to the sizes of a parameter table"):
        row_codec.decode_column([(1, b"n")], "i", 2, 1, 0)
