import pytest
import torch

from backlight.measure.stats.histogram import histogram
from backlight.series import HISTOGRAM_BINS as BINS
from backlight.series import HISTOGRAM_LOWEST as LOWEST

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def bins(tensor, **options):
    """Return the filled bins by exponent."""
    row = histogram([tensor], **options).arrays()[1][0]
    assert row[0] == 1
    return {i + LOWEST: int(n) for i, n in enumerate(row[1:]) if n}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_powers_of_two_are_lower_bin_edges(dtype):
    one = torch.ones(1, dtype=dtype)
    below = torch.nextafter(one, torch.zeros_like(one)) if dtype is not torch.float16 else one - 2**-11
    assert bins(torch.cat((one, -one, below, 2 * one, 4 * one))) == {-1: 1, 0: 2, 1: 1, 2: 1}


def test_outer_bins_include_values_beyond_range():
    last = LOWEST + BINS - 1
    values = [2.0**-41, 1e-45, 1e-38, -(2.0**-149), 2.0**24, 3e38]
    assert bins(torch.tensor(values)) == {LOWEST: 4, last: 2}
    assert bins(torch.tensor([5e-324, 1e-310, 1e308], dtype=torch.float64)) == {LOWEST: 2, last: 1}
    assert bins(torch.tensor([2.0**-24, 2.0**-15], dtype=torch.float16)) == {-24: 1, -15: 1}


def test_rows_without_tensor():
    floats, counts = histogram([None, torch.ones(2), torch.ones(3, device="meta")]).arrays()
    assert floats.shape == (3, 0)
    assert counts[:, 0].tolist() == [0, 1, 0]
    assert counts[:, 1:].sum(1).tolist() == [0, 2, 0]
    assert histogram([]).arrays()[1].shape == (0, 1 + BINS)


def test_every_layout():
    dense = torch.randn(300, 1001)
    expected = bins(dense)
    assert bins(dense.t()) == expected
    assert bins(dense[:, ::2]) == bins(dense[:, ::2].contiguous())
    assert bins(dense[:1].expand(7, -1)) == {k: 7 * n for k, n in bins(dense[0]).items()}
    assert bins(dense.to_sparse()) == expected


def test_complex_values_count_by_magnitude():
    assert bins(torch.tensor([3 + 4j, 0j, 1e200 + 1e200j], dtype=torch.complex128)) == {2: 1, 23: 1}
    assert bins(torch.tensor([1 + 1j])) == {0: 1}


@pytest.mark.parametrize("scale", [2.0**16, torch.tensor(2.0**16)], ids=["float", "tensor"])
def test_values_are_divided_by_scale(scale):
    small = torch.tensor([2.0**-130, 1.0, 2.0**16])
    assert bins(small, scale=scale) == {LOWEST: 1, -16: 1, 0: 1}


def test_integers_are_refused():
    with pytest.raises(TypeError, match=r"got torch\.int32"):
        histogram([torch.ones(2, dtype=torch.int32)])
