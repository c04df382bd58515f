"""Properties of any tensor: scaling, order, splitting, mixing, against float64 without torch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backlight.measure.stats.histogram import histogram
from backlight.measure.stats.kernels import root_sum_squares
from backlight.measure.stats.statistics import statistics
from backlight.series import HISTOGRAM_BINS

pytestmark = pytest.mark.slow

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
EXTREME = st.one_of(
    st.sampled_from([0.0, -0.0, 1e20, -1e20, 1e-30, -1e-30, 3e38, 1e-45, 1.0]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
ANY = st.one_of(EXTREME, st.sampled_from([math.nan, math.inf, -math.inf]))


def numbers(tensors, **options):
    return statistics(tensors, tier="eager", **options).arrays()


@SETTINGS
@given(lists=st.lists(st.lists(ANY, max_size=40), max_size=6))
def test_any_values_against_oracle(lists, check):
    tensors = [torch.tensor(values, dtype=torch.float32) for values in lists]
    check(statistics(tensors, tier="eager"), tensors)


@SETTINGS
@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40))
def test_any_doubles_against_oracle(values, check):
    finite = [v for v in values if math.isfinite(v)]
    if finite and max(map(abs, finite)) > 1e304:
        values = [v / 1e6 for v in values]  # a norm above 1.8e308 is infinite in float64
    tensors = [torch.tensor(values, dtype=torch.float64)]
    check(statistics(tensors), tensors)


@SETTINGS
@given(st.lists(EXTREME, min_size=1, max_size=30), st.integers(-60, 60))
def test_scaling_by_power_of_two_scales_every_number_exactly(values, exponent):
    tensor = torch.tensor(values, dtype=torch.float32).double()
    before, after = numbers([tensor]), numbers([tensor * 2.0**exponent])
    np.testing.assert_array_equal(after[0], before[0] * 2.0**exponent)
    np.testing.assert_array_equal(after[1], before[1])


@SETTINGS
@given(st.lists(ANY, max_size=60), st.randoms(use_true_random=False))
def test_order_of_values_does_not_matter(values, random):
    shuffled = values.copy()
    random.shuffle(shuffled)
    one, other = (numbers([torch.tensor(v, dtype=torch.float32)]) for v in (values, shuffled))
    np.testing.assert_array_equal(one[1], other[1])
    np.testing.assert_array_equal(one[0][:, 1], other[0][:, 1])
    np.testing.assert_allclose(one[0][:, 0], other[0][:, 0], rtol=1e-14)


@SETTINGS
@given(st.lists(ANY, max_size=60), st.integers(0, 60))
def test_tensor_is_sum_of_its_parts(values, cut):
    whole = torch.tensor(values, dtype=torch.float32)
    (floats, counts), (parts, part_counts) = numbers([whole]), numbers([whole[:cut], whole[cut:]])
    np.testing.assert_array_equal(part_counts[:, 1:].sum(0), counts[0, 1:])
    np.testing.assert_allclose(root_sum_squares(parts[:, 0]), floats[0, 0], rtol=1e-14)
    np.testing.assert_array_equal(parts[:, 1].max(), floats[0, 1])


@SETTINGS
@given(st.lists(st.tuples(DTYPES, st.integers(0, 400)), max_size=8))
def test_mixed_types_are_measured_as_each_alone(kinds):
    tensors = [torch.randn(size, dtype=torch.float64).to(dtype) for dtype, size in kinds]
    together = numbers(tensors)
    for row, tensor in enumerate(tensors):
        alone = numbers([tensor])
        np.testing.assert_array_equal(together[0][row], alone[0][0])
        np.testing.assert_array_equal(together[1][row], alone[1][0])


@pytest.mark.parametrize("path", ["host", "device"])
def test_huge_and_tiny_lists_of_mixed_types(path, check, request):
    if path == "device":
        request.getfixturevalue("as_device")
    tensors = [
        None if size == 4 else torch.randn(size, dtype=torch.float64).to(dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for size in (0, 1, 255, 256, 257, 4, 131_071, 131_072, 131_073, 270_000)
    ]
    check(statistics(tensors, tier="eager"), tensors)


@SETTINGS
@given(st.lists(ANY, max_size=60))
def test_histogram_holds_every_finite_value_but_zero(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    counts = histogram([tensor]).arrays()[1]
    expected = np.zeros(HISTOGRAM_BINS, dtype=np.int64)
    for value in tensor.tolist():
        if value and math.isfinite(value):
            expected[min(max(math.frexp(value)[1] - 1 + 40, 0), HISTOGRAM_BINS - 1)] += 1
    assert counts[0].tolist() == [1, *expected]
