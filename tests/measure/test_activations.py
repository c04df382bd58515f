"""Numbers of outputs against plain torch in fp64, by other algorithms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backlight.measure import activations as measure

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3),
    "sliced": lambda x: x[:, ::2, :, 1:],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
}


def output(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 8, 7, 9).mul(3).relu().sub(0.1).to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sizes_and_extremes_are_those_of_fp64(layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](output(dtype))
    wide = x.double()
    assert measure.norm(x).item() == pytest.approx((wide * wide).sum().sqrt().item(), rel=1e-6)
    low, high = measure.extremes(x)
    by_unit = wide.movedim(1, 0).flatten(1)
    smallest, largest = measure.by_unit(low, high, 0)
    assert smallest.double().tolist() == by_unit.min(1).values.tolist()
    assert largest.double().tolist() == by_unit.max(1).values.tolist()
    differences = (wide[:, None] - wide[None]).abs().max() / wide.abs().max()
    assert measure.spread(low, high).item() == pytest.approx(differences.item(), rel=1e-12)
    y = x.clamp(min=0)
    assert measure.zeros(y).item() == (y == 0).sum().item()


def test_a_norm_of_many_values_is_not_rounded_away() -> None:
    x = torch.full((40_000, 100), 1.1)
    x[0, 0] = 3000.0
    expected = ((4e6 - 1) * x[1, 1].double() ** 2 + 9e6).sqrt()
    assert measure.norm(x).item() == pytest.approx(expected.item(), rel=1e-6)


def test_values_that_are_not_finite_show() -> None:
    x = output()
    x[0, 0, 0, 0] = torch.inf
    assert measure.norm(x).item() == torch.inf
    x[1, 0, 0, 0] = torch.nan
    assert measure.norm(x).isnan()
    assert measure.spread(*measure.extremes(x)).isnan()


@pytest.mark.parametrize("x", [torch.zeros(3, 4), -torch.zeros(3, 4)])
def test_zeros_have_no_spread(x: Tensor) -> None:
    spread = measure.spread(*measure.extremes(x))
    assert str(spread.item()) == "0.0"


@pytest.mark.parametrize(
    ("kind", "values", "share"),
    [
        ("Tanh", [-1.0, -0.99, 0.5, 0.995], 0.5),
        ("Sigmoid", [0.0, 0.005, 0.01, 0.5, 0.999], 0.6),
        ("ReLU6", [0.0, 0.0, 3.0, 6.0], 0.25),
        ("Hardsigmoid", [0.0, 0.5, 1.0, 0.2], 0.5),
    ],
)
def test_saturated_values_are_counted(kind: str, values: list[float], share: float) -> None:
    low, high = measure.INTERVALS[kind]
    x = torch.tensor(values, dtype=torch.float64)
    assert measure.saturated(x, kind, low, high, None).item() == pytest.approx(share)


def test_a_softmax_is_saturated_where_one_probability_is_nearly_one() -> None:
    scores = torch.tensor([[10.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 20.0, 0.0]], dtype=torch.float64)
    assert measure.saturated(scores.softmax(-1), "Softmax", None, None, -1).item() == pytest.approx(2 / 3)
    assert measure.saturated(scores.softmax(0), "Softmax", None, None, 0).item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("shape", [(200, 16), (8, 5, 16), (12, 40), (4, 16, 6, 6)])
def test_effective_rank_is_that_of_the_singular_values(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    unit = 1 if len(shape) == 4 else len(shape) - 1
    x = torch.randn(shape) * torch.logspace(0, -2, shape[unit]).view(-1, *[1] * (len(shape) - 1 - unit)) + 5
    rows = x.double().movedim(unit, -1).flatten(0, -2)
    squares = torch.linalg.svdvals(rows - rows.mean(0)) ** 2
    expected = squares.sum() ** 2 / (squares**2).sum()
    assert measure.effective_rank(x, unit).item() == pytest.approx(expected.item(), rel=1e-9)


def test_effective_rank_of_one_direction_is_one_and_of_none_is_not_measured() -> None:
    x = torch.arange(10.0)[:, None] * torch.ones(4)
    assert measure.effective_rank(x, 1).item() == pytest.approx(1.0)
    assert measure.effective_rank(torch.ones(10, 4), 1).isnan()
