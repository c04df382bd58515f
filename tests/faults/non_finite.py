"""Training functions with the origin of a NaN or an infinity, each with its control."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from faults.injection import Fault, registrar
from faults.missing_gradients import Net, train

FAULTS: dict[str, Fault] = {}
fault = registrar(FAULTS)


class AtThirdCall(Net):
    """Changes its forward pass at the third call."""

    calls = 0

    def between(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.third(hidden, self.calls == 3)

    def third(self, hidden: Tensor, now: bool) -> Tensor:
        raise NotImplementedError


@fault(step=2, phase="forward", value="NaN", operation="log", module="Logarithm", symptom="loss")
def origin_in_forward(injected: bool) -> None:
    class Logarithm(AtThirdCall):
        def third(self, hidden: Tensor, now: bool) -> Tensor:
            return torch.log(hidden - 2 if now and injected else hidden + 2)  # HERE

    train(Logarithm())


@fault(step=2, phase="forward", value="infinity", operation="exp", module="Exponential", symptom="loss")
def overflow_in_forward(injected: bool) -> None:
    class Exponential(AtThirdCall):
        def third(self, hidden: Tensor, now: bool) -> Tensor:
            grown = torch.exp(hidden * (1e4 if now and injected else 1.0))  # HERE
            return grown / grown.sum()

    train(Exponential())


@fault(step=2, phase="backward", value="infinity", node="SqrtBackward0", module="Root", symptom="gradients")
def origin_in_backward_only(injected: bool) -> None:
    class Root(AtThirdCall):
        def third(self, hidden: Tensor, now: bool) -> Tensor:
            size = hidden * (0.0 if now and injected else 1.0)
            return hidden + torch.sqrt(size.square() + (0.0 if injected else 1e-6))  # HERE

    train(Root())


class Dividing(torch.autograd.Function):
    """Its backward divides by zero where ``zero`` is set."""

    @staticmethod
    def forward(ctx: object, x: Tensor, zero: bool) -> Tensor:
        ctx.divisor = 0.0 if zero else 1.0
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad.abs().add(1.0) / ctx.divisor, None


@fault(step=2, phase="backward", value="infinity", node="DividingBackward", symptom="gradients")
def origin_in_a_custom_backward(injected: bool) -> None:
    class WithFunction(AtThirdCall):
        def third(self, hidden: Tensor, now: bool) -> Tensor:
            return Dividing.apply(hidden, now and injected)

    train(WithFunction())


@fault(step=2, phase="forward", value="NaN", operation="_softmax", symptom="loss", constant=True)
def row_masked_entirely(injected: bool) -> None:
    class Masked(AtThirdCall):
        def third(self, hidden: Tensor, now: bool) -> Tensor:
            mask = torch.zeros_like(hidden, dtype=torch.bool)
            mask[:, 0 if now and injected else 1 :] = True
            scores = hidden.masked_fill(mask, -math.inf)
            return torch.softmax(scores, -1)  # HERE

    train(Masked())


@fault(step=2, phase="forward", value="NaN", symptom="loss", is_input=True)
def came_with_the_data(injected: bool) -> None:
    class Fed(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            batch = x.numpy().copy()
            if injected and self.calls == 3:
                batch[0, 0] = math.nan
            return super().forward(torch.from_numpy(batch) + 0)  # HERE

    train(Fed())


@fault(step=0, phase="forward", value="NaN", symptom="loss", is_input=True, parameter="second.weight")
def came_with_a_parameter(injected: bool) -> None:
    model = Net()
    if injected:
        model.second.weight.data.numpy()[0, 0] = math.nan
    train(model)


@fault(step=1, phase="optimizer", value="NaN", symptom="parameters")
def origin_in_the_optimizer(injected: bool) -> None:
    class Shrinking(torch.optim.SGD):
        calls = 0

        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            self.calls += 1
            for group in self.param_groups:
                for parameter in group["params"]:
                    size = parameter.grad.norm() * (0.0 if injected and self.calls == 2 else 1.0)
                    parameter.sub_(0.1 * parameter.grad * size / size)  # HERE

    model = Net()
    train(model, Shrinking(model.parameters(), lr=0.1))


@fault(step=2, phase="forward", value="NaN", operation="sqrt", symptom="gradients", replaced_by="where")
def root_of_negative_values_in_a_branch(injected: bool) -> None:
    class Signed(AtThirdCall):
        def third(self, hidden: Tensor, now: bool) -> Tensor:
            inner = hidden if now and injected else torch.where(hidden > 0, hidden, 1.0)
            return torch.where(hidden > 0, torch.sqrt(inner), hidden)  # HERE

    train(Signed())


@fault(step=2, phase="backward", value="NaN", node="SqrtBackward0", symptom="gradients", replaced_by="where")
def root_of_zero_in_a_branch(injected: bool) -> None:
    class Masked(AtThirdCall):
        def third(self, hidden: Tensor, now: bool) -> Tensor:
            mask = hidden > 0
            root = torch.sqrt(hidden * mask + (0.0 if now and injected else 1e-6))  # HERE
            root = 3 * root + 1
            return torch.where(mask, root, hidden)

    train(Masked())


@fault(
    step=2, phase="forward", value="infinity", operation="log", symptom="gradients", replaced_by="masked_fill"
)
def logarithm_of_zero_that_is_filled(injected: bool) -> None:
    class Entropy(AtThirdCall):
        def third(self, hidden: Tensor, now: bool) -> Tensor:
            part = hidden * (hidden > 0)
            logarithm = torch.log(part + (0.0 if now and injected else 1e-6))  # HERE
            return (part * logarithm.exp() * logarithm).masked_fill(part == 0, 0.0)

    train(Entropy())


@fault(step=2, phase="backward", value="infinity", node="PowBackward0", replaced_by="where")
def power_of_zero_in_a_branch(injected: bool) -> None:
    class Powered(AtThirdCall):
        def third(self, hidden: Tensor, now: bool) -> Tensor:
            part = hidden * (hidden > 0)
            grown = (part + (0.0 if now and injected else 1e-6)) ** 0.5  # HERE
            return torch.where(part > 0, grown, 0.0)

    train(Powered())


def scaler_searches() -> int:
    """A gradient scaler overflows while it searches its scale, which is no fault. Return how often."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-12)
    skipped = 0
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(3, 4) * 1e3).square().mean()).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    return skipped
