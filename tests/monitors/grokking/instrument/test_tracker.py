"""The tracker: exact copies of gradients, products against numpy, resumed sketches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backlight.monitors.grokking.instrument.gradient_history import GradientSketch, GradientWindow
from backlight.monitors.grokking.instrument.probe_batch import ProbedModel
from backlight.monitors.grokking.instrument.tracker import MeasureTracker, stored
from backlight.monitors.grokking.model.measures import TIERS, at_tier, left_out
from backlight.monitors.grokking.settings import Measures
from zoo import BlockAndHead


class MemoryRecorder:
    """A recorder in memory."""

    def __init__(self) -> None:
        self.scalar: dict[tuple[int, str], float] = {}
        self.arrays: dict[tuple[int, str], np.ndarray] = {}
        self.events: list[tuple[int | None, str, Mapping[str, Any]]] = []

    def scalars(self, step: int, values: Mapping[str, float], source: str = "backlight") -> None:
        self.scalar.update({(step, name): value for name, value in values.items()})

    def array(self, name: str, step: int, values: Any, **_described: Any) -> None:
        self.arrays[step, name] = np.asarray(values)

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        self.events.append((step, kind, payload))


def gradients(step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {
        "w": torch.randn(4, 3, generator=draw),
        "b": torch.randn(4, generator=draw),
        "k": torch.randn(2, 3, 2, generator=draw),
    }


def flat(step: int) -> np.ndarray:
    return np.concatenate([g.numpy().reshape(-1) for g in gradients(step).values()]).astype(np.float64)


def follow(tracker: MeasureTracker, steps: range) -> None:
    for step in steps:
        tracker.measure(step, gradients(step).items())


def test_gradients_products_and_window_against_numpy() -> None:
    recorder = MemoryRecorder()
    follow(MeasureTracker(Measures(every=2, products=1, window=1, window_steps=3), recorder), range(10))
    for step in range(0, 10, 2):
        assert np.array_equal(recorder.arrays[step, "gradient/w"], gradients(step)["w"].numpy())
        assert recorder.scalar[step, "gradient/norm"] == pytest.approx(np.linalg.norm(flat(step)))
        G = gradients(step)["k"].numpy().reshape(2, 6).astype(np.float64)
        truth = np.linalg.eigvalsh(G @ G.T)[::-1]
        assert recorder.arrays[step, "product/k/eigenvalues"] == pytest.approx(truth)
        assert recorder.scalar[step, "product/k/trace"] == pytest.approx(truth.sum())
    # Rows of a gradient are not samples of one distribution.
    assert not {n for _, n in recorder.scalar if n.startswith("product/")} & {
        f"product/{parameter}/{metric}" for parameter in "wkb" for metric in ("coherence", "noise_scale")
    }
    assert not any(name.startswith("product/b") for _, name in recorder.arrays)
    A = np.stack([flat(step) for step in (4, 6, 8)])
    assert recorder.arrays[8, "window/matrix"] == pytest.approx(A @ A.T)
    assert recorder.arrays[8, "window/steps"].tolist() == [4, 6, 8]
    assert recorder.scalar[8, "window/trace"] == pytest.approx(np.square(A).sum() / 3)
    mean = A.mean(0)
    assert recorder.scalar[8, "window/coherence"] == pytest.approx(mean @ mean / (np.square(A).sum() / 3))
    assert (8, "window/noise_scale") not in recorder.scalar
    assert (1, "gradient/norm") not in recorder.scalar


def test_sketch_error_is_within_its_certificate() -> None:
    recorder, sketch = MemoryRecorder(), GradientSketch(3)
    for step in range(12):
        sketch.add(gradients(step))
    sketch.record(11, recorder)
    A, B = np.stack([flat(step) for step in range(12)]), recorder.arrays[11, "sketch/model/rows"]
    gap = np.linalg.eigvalsh(A.T @ A - B.T @ B)
    assert gap.min() > -1e-9
    assert 0 < gap.max() <= recorder.scalar[11, "sketch/model/shrinkage"] * (1 + 1e-9)
    with pytest.raises(ValueError, match="parameter 'late' had no gradient when the sketch began"):
        sketch.add({"late": torch.ones(2)})


def test_parameter_without_gradient_counts_as_zero_in_window() -> None:
    window = GradientWindow(3)
    window.add(0, {"a": torch.tensor([1.0, 2.0])})
    window.add(1, {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([3.0])})
    matrix, steps = window.gram()
    assert steps == [0, 1]
    assert matrix.tolist() == [[5.0, 1.0], [1.0, 10.0]]


def test_gradients_keep_their_precision_when_stored() -> None:
    assert stored(torch.zeros(2, dtype=torch.bfloat16), "float32").dtype is torch.bfloat16
    assert stored(torch.zeros(2, dtype=torch.float64), "float32").dtype is torch.float32
    assert stored(torch.zeros(2, dtype=torch.float64), "float64").dtype is torch.float64
    recorder = MemoryRecorder()
    tracker = MeasureTracker(Measures(every=1, window=0), recorder)
    value = torch.tensor([1.0, 1e-30], dtype=torch.bfloat16)
    tracker.gradients(0, [("w", value)])
    tracker.close(0)
    assert recorder.arrays[0, "gradient/w"].dtype == np.uint16
    back = torch.from_numpy(recorder.arrays[0, "gradient/w"]).view(torch.bfloat16)
    assert torch.equal(back, value)


def test_gradient_is_copied_before_it_changes() -> None:
    recorder = MemoryRecorder()
    tracker = MeasureTracker(Measures(every=1), recorder)
    value = torch.ones(3)
    tracker.gradients(0, [("w", value)])
    value.zero_()
    tracker.close(0)
    assert recorder.arrays[0, "gradient/w"].tolist() == [1.0, 1.0, 1.0]


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().sum()


@pytest.mark.parametrize("scope", ["full", "layers"])
def test_probe_records_mean_gram_vectors_and_agop(scope: str) -> None:
    torch.manual_seed(0)
    model, batch, recorder = BlockAndHead().double(), torch.randn(6, 3, dtype=torch.float64), MemoryRecorder()
    probe = ProbedModel(model, squares, batch, lambda given: given)
    measures = Measures(
        every=1, mean_gradient=1, gram=1, vectors=1, top_k=2, agop=1, scope=scope, precision="float64"
    )
    MeasureTracker(measures, recorder, probe).sample(3)
    rows = []
    for i in range(6):
        model.zero_grad()
        squares(model, batch[i : i + 1]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    A = torch.stack(rows).numpy()
    model.zero_grad()
    assert ((3, "gram/model/matrix") in recorder.arrays) == (scope == "full")
    if scope == "full":
        assert recorder.arrays[3, "gram/model/matrix"] == pytest.approx(A @ A.T, rel=1e-10)
        assert (3, "gram/block/block.0/trace") not in recorder.scalar
        H = np.eye(6) - 1 / 6
        truth = np.linalg.eigvalsh(H @ A @ A.T @ H / 6)[::-1]
        assert recorder.arrays[3, "gram/model/centred_eigenvalues"] == pytest.approx(
            truth, abs=1e-12 * truth[0]
        )
    assert (3, "gram/layer/head/effective_rank") in recorder.scalar
    V = recorder.arrays[3, "gram/model/vectors"]
    assert pytest.approx(np.eye(2), abs=1e-9) == V @ V.T
    values = np.linalg.eigvalsh(A @ A.T / 6)[::-1]
    assert np.diag(V @ (A.T @ A / 6) @ V.T) == pytest.approx(values[:2], rel=1e-9)
    means = np.concatenate(
        [recorder.arrays[3, f"mean_gradient/{n}"].reshape(-1) for n, _ in model.named_parameters()]
    )
    assert means == pytest.approx(A.mean(0), rel=1e-9)
    J = torch.autograd.functional.jacobian(lambda x: model(x).sum(0), batch).permute(1, 0, 2).numpy()
    assert recorder.arrays[3, "agop/matrix"] == pytest.approx(np.einsum("nci,ncj->ij", J, J) / 6, rel=1e-9)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_failure_is_recorded_or_raised() -> None:
    model, warnings = BlockAndHead(), list[tuple[str, str]]()
    recorder = MemoryRecorder()
    bad = ProbedModel(model, lambda m, b: m(b).square().mean(), torch.randn(6, 3))
    tracker = MeasureTracker(
        Measures(every=1, gram=1), recorder, bad, warn=lambda *warning: warnings.append(warning)
    )
    tracker.sample(0)
    assert [what for what, _ in warnings] == ["gram"]
    _, kind, payload = recorder.events[0]
    assert (kind, payload["what"], set(payload)) == ("unmeasured", "gram", {"what", "reason"})
    assert not any(name.startswith("gram/") for _, name in recorder.arrays)
    with pytest.raises(ValueError, match="gram"):
        MeasureTracker(Measures(every=1, gram=1), recorder, bad).sample(0)


def test_each_tier_stores_less() -> None:
    full = Measures(sketch=1)
    tiers = [at_tier(full, tier) for tier in TIERS]
    assert tiers[0] == full
    assert (tiers[1].gradients, tiers[1].vectors) == (0, full.vectors)
    assert (tiers[2].vectors, tiers[2].sketch, tiers[2].matrices) == (0, 0, True)
    assert (tiers[3].matrices, tiers[3].spectra, tiers[3].gram) == (False, False, full.gram)
    assert left_out(full, tiers[1]) == ("gradient", "mean_gradient")
    assert left_out(full, tiers[3])[-2:] == ("matrices", "eigenvalues")
    with pytest.raises(ValueError, match="tier 'half': expected one of full factors, top-k, Gram, scalars"):
        at_tier(full, "half")
    recorder = MemoryRecorder()
    follow(MeasureTracker(at_tier(Measures(every=1, products=1, window=1), "scalars"), recorder), range(5))
    assert recorder.arrays == {}
    assert (4, "window/trace") in recorder.scalar


def test_cadences_count_logged_steps() -> None:
    measures = Measures(every=5, gram=3)
    assert [step for step in range(40) if measures.due(measures.gram, step)] == [0, 15, 30]
    assert not any(measures.due(0, step) for step in range(40))
    assert Measures().logged_every(25).every == 25
    assert Measures(every=4).logged_every(25).every == 4
