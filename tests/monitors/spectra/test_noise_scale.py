"""The noise scale from the training run's own backward pass, against one backward per sample in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import backlight
from backlight.measure.noise_scale import NoiseScale, noise_scale
from backlight.monitors.spectra.instrument import microbatch_noise
from backlight.monitors.spectra.noise_scale_monitor import NoiseScaleMonitor, next_due
from backlight.monitors.spectra.panels import noise_scale_of_steps
from backlight.monitors.spectra.settings import SpectraSettings
from backlight.report.panel import Drawn, NotMeasured
from backlight.report.source import Source
from backlight.session.settings import Settings
from cases import CASES, assert_equal
from zoo import NormedMlp, TiedEmbedding

N = 6


class Cnn(nn.Module):
    """Convolution, norm, in-place activations and a head, [N, 2, 5, 5] to [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten()
        )
        self.head = nn.Linear(100, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Attention(nn.Module):
    """One block of attention over 5 tokens, with positions that all samples share, [N, 5] to [N, 5, 9]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 8), nn.Embedding(5, 8)
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        q, k, v = self.qkv(self.norm(h)).chunk(3, dim=-1)
        return self.head(h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class WithBatchNorm(nn.Module):
    """A linear layer and a batch norm, [N, 4] to [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


class BareWeight(nn.Module):
    """A linear layer and a product with a parameter that belongs to no known layer, [N, 4] to [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.W = nn.Linear(4, 5), nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) @ self.W


class UsedTwice(nn.Module):
    """A linear layer whose weight is also used outside of it, [N, 4] to [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) @ self.first.weight)


class Checkpointed(nn.Module):
    """A checkpointed linear layer and a head, [N, 4] to [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(checkpoint(self.inner, x, use_reentrant=False)))


def inputs(kind: str, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    if kind == "ids":
        ids = torch.randint(0, 9, (n, 5), generator=generator)
        return ids, ids.roll(-1, 1)
    shape = (n, 2, 5, 5) if kind == "images" else (n, 4)
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (n,), generator=generator),
    )


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def sum_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


Loss = Callable[[Tensor, Tensor], Tensor]


def truth(model: nn.Module, x: Tensor, y: Tensor, names: list[str], size: int = 1) -> NoiseScale:
    """Return the noise scale of some parameters by one backward per sample, or per ``size`` samples."""
    rows = []
    for n in range(0, len(x), size):
        model.zero_grad()
        mean_loss(model(x[n : n + size]), y[n : n + size]).backward()
        found = dict(model.named_parameters())
        rows.append(torch.cat([found[name].grad.flatten() for name in names]))
    G = torch.stack(rows).numpy()
    return noise_scale((G**2).sum(1), G @ G.sum(0), size)


def watched(model: nn.Module, x: Any, y: Tensor, path: Path, loss: Loss = mean_loss, steps: int = 1) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(
        model, optimizer, run=path, spectra={"noise_scale": 1}, monitors="health", summary=False
    ):
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return backlight.open_run(path)


def recorded(run: Any, suffix: str = "") -> tuple[float, float, float]:
    names = ("noise_scale", "noise_scale_low", "noise_scale_high")
    value, low, high = (float(run.scalar(f"{name}{suffix}").values[0]) for name in names)
    return value, low, high


def reasons(run: Any) -> list[str]:
    events = run.events("unmeasured")
    return [event.payload["reason"] for event in events if event.payload["what"] == "noise scale"]


@pytest.mark.slow
@pytest.mark.parametrize("loss", [mean_loss, sum_loss], ids=["mean", "sum"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [(NormedMlp, "rows"), (Cnn, "images"), (Attention, "ids")],
    ids=["mlp", "cnn", "attention"],
)
def test_equals_one_backward_per_sample(
    make: Callable[[], nn.Module], kind: str, loss: Loss, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make().double()
    x, y = inputs(kind)
    oracle = copy.deepcopy(model)
    run = watched(model, x, y, tmp_path / "run", loss)
    payload = run.events("noise_scale")[0].payload
    left_out = {one["parameter"] for one in payload["unmeasured"]}
    assert left_out == ({"positions.weight"} if make is Attention else set())
    names = [name for name, _ in oracle.named_parameters() if name not in left_out]
    expected = truth(oracle, x, y, names)
    assert recorded(run) == pytest.approx((expected.value, *expected.interval), rel=1e-6)
    assert set(payload["shares"]) == {name.rpartition(".")[0] for name in names}
    for layer in payload["shares"]:
        own = truth(oracle, x, y, [name for name in names if name.rpartition(".")[0] == layer])
        assert recorded(run, f"/{layer}") == pytest.approx((own.value, *own.interval), rel=1e-6)
    shares = sum(payload["shares"].values()) + sum(one["share"] for one in payload["unmeasured"])
    assert shares == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "kind"), [(NormedMlp, "rows"), (Cnn, "images")], ids=["mlp", "cnn"])
def test_large_microbatch_is_measured_in_groups(
    make: Callable[[], nn.Module], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microbatch_noise, "MOST_GRADIENTS", 10)
    torch.manual_seed(0)
    model = make().double()
    x, y = inputs(kind, 24)
    expected = truth(copy.deepcopy(model), x, y, [name for name, _ in model.named_parameters()], size=3)
    run = watched(model, x, y, tmp_path / "run")
    assert recorded(run) == pytest.approx((expected.value, *expected.interval), rel=1e-6)
    assert run.scalar("noise_scale_samples").values.tolist() == [24]


def test_large_prime_microbatch_is_refused() -> None:
    assert microbatch_noise.groups_of(4096) == 512
    assert microbatch_noise.groups_of(500) == 500
    assert "521 samples cannot be divided" in microbatch_noise.refused(nn.Linear(2, 2), 521)


@pytest.mark.slow
def test_linear_regression_has_the_closed_form(tmp_path: Path) -> None:
    """At w, x of N(0, I) and a truth of 0: tr Sigma = (d + 1) |w|^2 + d s^2 and |G|^2 = |w|^2."""
    d, n, noise = 4, 4096, 0.5
    generator = torch.Generator().manual_seed(3)
    model = nn.Linear(d, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.5, 0.5, 0.5]]))  # the truth is 0
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = noise * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    run = watched(model, x, y, tmp_path / "run", lambda out, to: 0.5 * F.mse_loss(out, to))
    value, low, high = recorded(run)
    expected = (d + 1) + d * noise**2  # divided by |w|^2 = 1
    assert low < expected < high
    assert value == pytest.approx(expected, rel=0.15)


@pytest.mark.slow
def test_first_microbatch_of_an_accumulation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = NormedMlp().double()
    oracle = copy.deepcopy(model)
    x, y = inputs("rows", 2 * N)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=tmp_path / "run", spectra={"noise_scale": 1}, summary=False):
        for part in range(2):
            (mean_loss(model(x[part * N : part * N + N]), y[part * N : part * N + N]) / 2).backward()
        optimizer.step()
    expected = truth(oracle, x[:N], y[:N], [name for name, _ in oracle.named_parameters()])
    assert recorded(backlight.open_run(tmp_path / "run"))[0] == pytest.approx(expected.value, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "parameter", "reason"),
    [
        (BareWeight, "W", "no layer that backlight knows uses it"),
        (UsedTwice, "first.weight", "do not add up to its gradient"),
        (Checkpointed, "inner.weight", "checkpointed region"),
    ],
)
def test_unmeasured_parameter_is_named(
    make: Callable[[], nn.Module], parameter: str, reason: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    run = watched(make().double(), *inputs("rows"), tmp_path / "run")
    payload = run.events("noise_scale")[0].payload
    found = {one["parameter"]: one for one in payload["unmeasured"]}
    assert reason in found[parameter]["reason"]
    assert 0 < found[parameter]["share"] < 1
    assert payload["covered"] == pytest.approx(1 - sum(one["share"] for one in found.values()))


def two_forwards(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mean_loss(model(x), y) + mean_loss(model(x.flip(0)), y)


def penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = mean_loss(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "kind", "n", "loss", "reason"),
    [
        (WithBatchNorm, "rows", N, None, "BatchNorm1d in training mode"),
        (NormedMlp, "rows", 1, None, "called with 1 samples"),
        (Attention, "ids", 5, None, "another dimension of 5"),
        (NormedMlp, "rows", N, two_forwards, "several forward passes"),
        (NormedMlp, "rows", N, penalty, "gradient penalty"),
    ],
    ids=["batch_norm", "one_sample", "ambiguous", "two_forwards", "gradient_penalty"],
)
def test_refused_step_has_a_reason(
    make: Callable[[], nn.Module], kind: str, n: int, loss: Any, reason: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make().double()
    x, y = inputs(kind, n)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = backlight.watch(model, optimizer, run=tmp_path / "run", spectra={"noise_scale": 1}, summary=False)
    with pytest.warns(RuntimeWarning, match=reason), watch:
        (loss(model, x, y) if loss else mean_loss(model(x), y)).backward()
        optimizer.step()
    run = backlight.open_run(tmp_path / "run")
    assert len(reasons(run)) == 1
    assert reason in reasons(run)[0]
    assert "noise_scale" not in run.scalar_names()


QUICK = {
    "plain", "accumulation", "tied", "in_place_edit_of_output", "checkpointing", "scaler", "lbfgs",
    "copied_and_saved", "compiled", "exception_in_backward", "functional_gradients",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in CASES],
)
def test_training_is_unchanged(name: str, tmp_path: Path) -> None:
    alone = CASES[name].train()
    random = torch.get_rng_state()
    with backlight.watch(run=tmp_path / "run", spectra={"noise_scale": 1}, quiet=True):
        found = CASES[name].train()
    assert_equal(alone, found)
    assert torch.equal(random, torch.get_rng_state())
    assert "__call__" not in vars(nn.Linear)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_rounding_leaves_no_parameter_out(dtype: torch.dtype | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Cnn()
    x, y = inputs("images", 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        run = watched(model, x.float(), y, tmp_path / "run", steps=4)
    assert [event.payload["unmeasured"] for event in run.events("noise_scale")] == [[]] * 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_graph_of_the_gradient_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = NormedMlp().double()
    x, y = inputs("rows")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    oracle = copy.deepcopy(model)
    with backlight.watch(model, optimizer, run=tmp_path / "run", spectra={"noise_scale": 1}, summary=False):
        mean_loss(model(x), y).backward(create_graph=True)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    expected = truth(oracle, x, y, [name for name, _ in oracle.named_parameters()])
    assert recorded(backlight.open_run(tmp_path / "run"))[0] == pytest.approx(expected.value, rel=1e-6)


def test_cadence_grows() -> None:
    steps = [0]
    while steps[-1] < 10_000:
        steps.append(next_due(steps[-1], 0))
    assert steps[:10] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert np.diff([s for s in steps if 2048 <= s <= 4096]).tolist() == [128] * 16
    assert 4096 in steps
    assert 8192 in steps
    assert [next_due(step, 7) for step in (0, 6, 7)] == [7, 7, 14]


def test_is_no_default(tmp_path: Path) -> None:
    assert SpectraSettings.of(Settings()).noise_scale is None
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="noise_scale: -1: expected 0 or more"):
        backlight.watch(NormedMlp(), run=tmp_path / "run", spectra={"noise_scale": -1})


@pytest.mark.slow
def test_panel(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = inputs("rows")
    source = Source(watched(BareWeight().double(), x, y, tmp_path / "run", steps=3))
    drawn = noise_scale_of_steps(source)
    assert isinstance(drawn, Drawn)
    model, layers = drawn.data["charts"]
    assert [len(model["lines"]), len(layers["lines"])] == [3, 1]
    assert "W is not measured" in drawn.remarks[0]
    refused = Source(watched(NormedMlp().double(), x[:1], y[:1], tmp_path / "refused"))
    found = noise_scale_of_steps(refused)
    assert isinstance(found, NotMeasured)
    assert "called with 1 samples" in found.reason


@pytest.mark.slow
def test_several_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoiseScaleMonitor, "attach", attach_as_one_of_two)
    run = watched(NormedMlp().double(), *inputs("rows"), tmp_path / "run")
    assert "2 ranks" in reasons(run)[0]
    assert "noise_scale" not in run.scalar_names()


def attach_as_one_of_two(monitor: NoiseScaleMonitor, run: Any) -> None:
    run.world_size = 2
    ATTACH(monitor, run)


ATTACH = NoiseScaleMonitor.attach


def test_tied_weights_are_measured_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = inputs("rows")
    run = watched(TiedEmbedding().double(), x, y, tmp_path / "run")
    assert run.events("noise_scale")[0].payload["unmeasured"] == []
