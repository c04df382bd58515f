"""Grams against torch.func.vmap and, where it is installed, curvlinops' empirical Fisher."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backlight
from backlight.monitors.grokking.instrument.gram.fallback import per_sample
from gram_setups import MODELS


@pytest.mark.parametrize("name", ["mlp", "conv1d", "conv2d", "conv3d", "gpt_tied_padded_reused", "recurrent"])
def test_agrees_with_vmap(name: str) -> None:
    setup = MODELS[name]()
    found = backlight.gram(setup.model, setup.loss, setup.batch, fallback=False)
    parameters = dict(setup.model.named_parameters())
    for parameter, piece, method in per_sample(setup.model, setup.loss, setup.batch, parameters):
        assert method == "vmap"
        expected = piece.values @ piece.values.T
        torch.testing.assert_close(found.per_parameter[parameter], expected, rtol=1e-9, atol=1e-12)


def test_agrees_with_curvlinops() -> None:
    curvlinops = pytest.importorskip("curvlinops")
    setup = MODELS["mlp"]()
    parameters = list(setup.model.parameters())
    loss = nn.CrossEntropyLoss(reduction="sum")
    fisher = curvlinops.EFLinearOperator(setup.model, loss, parameters, [setup.batch])
    dense = fisher @ torch.eye(sum(p.numel() for p in parameters), dtype=torch.float64)
    values = torch.linalg.eigvalsh(torch.as_tensor(dense)).flip(0)[:6] / len(setup.batch[0])
    found = torch.from_numpy(backlight.gram(setup.model, setup.loss, setup.batch).spectrum().eigenvalues)
    torch.testing.assert_close(found, values, rtol=1e-6, atol=0)
