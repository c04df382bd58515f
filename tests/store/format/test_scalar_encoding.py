"""Blocks of scalars keep every value bit by bit, and in a few bytes."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest

from backlight.store.errors import RunFormatError
from backlight.store.format.row_codec import BLOCK_VALUES, LoggedValues, decode_scalars, encode_scalars

ODD = (0.0, -0.0, math.nan, math.inf, -math.inf, 0.1, 1e300, 5e-324, float(np.float32(0.1)), 1.5)


def mixed(count: int) -> LoggedValues:
    source = np.random.default_rng(0)
    names = source.integers(1, 9, count)
    steps = np.cumsum(source.integers(-2, 90, count))
    return LoggedValues(names, steps, source.choice(ODD, count))


def of_steps(steps: int) -> LoggedValues:
    """Return what a run logs: a loss and a norm in float32, and a rate that is computed in float64."""
    source = np.random.default_rng(1)
    losses = source.random((2, steps)).astype(np.float32)
    rates = 1e-3 * np.cos(np.arange(steps) / 1000)
    values = np.stack([losses[0], rates, losses[1]], axis=1).reshape(-1)
    return LoggedValues(np.tile([1, 2, 3], steps), np.repeat(np.arange(steps), 3), values)


@pytest.mark.parametrize("count", [1, 2, 700, BLOCK_VALUES])
def test_values_come_back_bit_by_bit(count: int) -> None:
    logged = mixed(count)
    again = decode_scalars(count, *encode_scalars(logged))
    assert np.array_equal(again.names, logged.names)
    assert np.array_equal(again.steps, logged.steps)
    assert np.array_equal(again.values.view(np.int64), logged.values.view(np.int64))


def test_a_step_of_three_scalars_takes_half_of_its_32_bytes() -> None:
    block = of_steps(300)
    assert sum(map(len, encode_scalars(block))) / 300 < 16.5


def test_what_does_not_change_takes_almost_nothing() -> None:
    constant = LoggedValues(np.ones(1000, np.int64), np.arange(1000), np.full(1000, 0.1))
    assert sum(map(len, encode_scalars(constant))) < 60


@pytest.mark.parametrize(
    ("count", "floats", "integers", "message"),
    [
        (0, b"", b"", "has 0 values"),
        (10**9, b"", b"", "has 1000000000 values"),
        (4, b"", b"no stream", "cannot be decompressed"),
        (4, b"", zlib.compress(b"\0" * 10**8), "starts with"),
        (4, b"1234", encode_scalars(mixed(4))[1], "bytes of floats, expected"),
        (5, b"", encode_scalars(mixed(4))[1], "bytes, expected"),
    ],
)
def test_other_bytes_are_refused(count: int, floats: bytes, integers: bytes, message: str) -> None:
    with pytest.raises(RunFormatError, match=message):
        decode_scalars(count, floats, integers)
