"""Grams against an autograd loop over samples in float64, and no side effects of measuring."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backlight
import gram_setups
import zoo
from backlight.measure.gram import gram as kernels
from backlight.measure.gram.factors import LookupFactors, MatrixFactors, VectorFactors, compress, concatenate
from backlight.monitors.grokking.instrument.gram import inputs
from backlight.monitors.grokking.instrument.gram.checks import GramError
from gram_setups import MODELS, N, Setup, images, labels, text, tokens


def rows(setup: Setup) -> dict[str, Tensor]:
    """Return per-sample gradients [N, ...] by parameter, one backward for each sample."""
    inner = getattr(setup.model, "_orig_mod", setup.model)
    named = {name: p for name, p in inner.named_parameters() if p.requires_grad}
    found: dict[str, list[Tensor]] = {name: [] for name in named}
    for i in range(inputs.count(setup.batch)):
        for p in named.values():
            p.grad = None
        setup.loss(setup.model, inputs.some(setup.batch, torch.tensor([i]))).backward()
        for name, p in named.items():
            found[name].append(torch.zeros_like(p) if p.grad is None else p.grad)
    for p in named.values():
        p.grad = None
    return {name: torch.stack(gradients) for name, gradients in found.items()}


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten(1) for g in gradients.values()], 1)


def close(got: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    assert got.shape == expected.shape
    assert float((got - expected).norm()) <= rtol * float(expected.norm()) + 1e-25


OPTIONS = ({}, {"kernel": "ghost"}, {"kernel": "chunked"}, {"at_once": 1}, {"at_once": 4})
"""Options that must not change a Gram."""


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gram_equals_loop_over_samples(name: str, options: dict[str, Any]) -> None:
    setup = MODELS[name]()
    expected = rows(setup)
    found = backlight.gram(setup.model, setup.loss, setup.batch, **options)
    assert list(found.per_parameter) == list(expected)
    for parameter, gradients in expected.items():
        A = gradients.flatten(1)
        close(found.per_parameter[parameter], A @ A.T)
        mean = found.mean_gradient[parameter]
        close(torch.zeros_like(gradients[0]) if mean is None else mean, gradients.mean(0), 1e-9)
    A = flat(expected)
    close(found.matrix, A @ A.T)
    methods = {check.method for check in found.coverage.values()}
    assert methods <= setup.methods
    # A batch of another size may be one that a kernel can take.
    assert "at_once" in options or {m for m in setup.methods if m in {"vmap", "loop"}} <= methods
    assert all(check.holds and check.difference < 1e-8 for check in found.coverage.values())


@pytest.mark.parametrize(("centred", "at_once"), [(False, None), (True, None), (False, 4)])
@pytest.mark.parametrize("name", ["mlp", "gpt_tied_padded_reused", "bare_parameters", "conv2d"])
def test_eigenvectors_equal_those_of_second_moment(name: str, centred: bool, at_once: int | None) -> None:
    setup = MODELS[name]()
    A = flat(rows(setup))
    found = backlight.gram(setup.model, setup.loss, setup.batch, at_once=at_once)
    values, vectors = found.eigenvectors(3, centred=centred)
    V = torch.cat([part.flatten(1) for part in vectors.values()], 1)
    B = A - A.mean(0) if centred else A
    expected = torch.linalg.svdvals(B)[:3] ** 2 / len(A)
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(V @ V.T, torch.eye(3, dtype=V.dtype), rtol=0, atol=1e-8)
    residual = (V @ B.T) @ B / len(A) - values[:, None] * V
    assert float(residual.norm()) < 1e-8 * float(values[0])
    torch.testing.assert_close(
        found.spectrum(centred=centred).eigenvalues[:3], values.numpy(), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("scope", ["layer/1.0", "block/1", "parameter/0.weight"])
def test_eigenvectors_of_layer_block_and_parameter(scope: str, centred: bool) -> None:
    net = nn.Sequential(nn.Linear(7, 6), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))).double()
    members = {
        "layer/1.0": {"1.0.weight", "1.0.bias"},
        "block/1": {"1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias"},
        "parameter/0.weight": {"0.weight"},
    }[scope]
    setup = gram_setups.Setup(net, labels, images(7), frozenset())
    A = flat({name: gradients for name, gradients in rows(setup).items() if name in members})
    B = A - A.mean(0) if centred else A
    found = backlight.gram(net, labels, setup.batch)
    values, vectors = found.eigenvectors(2, centred=centred, scope=scope)
    assert set(vectors) == members
    assert all(part.shape[1:] == net.get_parameter(name).shape for name, part in vectors.items())
    torch.testing.assert_close(values, torch.linalg.svdvals(B)[:2] ** 2 / len(A), rtol=1e-9, atol=0)
    V = torch.cat([vectors[name].flatten(1) for name in rows(setup) if name in members], 1)
    residual = (V @ B.T) @ B / len(A) - values[:, None] * V
    assert float(residual.norm()) < 1e-8 * float(values[0])
    spectrum = found.spectrum(centred=centred, scope=scope, top=2).eigenvalues
    torch.testing.assert_close(spectrum, values.numpy(), rtol=1e-9, atol=0)


@pytest.mark.slow
def test_layers_and_blocks_are_sums_of_parameters() -> None:
    setup = MODELS["gpt"]()
    found = backlight.gram(setup.model, setup.loss, setup.batch)
    parts = found.per_parameter
    close(found.per_layer["qkv"], parts["qkv.weight"] + parts["qkv.bias"])
    close(sum(found.per_block.values()), found.matrix)
    close(found.scope("layer/qkv"), found.per_layer["qkv"])
    for detail in ("layer", "block", "model"):
        coarse = backlight.gram(setup.model, setup.loss, setup.batch, detail=detail)
        close(coarse.matrix, found.matrix)
    by_layer = backlight.gram(setup.model, setup.loss, setup.batch, detail="layer")
    close(by_layer.per_layer["ln"], found.per_layer["ln"])
    with pytest.raises(GramError, match="kept by model; ask for detail='layer'"):
        _ = coarse.per_layer
    with pytest.raises(GramError, match="no scope 'layer/nix'; there are: emb"):
        found.scope("layer/nix")


def test_blocks_end_at_first_number_and_repr_is_one_line() -> None:
    net = nn.Sequential(nn.Linear(7, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    found = backlight.gram(net.double(), labels, images(7), detail="layer")
    assert list(found.per_block) == ["0", "1"]
    assert list(found.per_layer) == ["0", "1.0", "1.1"]
    methods = [coverage.method for coverage in found.coverage.values()]
    listed = ", ".join(f"{methods.count(method)} {method}" for method in sorted(set(methods)))
    assert repr(found) == f"Gram({N} samples, by layer, 6 parameters: {listed})"


class Stateful(nn.Module):
    """Draws random numbers, counts calls in a buffer, switches its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(7, 3), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.lin(self.drop(x))


def test_model_is_left_unchanged() -> None:
    net = Stateful().double()
    batch = images(7)
    labels(net, batch).backward()
    kept = net.lin.weight.grad
    values = kept.clone()
    stepped: list[int] = []
    net.lin.weight.register_post_accumulate_grad_hook(lambda p: stepped.append(1))
    before, buffer, random = copy.deepcopy(net.state_dict()), net.calls, torch.get_rng_state()

    def loss(model: nn.Module, b: Any) -> Tensor:
        model.train(not model.training)
        return labels(model, b)

    net.eval()
    found = backlight.gram(net, loss, batch)
    assert found.coverage["lin.weight"].independence is None  # this loss leaves no evaluation mode
    assert "random numbers in evaluation mode" in found.unchecked
    assert net.lin.weight.grad is kept
    assert torch.equal(kept, values)
    assert not stepped
    assert net.calls is buffer
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not net.training
    assert not net.drop.training
    assert not net.lin._forward_hooks


@pytest.mark.slow
def test_reentrant_checkpointing_keeps_gradients_and_hooks() -> None:
    setup = MODELS["gpt_checkpointed_reentrant"]()
    setup.loss(setup.model, setup.batch).backward()
    kept = {name: (p.grad, p.grad.clone()) for name, p in setup.model.named_parameters()}
    called: list[int] = []
    for p in setup.model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: called.append(1))
    backlight.gram(setup.model, setup.loss, setup.batch)
    assert not called
    for name, p in setup.model.named_parameters():
        assert p.grad is kept[name][0]
        assert torch.equal(p.grad, kept[name][1])
    setup.loss(setup.model, setup.batch).backward()
    assert len(called) >= len(kept)  # of each segment


@pytest.mark.parametrize("at_once", [None, 4])
def test_dropout_keeps_its_mask_for_eigenvectors(at_once: int | None) -> None:
    net = nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.5), nn.Linear(9, 3)).double()
    found = backlight.gram(net, labels, images(7), at_once=at_once)
    torch.rand(3)
    values, _ = found.eigenvectors(2)
    assert len(values) == 2  # with another mask they would not be orthonormal: an error


def test_no_pass_takes_more_samples_than_requested() -> None:
    sizes: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[0]))
        return labels(model, batch)

    net = nn.Sequential(nn.Linear(7, 3)).double()
    found = backlight.gram(net, loss, images(7), at_once=4)
    assert sizes == [1, 4, N - 4, 1, 1, 3]  # the calls of one sample, all samples, three sets alone
    assert found.matrix.shape == (N, N)


@pytest.mark.slow
def test_float32_and_autocast() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(7, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 3))
    x, y = images(7)
    exact = backlight.gram(copy.deepcopy(net).double(), labels, (x, y)).matrix
    single = backlight.gram(net, labels, (x.float(), y))
    assert single.matrix.dtype == torch.float64
    close(single.matrix, exact, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        outside = backlight.gram(net, labels, (x.float(), y))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return labels(model, batch)

    inside = backlight.gram(net, loss, (x.float(), y))
    close(outside.matrix, exact, 0.05)
    close(inside.matrix, outside.matrix, 1e-6)
    assert float((inside.matrix - exact).norm()) > 1e-5 * float(exact.norm())
    assert inside.coverage["0.weight"].difference < 0.01


@pytest.mark.slow
def test_gradient_that_cancels_passes_coverage_check() -> None:
    class Keys(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            weights = (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1)  # a bias of keys changes nothing
            return (weights @ self.v(x)).mean(1)

    x, y = images(5, 8)
    found = backlight.gram(Keys(), labels, (x.float(), y))
    assert found.coverage["k.bias"].from_gradient < 1e-5 * found.coverage["v.bias"].from_gradient
    assert all(check.holds for check in found.coverage.values())


def test_mean_loss_is_refused_with_fix() -> None:
    net = nn.Sequential(nn.Linear(7, 3)).double()
    with pytest.raises(GramError, match=r"'0.weight'.* looks like a mean over 6 samples: return their sum"):
        backlight.gram(net, lambda m, b: F.cross_entropy(m(b[0]), b[1]), images(7))
    bare = zoo.BareParameters().double()
    with pytest.raises(GramError, match="looks like a mean over 6 samples"):
        backlight.gram(bare, lambda m, b: F.cross_entropy(m(b[0]), b[1]), images(7))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h - h.mean(0))


def test_dependent_samples_are_refused() -> None:
    for at_once in (None, 4):
        with pytest.raises(GramError, match=r"parameter 'a.weight'.*independent along the first dimension"):
            backlight.gram(Mixing().double(), labels, images(7), at_once=at_once)
    net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    with pytest.raises(GramError, match=r"module '1' \(BatchNorm1d\) normalises over the batch.*model.eval"):
        backlight.gram(net, labels, images(7))


def test_samples_along_another_dimension_are_refused() -> None:
    ids = text()["ids"]

    def loss(model: nn.Module, batch: Any) -> Tensor:  # the model reads [T, N]: samples are columns
        out = model(batch[0].T)
        return F.cross_entropy(out.flatten(0, 1), batch[1].T.flatten(), reduction="sum")

    net = zoo.Gpt(tied=False).double()
    with pytest.raises(GramError, match=r"samples must lie along the first dimension.*\[0\] 5, batch\[1\] 6"):
        backlight.gram(net, loss, (ids.T, ids))
    # As many positions as samples: only running samples alone detects it.
    square = torch.randint(0, 11, (5, 5))
    with pytest.raises(GramError, match="independent along the first dimension"):
        backlight.gram(net, loss, (square, square))


def test_use_without_kernel_is_refused_if_no_fallback_exists() -> None:
    net = zoo.BareParameters().double()
    with pytest.raises(GramError, match=r"'scale': no kernel knows how it is used; allow fallback=True"):
        backlight.gram(net, labels, images(7), fallback=False)
    dropping = nn.Sequential(nn.Dropout(0.5), net)
    with pytest.raises(GramError, match=r"parameter '1.scale'.*draws random numbers.*model.eval"):
        backlight.gram(dropping, labels, images(7))


def test_parameter_that_only_some_passes_use_falls_back() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(7, 3), nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(x) if len(x) == 1 else self.first(x)

    batch = images(7)
    five = tuple(part[:5] for part in batch)
    with pytest.raises(GramError, match=r"'first.weight'.*used by every sample"):
        backlight.gram(Routed().double(), labels, five, at_once=4, fallback=False)


def test_error_names_uncaptured_use() -> None:
    net = zoo.BareParameters().double()
    net.scale.requires_grad_(False)
    net.matrix.requires_grad_(False)
    net.never.requires_grad_(False)
    with pytest.raises(GramError, match=r"coverage of parameter 'shared.weight' failed: expected the norm"):
        backlight.gram(net, labels, images(7), fallback=False)


def test_hook_that_changes_gradient_is_detected() -> None:
    net = nn.Sequential(nn.Linear(7, 3)).double()
    net[0].weight.register_hook(torch.sign)
    with pytest.raises(GramError, match=r"coverage of parameter '0.weight' failed"):
        backlight.gram(net, labels, images(7))


def test_eigenvectors_of_changed_model_are_refused() -> None:
    setup = MODELS["mlp"]()
    found = backlight.gram(setup.model, setup.loss, setup.batch)
    with torch.no_grad():
        setup.model[0].weight.mul_(1.1)
    with pytest.raises(GramError, match="not orthonormal, so the model is not what it was"):
        found.eigenvectors(2)


@pytest.mark.parametrize(
    ("arguments_of", "message"),
    [
        (lambda net, b: (net, lambda m, b: m(b[0]), b), r"must return one real number.*got shape \[6, 3\]"),
        (lambda net, b: (net, lambda m, b: 3.0, b), "must return one real number.*got float"),
        (lambda net, b: (net, lambda m, b: labels(m, b).detach(), b), "depends on no parameter"),
        (lambda net, b: (net, lambda m, b: labels(m, b) * float("nan"), b), "the loss is nan"),
        (lambda net, b: (net, labels, "batch"), "no tensor with a first dimension, got str"),
        (lambda net, b: (net, labels, (b[0][:0], b[1][:0])), "holds no sample"),
        (lambda net, b: (net, labels, (b[0], b[1][:2])), r"batch\[0\] 6, batch\[1\] 2"),
        (lambda net, b: (net.requires_grad_(False), labels, b), "no parameter that requires a gradient"),
        (lambda net, b: ("net", labels, b), "model must be a torch.nn.Module, got str"),
        (lambda net, b: (nn.Sequential(nn.LazyLinear(3)), labels, b), "'0.weight' has no shape yet"),
    ],
)
def test_invalid_input_is_refused(arguments_of: Any, message: str) -> None:
    net = nn.Sequential(nn.Linear(7, 3)).double()
    with pytest.raises(GramError, match=message):
        backlight.gram(*arguments_of(net, images(7)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"detail": "neuron"}, "detail must be one of parameter, layer, block, model, got 'neuron'"),
        ({"kernel": "magic"}, "kernel must be auto, ghost or chunked, got 'magic'"),
        ({"at_once": 0}, "at_once must be at least 1, got 0"),
        (
            {"products": torch.float16},
            "products must be None, torch.float64 or torch.float32, got torch.float16",
        ),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    setup = MODELS["mlp"]()
    with pytest.raises(GramError, match=message):
        backlight.gram(setup.model, setup.loss, setup.batch, **options)


def test_modules_that_cannot_be_measured_are_refused() -> None:
    setup = MODELS["mlp"]()
    with torch.inference_mode(), pytest.raises(GramError, match="inference_mode"):
        backlight.gram(setup.model, setup.loss, setup.batch)
    for option, message in (
        ({"max_norm": 1.0}, r"module '0' \(Embedding\) has max_norm"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
    ):
        net = nn.Sequential(nn.Embedding(11, 8, **option), nn.Linear(8, 11))
        with pytest.raises(GramError, match=message):
            backlight.gram(net, tokens, text())


def test_loss_of_fixed_batch_size_is_refused() -> None:
    net = nn.Sequential(nn.Linear(7, 3)).double()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return labels(model, batch) + model(batch[0]).reshape(N, 3).sum()

    with pytest.raises(GramError, match="loss_fn fails on a batch of 3 of the 6 samples"):
        backlight.gram(net, loss, images(7))


def test_sparse_gradients_and_complete_batches_of_one() -> None:
    net = nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Linear(8, 11)).double()
    found = backlight.gram(net, tokens, text())
    assert found.coverage["0.weight"].holds
    assert found.samples == N


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", ["images", "sequences", "short sequences"])
def test_products_in_float32_add_less_than_rounding_of_gradients(
    name: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    method, length = ("ghost", 8) if name == "short sequences" else ("chunked", 64)
    if method == "ghost":  # only in float32 faster than forming gradients
        monkeypatch.setattr(
            kernels, "ghost_cost_ratio", lambda device, dtype, kind, formed: kind.itemsize**4 / 1024
        )
    if name == "images":
        net = nn.Sequential(
            nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)
        )
        x = torch.randn(32, 1, 16, 16)
    else:
        net = nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 48), nn.GELU())
        net = nn.Sequential(net, nn.Linear(48, 24), nn.Flatten(), nn.Linear(24 * length, 5))
        x = torch.randn(24, length, 24)
    y = torch.randint(0, 5, (len(x),))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(40 if trained else 0):
        optimizer.zero_grad()
        labels(net, (x, y)).backward()
        optimizer.step()
    found = backlight.gram(net, labels, (x, y))
    assert method in {check.method for check in found.coverage.values()}
    assert found.rounding == torch.finfo(torch.float32).eps
    precise = backlight.gram(net, labels, (x, y), products=torch.float64)
    assert precise.rounding == torch.finfo(torch.float64).eps
    true = backlight.gram(copy.deepcopy(net).double(), labels, (x.double(), y)).spectrum().eigenvalues
    added = np.abs(found.spectrum().eigenvalues - precise.spectrum().eigenvalues)
    had = np.abs(precise.spectrum().eigenvalues - true)
    assert 0 < (added / true).max() <= (had / true).max()


@pytest.mark.slow
def test_products_in_float32_raise_reported_tolerance() -> None:
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    x, y = images(7)
    double = backlight.gram(net, labels, (x.float(), y), products=torch.float64)
    single = backlight.gram(net, labels, (x.float(), y), products=torch.float32)
    close(single.matrix, double.matrix, 1e-5)
    assert not torch.equal(single.matrix, double.matrix)
    assert single.spectrum().tolerance > 1e6 * double.spectrum().tolerance > 0


def test_factors_are_kept_in_smallest_form() -> None:
    def piece(t: int, i: int, o: int) -> MatrixFactors:
        x, d = torch.randn(4, t, 1, i), torch.randn(4, t, 1, o)
        return MatrixFactors(d, lambda a, b: x[a:b], lambda: x.norm(dim=-1), i, in_memory=True)

    short, long = piece(2, 8, 8), piece(9, 8, 8)
    assert compress([short])[0] is short
    (made,) = compress([long])
    assert isinstance(made, VectorFactors)
    assert (made.rows, made.columns) == (8, 8)
    G = torch.einsum("nto,nti->noi", long.delta[:, :, 0], long.all_inputs()[:, :, 0])
    torch.testing.assert_close(made.values.view(4, 8, 8), G)
    torch.testing.assert_close(made.sizes(), long.sizes())
    (both,) = concatenate([[made], [made]])
    assert isinstance(both, VectorFactors)
    assert both.samples == 8
    torch.testing.assert_close(both.sizes(), made.sizes().repeat(2))


def test_parts_that_differ_are_refused() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    a = LookupFactors(ids, torch.zeros(2, 3, 4), 9)
    with pytest.raises(ValueError, match="used differently by different samples"):
        concatenate([[a], [a, a]])
    with pytest.raises(ValueError, match="different numbers of positions"):
        concatenate([[a], [LookupFactors(ids[:, :2], a.delta[:, :2], 9)]])


def test_gram_equals_curvlinops() -> None:
    curvlinops = pytest.importorskip("curvlinops")
    setup = MODELS["mlp"]()
    parameters = list(setup.model.parameters())
    loss = nn.CrossEntropyLoss(reduction="sum")
    fisher = curvlinops.EFLinearOperator(setup.model, loss, parameters, [setup.batch])
    dense = fisher @ torch.eye(sum(p.numel() for p in parameters), dtype=torch.float64)
    values = torch.linalg.eigvalsh(torch.as_tensor(dense)).flip(0)[:6] / len(setup.batch[0])
    found = torch.from_numpy(backlight.gram(setup.model, setup.loss, setup.batch).spectrum().eigenvalues)
    torch.testing.assert_close(found, values, rtol=1e-6, atol=0)
