from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backlight.records import Severity


def stack(
    factor: float, blocks: int = 12, scatter: float = 0.1, steps: int = 20, name: str = "blocks.{}.mlp.weight"
) -> Any:
    random = np.random.default_rng(0)
    each = factor ** (blocks - 1.0 - np.arange(blocks)) * random.lognormal(0, scatter, blocks)
    return {name.format(i): 1e-2 * each[i] * random.lognormal(0, 0.2, steps) for i in range(blocks)}


def test_injected_slope_is_found_with_its_factor(synthetic: Any, evaluated: Any) -> None:
    (finding,) = evaluated(synthetic(stack(0.4, scatter=0.0)), "depth_slope")
    assert finding.subject.parameter == "blocks.0.mlp.weight"
    first, last = finding.evidence[0].value, finding.evidence[-1].value
    assert (last / first) ** (1 / 11) == pytest.approx(2.5, rel=0.03)
    assert finding.evidence[0].path == "series/gradient/rms/blocks.0.mlp.weight"


def test_several_stacks_are_one_finding(synthetic: Any, evaluated: Any) -> None:
    rms = stack(0.4) | stack(0.5, name="blocks.{}.attn.weight") | stack(1.0, name="blocks.{}.gate.weight")
    (finding,) = evaluated(synthetic(rms), "depth_slope")
    assert finding.severity is Severity.WARNING


def test_finding_names_the_block_with_the_smallest_gradient(synthetic: Any, evaluated: Any) -> None:
    rms = dict(zip("abcdefghijkl", stack(0.4).values(), strict=True))  # no numbers: model order
    for series, smallest in ((rms, "a"), (stack(2.0), "blocks.11.mlp.weight")):
        (finding,) = evaluated(synthetic(series), "depth_slope")
        assert finding.subject.parameter == smallest


def test_healthy_stack_has_no_finding(synthetic: Any, evaluated: Any) -> None:
    flat, steep = stack(1.0, steps=40), stack(0.3, steps=40)
    for rms in (
        stack(1.0),
        stack(0.85),  # 6 over 12 blocks, as residual networks show
        stack(0.4, blocks=5),
        stack(1.0, scatter=3.0),  # unequal, but not geometric
        stack(0.4, steps=9),
        stack(0.4, scatter=3.5),  # steep, but no line
        {f"w{i}": [1e-2 * 10.0 ** (-6 * (i == 0))] * 20 for i in range(12)},  # one outlier is no slope
        # A slope that the first 17 of 40 steps do not show.
        {name: np.concatenate([flat[name][:17], steep[name][17:]]) for name in flat},
    ):
        assert not evaluated(synthetic(rms), "depth_slope")


def train(recorder: Any, activation: Callable[[], nn.Module], gain: float) -> Any:
    layers: list[nn.Module] = []
    for _ in range(14):
        layers += [nn.Linear(24, 24), activation()]
    model = nn.Sequential(*layers, nn.Linear(24, 3))
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=gain / 24**0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return recorder(model, optimizer).classify(optimizer, 20, inputs=24)


def test_trained_stacks_are_found_and_their_controls_are_not(recorder: Any, evaluated: Any) -> None:
    (shrinking,) = evaluated(train(recorder, nn.Sigmoid, 1.0), "depth_slope")
    assert shrinking.subject.parameter == "0.weight"
    (growing,) = evaluated(train(recorder, nn.Hardtanh, 5.0), "depth_slope")
    assert growing.subject.parameter != "0.weight"
    assert not evaluated(train(recorder, nn.ReLU, 2**0.5), "depth_slope")
    assert not evaluated(train(recorder, nn.Tanh, 1.0), "depth_slope")
