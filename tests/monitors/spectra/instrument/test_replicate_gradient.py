"""The gradient of a replicate equals autograd, depends on its number only, and changes no model."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backlight.monitors.spectra.instrument.replicate_gradient import gradients, seed_by
from backlight.monitors.spectra.settings import SpectraError


def whole(name, tensor):
    return {name: tensor}


def thirds(name, tensor):
    if tensor.ndim < 2 or len(tensor) % 3:
        return {name: tensor}
    return {f"{name}:{i}": rows for i, rows in enumerate(tensor.chunk(3))}


def square(model, batch):
    return model(batch).square().mean()


def net():
    torch.manual_seed(1)
    head = nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 4)
    return nn.Sequential(nn.Conv1d(2, 6, 3), nn.Flatten(), nn.Linear(12, 9), *head)


def test_replicate_gradient_equals_autograd():
    model, batch = net(), torch.randn(5, 2, 4)
    wanted = {"0.weight", "2.weight:1", "5.weight"}
    seed_by(0, "loss", 7)
    found = gradients(model, square, batch, wanted, thirds, replicate=7)
    assert all(p.grad is None for p in model.parameters())
    control = net()
    seed_by(0, "loss", 7)
    conv, linear, last = torch.autograd.grad(
        square(control, batch), [control[0].weight, control[2].weight, control[5].weight]
    )
    assert set(found) == wanted - {"0.weight"}  # the convolution has six outputs, and is split as well
    assert torch.equal(found["2.weight:1"], linear[3:6])
    assert torch.equal(found["5.weight"], last)
    assert found["2.weight:1"].untyped_storage().nbytes() == found["2.weight:1"].nbytes
    third = net()
    seed_by(0, "loss", 7)
    conv_alone = gradients(third, square, batch, {"0.weight"}, whole, replicate=7)
    assert torch.equal(conv_alone["0.weight"], conv.reshape(6, 6))


def test_values_before_sample_do_not_matter():
    model, first, second = net(), torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert buffers
    seed_by(3, "loss", 1)
    alone = gradients(model, square, second, {"2.weight"}, whole, replicate=1)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients(model, square, first, {"2.weight", "5.weight"}, whole, replicate=0)
    seed_by(3, "loss", 1)
    after = gradients(model, square, second, {"2.weight"}, whole, replicate=1)
    assert torch.equal(alone["2.weight"], after["2.weight"])


def test_only_wanted_gradients_are_kept(monkeypatch):
    model = net()
    with_gradient = []
    original = torch.Tensor.backward

    def backward(self, *args, **kwargs):
        original(self, *args, **kwargs)
        with_gradient.extend(name for name, p in model.named_parameters() if p.grad is not None)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    gradients(model, square, torch.randn(5, 2, 4), {"5.weight"}, whole, replicate=0)
    assert with_gradient == ["5.weight"]


def test_sparse_gradients_are_filled():
    model = nn.Embedding(8, 4, sparse=True)
    batch = torch.tensor([1, 5, 5])
    found = gradients(model, square, batch, {"weight"}, whole, replicate=0)["weight"]
    dense = nn.Embedding(8, 4)
    dense.load_state_dict(model.state_dict())
    (expected,) = torch.autograd.grad(square(dense, batch), [dense.weight])
    assert torch.equal(found, expected)


def test_parameters_without_gradient():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    batch = torch.randn(2, 3)
    message = r"layer 'idle\.weight': replicate 4 gave it no gradient.*--exclude"
    with pytest.raises(SpectraError, match=message):
        gradients(Unused(), square, batch, {"idle.weight", "used.weight"}, whole, replicate=4)
    with pytest.raises(SpectraError, match="replicate 2: the loss has no graph"):
        gradients(nn.Linear(3, 3), lambda m, b: m(b).sum().detach(), batch, {"weight"}, whole, replicate=2)


class Recomputed(nn.Module):
    """A tied weight used twice, with a checkpointed part."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(2)
        self.reentrant = reentrant
        self.embed, self.inner, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, codes):
        x = self.embed(codes)
        if self.reentrant is None:
            x = torch.tanh(self.inner(x))
        else:
            x = checkpoint(lambda x: torch.tanh(self.inner(x)), x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("wanted", [{"embed.weight"}, {"inner.weight"}, {"embed.weight", "inner.weight"}])
def test_recomputation_and_tied_weights(reentrant, wanted):
    batch = torch.tensor([[1, 2, 3], [4, 5, 6]])
    found = gradients(Recomputed(reentrant), square, batch, wanted, whole, replicate=0)
    plain = Recomputed(None)
    parameters = {name: plain.get_parameter(name) for name in wanted}
    expected = torch.autograd.grad(square(plain, batch), list(parameters.values()))
    for name, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9)
