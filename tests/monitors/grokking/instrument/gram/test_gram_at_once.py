"""Grams whose samples go through the model a few at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backlight
from backlight.measure.gram.factors import LookupFactors, MatrixFactors, VectorFactors, compress, concatenate
from backlight.monitors.grokking.instrument.gram.checks import GramError
from gram_setups import MODELS, N, images, labels


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_all_at_once(name: str, at_once: int) -> None:
    setup = MODELS[name]()
    whole = backlight.gram(setup.model, setup.loss, setup.batch)
    found = backlight.gram(setup.model, setup.loss, setup.batch, at_once=at_once)
    assert list(found.per_parameter) == list(whole.per_parameter)
    for parameter, K in whole.per_parameter.items():
        got = found.per_parameter[parameter]
        assert float((got - K).norm()) <= 1e-10 * float(K.norm()) + 1e-25
        mean, expected = found.mean_gradient[parameter], whole.mean_gradient[parameter]
        assert (mean is None) == (expected is None)
        if mean is not None and expected is not None:
            assert float((mean - expected).norm()) <= 1e-9 * float(expected.norm()) + 1e-15
    methods = {check.method for check in found.coverage.values()}
    assert ("vmap" in methods) <= ("vmap" in {check.method for check in whole.coverage.values()})
    assert all(check.holds for check in found.coverage.values())


@pytest.mark.parametrize("name", ["mlp", "gpt_tied_padded_reused", "conv2d", "bare_parameters"])
def test_eigenvectors_are_taken_a_few_samples_at_a_time(name: str) -> None:
    setup = MODELS[name]()
    expected, vectors = backlight.gram(setup.model, setup.loss, setup.batch).eigenvectors(2)
    values, found = backlight.gram(setup.model, setup.loss, setup.batch, at_once=4).eigenvectors(2)
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=0)
    a = torch.cat([part.flatten(1) for part in found.values()], 1)
    b = torch.cat([part.flatten(1) for part in vectors.values()], 1)
    torch.testing.assert_close((a @ b.T).diagonal().abs(), torch.ones(2, dtype=a.dtype), rtol=0, atol=1e-8)


def test_no_pass_takes_more_samples_than_requested() -> None:
    sizes: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[0]))
        return labels(model, batch)

    net = nn.Sequential(nn.Linear(7, 3)).double()
    found = backlight.gram(net, loss, images(7), at_once=4)
    assert sizes == [4, N - 4, 2]  # and two samples alone
    assert found.matrix.shape == (N, N)


def test_dropout_draws_for_each_pass_and_again_for_eigenvectors() -> None:
    net = nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.5), nn.Linear(9, 3)).double()
    found = backlight.gram(net, labels, images(7), at_once=4)
    values, _ = found.eigenvectors(2)
    assert len(values) == 2  # taken with other masks they would not be orthonormal, which is an error
    assert found.coverage["0.weight"].alone is None


def test_mixing_within_a_pass_is_detected() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            out = self.lin(x)
            return out - out.mean(0)

    with pytest.raises(GramError, match="independent along the first dimension"):
        backlight.gram(Mixing().double(), labels, images(7), at_once=4)


def test_a_parameter_that_only_some_passes_use_falls_back() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(7, 3), nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(x) if len(x) == 1 else self.first(x)

    batch = images(7)
    with pytest.raises(GramError, match=r"'first.weight'.*used by every sample"):
        backlight.gram(
            Routed().double(), labels, tuple(part[:5] for part in batch), at_once=4, fallback=False
        )


def test_no_sample_at_once_is_refused() -> None:
    with pytest.raises(GramError, match="at_once must be at least 1, got 0"):
        backlight.gram(nn.Sequential(nn.Linear(7, 3)).double(), labels, images(7), at_once=0)


def test_factors_are_kept_in_the_smallest_form() -> None:
    def piece(t: int, i: int, o: int) -> MatrixFactors:
        x, d = torch.randn(4, t, 1, i), torch.randn(4, t, 1, o)
        return MatrixFactors(d, lambda a, b: x[a:b], lambda: x.norm(dim=-1), i, held=True)

    short, long = piece(2, 8, 8), piece(9, 8, 8)
    assert compress([short])[0] is short
    (made,) = compress([long])
    assert isinstance(made, VectorFactors)
    assert (made.rows, made.columns) == (8, 8)
    G = torch.einsum("nto,nti->noi", long.delta[:, :, 0], long.all_inputs()[:, :, 0])
    torch.testing.assert_close(made.values.view(4, 8, 8), G)
    assert made.size() == pytest.approx(long.size(), rel=1e-5)
    (both,) = concatenate([[made], [made]])
    assert isinstance(both, VectorFactors)
    assert both.samples == 8
    assert both.size() == pytest.approx(2**0.5 * made.size(), rel=1e-5)


def test_parts_that_differ_are_refused() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    a = LookupFactors(ids, torch.zeros(2, 3, 4), 9)
    with pytest.raises(ValueError, match="used differently by different samples"):
        concatenate([[a], [a, a]])
    with pytest.raises(ValueError, match="different numbers of positions"):
        concatenate([[a], [LookupFactors(ids[:, :2], a.delta[:, :2], 9)]])
