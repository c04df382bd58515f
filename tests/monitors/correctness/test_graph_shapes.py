"""Which views move an axis, and what is replaced to find their lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backlight
from backlight.monitors.correctness.instrument.graph_shapes import moved_size
from faults import silent


@pytest.mark.parametrize(
    ("before", "after", "attends", "size"),
    [
        ((32, 10, 32), (32, 4, 10, 8), False, 10),  # heads by a view
        ((32, 4, 10, 8), (32, 10, 32), False, 10),  # and back
        ((32, 16, 64), (32, 4, 16, 16), False, 16),  # as many positions as features of a head
        ((32, 8, 10), (32, 10, 8), False, 8),  # channels and positions
        ((32, 12, 4, 8), (32, 4, 12, 8), True, 12),
        ((32, 12, 4, 8), (32, 4, 12, 8), False, 0),  # a split of 12 and a merge have the same sizes
        ((8, 64), (64, 8), True, 0),  # samples and heads along one axis: no features are behind them
        ((10, 6, 32), (10, 24, 8), False, 0),
        ((16, 256, 6, 6), (16, 1152, 8), False, 0),  # capsules
        ((20, 96), (2, 10, 96), False, 0),
        ((2, 10, 96), (2, 10, 3, 4, 8), False, 0),
        ((6, 1, 10), (6, 10, 1), False, 0),
        ((0, 4, 5), (0, 5, 4), False, 0),
    ],
)
def test_size_of_the_axis_that_a_view_moves(
    before: tuple[int, ...], after: tuple[int, ...], attends: bool, size: int
) -> None:
    assert moved_size(before, after, attends=attends) == size


@pytest.mark.parametrize("name", ["heads_by_view", "state_detached_at_each_step"])
def test_methods_are_those_of_torch_afterwards(name: str, tmp_path: Path) -> None:
    forwards = {layer: layer.forward for layer in (nn.GRU, nn.GRUCell, nn.MultiheadAttention)}
    with backlight.watch(run=tmp_path, monitors=("correctness",), quiet=True):
        silent.FAULTS[name].train(True)
    assert not {"view", "reshape", "flatten"} & set(vars(torch.Tensor))
    assert {layer: layer.forward for layer in forwards} == forwards
