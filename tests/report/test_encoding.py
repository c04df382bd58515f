"""Arrays round-trip; text cannot end its script element."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from packed import unpack

from backlight.report.page_codec import PRECISION, pack, pack_log, pack_share, script_json

RANDOM = np.random.default_rng(0).uniform(0, 200, (5, 7))
DTYPES = (np.float64, np.float32, np.uint16, np.int32, np.uint8, np.bool_)


@pytest.mark.parametrize(
    "array",
    [
        *(RANDOM.astype(dtype) for dtype in DTYPES),
        np.array([np.nan, np.inf, -np.inf, 5e-324]),
        np.array([0, 2**40, -(2**53)]),
    ],
)
def test_array_round_trips_exactly(array: np.ndarray) -> None:
    assert np.array_equal(unpack(pack(array)), array, equal_nan=array.dtype.kind == "f")


def test_string_array_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"cannot put an array of <U1 into the page"):
        pack(np.array(["a"]))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    hnp.arrays(
        np.float64,
        st.integers(1, 40),
        elements=st.one_of(
            st.floats(1e-30, 1e30), st.sampled_from([0.0, float("nan"), float("inf"), 1e-38, 3e38])
        ),
    )
)
def test_logarithmic_encoding_has_the_stated_precision(values: np.ndarray) -> None:
    back = unpack(pack_log(values))
    regular = np.isfinite(values) & (values > 0)
    assert np.array_equal(back[~regular], values[~regular], equal_nan=True)
    assert (np.abs(back[regular] / values[regular] - 1) <= PRECISION * (1 + 1e-9)).all()


def test_logarithmic_encoding_covers_float64() -> None:
    values = np.array([5e-324, 1e-200, 1.0, 1e200, 1.7e308])
    back = unpack(pack_log(values))
    assert np.allclose(np.log2(back), np.log2(values), atol=0.02)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(0, 1)))
def test_share_encoding_keeps_exact_0_and_1(values: np.ndarray) -> None:
    back = unpack(pack_share(values))
    assert np.array_equal(back == 0, values == 0)
    assert np.array_equal(back == 1, values == 1)
    assert np.abs(back - values).max() <= 1 / 65000


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.text())
def test_text_cannot_end_its_script_element(text: str) -> None:
    written = script_json({"name": text + "</script><!--<img src=x>&amp;"})
    assert not set("<>&") & set(written)
    assert written.isascii()
    assert json.loads(written)["name"].startswith(text)


def test_non_finite_numbers_are_encoded_by_name() -> None:
    assert json.loads(script_json({"a": [float("nan"), float("inf"), -float("inf"), np.float64(1)]})) == {
        "a": ["NaN", "Infinity", "-Infinity", 1.0]
    }
