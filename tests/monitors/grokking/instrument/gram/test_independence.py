"""Independence of samples: what is misread, mixed or averaged is measured correctly or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backlight
from backlight.monitors.grokking.instrument.gram import independence
from backlight.monitors.grokking.instrument.gram.checks import GramError

N = 6
Losses = Callable[[nn.Module, Any], Tensor]


def entropies(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def of_tokens(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return (
        F.cross_entropy(out.flatten(0, 1), batch[1].flatten(), reduction="none").view(batch[0].shape).sum(1)
    )


def labelled(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(N, *shape, dtype=torch.float64), torch.randint(0, 3, (N,))


def text(positions: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 11, (N, positions + 1))
    return ids[:, :-1], ids[:, 1:]


class NanoGPT(nn.Module):
    """Looks positions up once for all samples, as the published one does."""

    def __init__(self, positions: int, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(11, 8), nn.Embedding(positions, 8), nn.Dropout(dropout)
        self.ln, self.fc, self.head = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])))
        return self.head(h + self.drop(F.gelu(self.fc(self.ln(h)))))


class TimeMajor(nn.Module):
    """Reads ``[T, N, d]``."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(5, 6), nn.Dropout(dropout), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.a(x.transpose(0, 1))))).mean(0)


class Siamese(nn.Module):
    """Encodes anchors and positives one after the other."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        anchor, positive = self.enc(torch.cat([x[:, 0], x[:, 1]])).chunk(2)
        return (anchor - positive).square().sum(1)


class HandWrittenBatchNorm(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(5, 6), nn.Dropout(dropout), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(self.drop((h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-3).sqrt()))


class Experts(nn.Module):
    """Sends each token to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(5, 2), nn.Linear(5, 3)
        self.experts = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            at = chosen == number
            if at.any():
                out[at] = expert(flat[at]) * weight[at, None]
        return self.head(out.view(x.shape)).mean(1)


def averaged(model: nn.Module, batch: Any) -> Tensor:
    return entropies(model, batch) / len(batch[0])


Case = tuple[Callable[[float], nn.Module], Losses, Callable[[], Any]]
RIGHT: dict[str, Case] = {
    "positions_twice_the_samples": (lambda p: NanoGPT(2 * N, p), of_tokens, lambda: text(2 * N)),
    "positions_as_many_as_samples": (lambda p: NanoGPT(N, p), of_tokens, lambda: text(N)),
    "time_major": (TimeMajor, entropies, lambda: labelled(N, 5)),
    "experts": (lambda p: Experts(), entropies, lambda: labelled(3, 5)),
}
SIAMESE: Case = (Siamese, lambda model, batch: model(batch[0]), lambda: labelled(2, 5))
REFUSED: dict[str, tuple[Case, str]] = {
    "siamese": (SIAMESE, "draws random numbers"),
    "batch_norm": (
        (HandWrittenBatchNorm, entropies, lambda: labelled(5)),
        "independent along the first|samples are coupled in the forward of the model",
    ),
    "mean": (
        (
            lambda p: nn.Sequential(nn.Linear(5, 6), nn.Dropout(p), nn.Linear(6, 3)),
            averaged,
            lambda: labelled(5),
        ),
        "looks like a mean over [26] samples",
    ),
}


def true_gram(model: nn.Module, losses: Losses, batch: Any, at_once: int | None) -> Tensor:
    """Return K by one backward for each sample of the same forward passes, with the same dropout."""
    parameters, rows = list(model.parameters()), []
    for part in torch.arange(N).split(at_once or N):
        for loss in losses(model, tuple(x[part] for x in batch)):
            found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            full = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
            rows.append(torch.cat([g.flatten() for g in full]).double())
    A = torch.stack(rows)
    return A @ A.T


def built(case: Case, dropout: float, dtype: torch.dtype) -> tuple[nn.Module, Losses, Any]:
    build, losses, batch = case
    torch.manual_seed(3)
    model, made = build(dropout).to(dtype), batch()
    return model, losses, tuple(x.to(dtype) if x.is_floating_point() else x for x in made)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [None, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_layouts_are_read_correctly(
    name: str, dtype: torch.dtype, dropout: float, at_once: int | None
) -> None:
    model, losses, batch = built(RIGHT[name], dropout, dtype)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, batch).sum()

    for _ in range(4):  # checked at 1, 2 and 4
        torch.manual_seed(5)
        found = backlight.gram(model, loss, batch, at_once=at_once)
        torch.manual_seed(5)
        expected = true_gram(model, losses, batch, at_once)
        assert relative(found.matrix, expected) < (1e-10 if dtype == torch.float64 else 1e-5)
        assert not found.unchecked


@pytest.mark.parametrize("at_once", [None, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_a_sum_over_samples_is_refused(
    name: str, dtype: torch.dtype, dropout: float, at_once: int | None
) -> None:
    case, message = REFUSED[name]
    model, losses, batch = built(case, dropout, dtype)
    if name == "siamese" and not dropout:  # measured one by one
        found = backlight.gram(model, lambda m, b: losses(m, b).sum(), batch, at_once=at_once)
        assert relative(found.matrix, true_gram(model, losses, batch, None)) < 1e-5
        return
    with pytest.raises(GramError, match=message):
        backlight.gram(model, lambda m, b: losses(m, b).sum(), batch, at_once=at_once)


@pytest.mark.slow
def test_routing_by_data_is_checked_every_time() -> None:
    model, losses, _ = built(RIGHT["experts"], 0.0, torch.float64)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, batch).sum()

    for _ in range(7):
        batch = labelled(3, 5)
        found = backlight.gram(model, loss, batch)
        assert all(check.holds for check in found.coverage.values())
        assert relative(found.matrix, true_gram(model, losses, batch, None)) < 1e-10


class Noisy(nn.Module):
    """Draws in evaluation as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(F.dropout(x, 0.5))


def test_what_cannot_be_checked_is_reported() -> None:
    batch = tuple(x.float() if x.is_floating_point() else x for x in labelled(5))
    found = backlight.gram(Noisy(), lambda m, b: entropies(m, b).sum(), batch)
    assert found.unchecked == "the forward pass draws random numbers in evaluation mode as well"
    assert all(check.independence is None for check in found.coverage.values())


@pytest.mark.slow
def test_samples_learned_by_heart_pass_in_float32() -> None:
    """Their gradients nearly vanish, and rounding is a large share of what is left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3))
    batch = tuple(x.float() if x.is_floating_point() else x for x in labelled(5))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(400):
        optimizer.zero_grad()
        entropies(model, batch).sum().backward()
        optimizer.step()
    assert float(entropies(model, batch).detach().max()) < 1e-2
    found = backlight.gram(model, lambda m, b: entropies(m, b).sum(), batch)
    assert {check.method for check in found.coverage.values()} <= {"ghost", "chunked", "vectors"}
    assert all(check.holds for check in found.coverage.values())


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_that_add_up_over_long_sequences(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding is relative to their sum, so that they are not compared again in float64."""
    precise = []
    again = independence.Independence._again
    monkeypatch.setattr(
        independence.Independence, "_again", lambda *a: precise.append(again(*a)) or precise[-1]
    )
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    batch = (1 + 0.1 * torch.randn(N, 1024, 16),)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        (x,) = batch
        return (model(x + 0.1 * x.amax(0) if mixed else x) - 10).square().sum()

    if mixed:
        with pytest.raises(GramError, match="samples do not seem to be independent"):
            backlight.gram(model, loss, batch)
        return
    found = backlight.gram(model, loss, batch)
    assert all(check.independence is not None for check in found.coverage.values())
    assert not precise


def test_measurement_between_checks_computes_mean_gradient_on_request() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    batch = labelled(5)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return entropies(model, batch).sum()

    checked, _, between = (backlight.gram(model, loss, batch) for _ in range(3))
    assert [one.coverage["0.weight"].holds for one in (checked, between)] == [True, None]
    assert between.coverage["0.weight"].difference is None
    for name, mean in checked.mean_gradient.items():
        torch.testing.assert_close(between.mean_gradient[name], mean)
    late = backlight.gram(model, loss, batch)
    late = backlight.gram(model, loss, batch)
    with torch.no_grad():
        model[0].weight.mul_(1.1)
    with pytest.raises(GramError, match="not what it was when the Gram was measured; take the mean before"):
        _ = late.mean_gradient


def test_loss_that_cannot_take_one_sample_is_checked_by_halves() -> None:
    model = nn.Linear(5, 1).double()
    x, y = labelled(5)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0]).squeeze()
        return F.binary_cross_entropy_with_logits(out, batch[1].double().clamp(max=1), reduction="sum")

    found = backlight.gram(model, loss, (x, y))
    assert found.coverage["weight"].independence < 1e-12


class Mixing(nn.Module):
    """Mixes samples by ``mix`` while it trains, as batch norm does, and not in evaluation."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, h: Tensor) -> Tensor:
        return self.mix(h) if self.training else h


class UnderDropout(nn.Module):
    """A layer that mixes samples, or not, between two that do not, under dropout."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(5, 6), Mixing(mix), nn.Dropout(0.2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.norm(self.a(x)))))


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "statistics": lambda h: (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-3).sqrt(),
    "detached mean": lambda h: h - h.mean(0).detach(),
    "weak mean": lambda h: h + 1e-4 * h.mean(0),
    "sort": lambda h: h.sort(0).values,
    "top-k over the batch": lambda h: h * (h.sum(1) >= h.sum(1).topk(3).values[-1])[:, None],
    "attention over the batch": lambda h: torch.softmax(h @ h.T, 1) @ h,
    "sample before": lambda h: h + 0.5 * h.roll(1, 0),
}
SINGLE: dict[str, Callable[[Tensor], Tensor]] = {
    "statistics of the sample": lambda h: (h - h.mean(1, keepdim=True)) / (h.std(1, keepdim=True) + 1e-3),
    "sort within the sample": lambda h: h.sort(1).values,
    "top-k within the sample": lambda h: h * (h >= h.topk(3, 1).values[:, -1:]),
    "fixed statistics": lambda h: (h - 0.3) / 1.7,
    "large numbers": lambda h: 1e4 * h,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", COUPLED)
def test_coupling_under_dropout_is_refused_by_name(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model, (x, y) = UnderDropout(COUPLED[name]).to(dtype), labelled(5)
    states = torch.get_rng_state()
    with pytest.raises(GramError, match=r"samples are coupled in module 'norm' \(Mixing\)"):
        backlight.gram(model, lambda m, b: entropies(m, b).sum(), (x.to(dtype), y))
    assert torch.equal(states, torch.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", SINGLE)
def test_samples_that_are_their_own_under_dropout_are_measured(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model, (x, y) = UnderDropout(SINGLE[name]).to(dtype), labelled(5)
    torch.manual_seed(5)
    gram = backlight.gram(model, lambda m, b: entropies(m, b).sum(), (x.to(dtype), y))
    torch.manual_seed(5)
    expected = true_gram(model, entropies, (x.to(dtype), y), None)
    assert relative(gram.matrix, expected) < (1e-10 if dtype == torch.float64 else 1e-4)


def hardest(model: nn.Module, batch: Any) -> Tensor:
    return entropies(model, batch).topk(2).values.sum()


def negatives(model: nn.Module, batch: Any) -> Tensor:
    out = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="sum")


def balanced(model: nn.Module, batch: Any) -> Tensor:
    counts = torch.bincount(batch[1], minlength=3).to(batch[0].dtype)
    return (entropies(model, batch) / counts[batch[1]]).sum()


@pytest.mark.parametrize("loss", [hardest, negatives, balanced])
@pytest.mark.parametrize("at_once", [None, 3])
def test_loss_that_couples_samples_under_dropout_is_refused(
    loss: Callable[[nn.Module, Any], Tensor], at_once: int | None
) -> None:
    torch.manual_seed(3)
    model = UnderDropout(lambda h: h).double()
    with pytest.raises(GramError, match="samples are coupled in loss_fn"):
        backlight.gram(model, loss, labelled(5), at_once=at_once)


class Cropped(nn.Module):
    """Crops to the longest sample, so that others draw other masks where it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(5, 6), nn.Dropout(0.2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        valid = (x != 0).any(2, keepdim=True)
        longest = int(valid.sum(1).max())
        return (self.b(self.drop(torch.tanh(self.a(x[:, :longest])))) * valid[:, :longest]).sum(1)


def test_masks_that_depend_on_the_longest_sample_are_no_coupling() -> None:
    torch.manual_seed(3)
    model, (x, y) = Cropped().double(), labelled(4, 5)
    x[0, 3:], x[1:, 2:] = 0, 0
    torch.manual_seed(5)
    gram = backlight.gram(model, lambda m, b: entropies(m, b).sum(), (x, y))
    torch.manual_seed(5)
    assert relative(gram.matrix, true_gram(model, entropies, (x, y), None)) < 1e-10
