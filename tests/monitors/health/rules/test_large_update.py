from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def train(recorder: Any, rate: float, zero: bool = False, steps: int = 80) -> Any:
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
    if zero:
        nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    rec = recorder(model, optimizer)
    for _ in range(steps):
        x = torch.randn(32, 10)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        rec.advance(loss.detach(), optimizer)
    return rec.close()


def test_a_learning_rate_far_too_high_is_found_and_its_twins_are_not(recorder: Any, judged: Any) -> None:
    (finding,) = judged(train(recorder, 5.0), "large_update")
    assert finding.subject.parameter in {"0.weight", "2.weight"}
    assert finding.subject.step == 0
    assert finding.evidence[0].path.startswith("series/update/ratio/")
    assert not judged(train(recorder, 1e-3), "large_update")
    assert not judged(train(recorder, 1e-3, zero=True), "large_update")
    assert not judged(train(recorder, 1e-3, zero=True, steps=200), "large_update")


def test_only_what_lasts_beyond_the_start_counts(synthetic: Any, judged: Any) -> None:
    rms = {"a": [1e-3] * 80, "b": [1e-3] * 80}
    steps = np.arange(80)
    assert judged(synthetic(rms, update={"a": [0.2] * 80}), "large_update")
    for ratio in (
        1.0 / (steps + 1),
        np.where(steps % 5, 0.2, 0.01),
        np.full(80, 0.05),
        np.where(steps > 70, 0.5, 0.01),
    ):
        assert not judged(synthetic(rms, update={"a": ratio}), "large_update")
    short = {"a": [1e-3] * 49}
    assert not judged(synthetic(short, update={"a": [0.2] * 49}), "large_update")


def test_weights_that_start_at_zero_have_longer(synthetic: Any, judged: Any) -> None:
    def grown(steps: int, start: float) -> Any:
        rms = {"a": [1e-3] * steps}
        return synthetic(rms, update={"a": [0.2] * steps}, weight=[start] + [1.0] * (steps - 1))

    assert judged(grown(80, 1e-2), "large_update")
    assert not judged(grown(80, 0.0), "large_update")
    assert judged(grown(160, 0.0), "large_update")


def test_vectors_are_left_out(synthetic: Any, judged: Any) -> None:
    from backlight.records import ParameterRecord

    bias = ParameterRecord("bias", (8,), "float32", "cpu", 8, group="0/0")
    run = synthetic({"bias": [1e-3] * 80}, records={"bias": bias}, update={"bias": [0.5] * 80})
    assert not judged(run, "large_update")
