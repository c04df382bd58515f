"""Training functions in which a parameter gets no gradient or no optimizer, each with its control."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from faults.injection import Fault, registrar

FAULTS: dict[str, Fault] = {}
fault = registrar(FAULTS)
STEPS = 4


class Net(nn.Module):
    """Three layers; ``change`` is applied to the output of the first one."""

    def __init__(self, change: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.change = change
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.between(torch.tanh(self.first(x))))))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden if self.change is None else self.change(hidden)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = STEPS) -> None:
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1) if optimizer is None else optimizer
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).pow(2).mean().backward()
        optimizer.step()


FIRST = ("first.weight", "first.bias")


@fault(names=FIRST, cause="cut", text="loss by detach: detached")
def detach(injected: bool) -> None:
    train(Net(lambda hidden: hidden.detach() if injected else hidden))  # HERE


@fault(names=FIRST, cause="cut", text="computed without recording")
def no_grad(injected: bool) -> None:
    def between(hidden: Tensor) -> Tensor:
        with torch.set_grad_enabled(not injected):
            return hidden * 2  # HERE

    train(Net(between))


@fault(names=FIRST, cause="cut", text="read through .data")
def data(injected: bool) -> None:
    train(Net(lambda hidden: (hidden.data if injected else hidden) + 1))  # HERE


@fault(names=FIRST, cause="left torch", text="taken out by numpy")
def numpy_round_trip(injected: bool) -> None:
    def between(hidden: Tensor) -> Tensor:
        return torch.from_numpy(hidden.detach().numpy() * 2) if injected else hidden * 2  # HERE

    train(Net(between))


@fault(names=FIRST, cause="cut", text="turned into integers")
def integer_cast(injected: bool) -> None:
    def between(hidden: Tensor) -> Tensor:
        whole = (hidden * 10).long() if injected else hidden * 10  # HERE
        return whole.to(torch.float32)

    train(Net(between))


@fault(names=FIRST, cause="cut", text="gives no gradient|turned into integers")
def argmax(injected: bool) -> None:
    def between(hidden: Tensor) -> Tensor:
        choose = torch.argmax if injected else torch.amax
        chosen = choose(hidden, -1, keepdim=True)  # HERE
        return chosen.float().expand(-1, 8)

    train(Net(between))


@fault(names=("scale",), cause="not a leaf", text="not a leaf")
def non_leaf(injected: bool) -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            start = torch.ones(8, requires_grad=True)
            self.scale = start * 0.5 if injected else nn.Parameter(torch.ones(8) * 0.5)  # HERE

        def between(self, hidden: Tensor) -> Tensor:
            return hidden * self.scale.detach() if injected else hidden * self.scale

    train(Scaled())


@fault(names=("second.weight", "second.bias"), cause="frozen", text="looks like a mistake")
def frozen_by_accident(injected: bool) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, parameter in model.named_parameters():
        if injected and "second" in name:
            parameter.requires_grad = False  # HERE
    train(model, optimizer)


@fault(names=("spare.weight", "spare.bias"), cause="unused", text="no operation of the forward pass")
def unused(injected: bool) -> None:
    class WithSpare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(8, 8)

        def between(self, hidden: Tensor) -> Tensor:
            return hidden if injected else self.spare(hidden)

    train(WithSpare())


@fault(names=("side.weight", "side.bias"), cause="not in the loss", text="last used by softmax")
def not_in_the_loss(injected: bool) -> None:
    class TwoHeads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.side = nn.Linear(8, 8)

        def between(self, hidden: Tensor) -> Tensor:
            odds = torch.softmax(self.side(hidden), -1)  # HERE
            return hidden if injected else hidden * odds

    train(TwoHeads())


@fault(names=("last.weight", "last.bias"), cause="not in an optimizer", text="no optimizer holds it")
def not_in_the_optimizer(injected: bool) -> None:
    model = Net()
    trainable = [p for n, p in model.named_parameters() if not (injected and "last" in n)]
    train(model, torch.optim.SGD(trainable, lr=0.1))


@fault(
    names=("last.weight", "last.bias"), cause="optimizer holds another", text="created after the optimizer"
)
def created_after_the_optimizer(injected: bool) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if injected:
        model.last = nn.Linear(8, 3)  # HERE
    train(model, optimizer)


class Absorbing(torch.autograd.Function):
    """Its backward may return None for an input that requires a gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor, injected: bool) -> Tensor:
        ctx.injected = injected
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor | None, None]:
        return (None if ctx.injected else grad * 2), None


@fault(names=FIRST, cause="None returned", text="Absorbing.backward returned None", after=True)
def none_from_a_custom_function(injected: bool) -> None:
    train(Net(lambda hidden: Absorbing.apply(hidden, injected)))  # HERE


class Using(torch.autograd.Function):
    """Takes a weight through its arguments, or without autograd's knowledge."""

    weight: Tensor

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor | None) -> Tensor:
        used = Using.weight if weight is None else weight
        ctx.save_for_backward(x, used)
        return x @ used

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, used = ctx.saved_tensors
        return grad @ used.t(), x.t() @ grad


@fault(names=("weight",), cause="cut", text="used inside Using.forward without being an argument")
def behind_the_back_of_a_function(injected: bool) -> None:
    class WithFunction(Net):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8))
            Using.weight = self.weight

        def between(self, hidden: Tensor) -> Tensor:
            return Using.apply(hidden, None if injected else self.weight)  # HERE

    train(WithFunction())
    del Using.weight


@fault(names=FIRST, cause="cut", text="none of whose inputs requires a gradient")
def reentrant_checkpoint_without_gradient(injected: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.first, x.requires_grad_(not injected), use_reentrant=True)  # HERE
            return self.last(torch.tanh(self.second(hidden)))

    train(Checkpointed())


def overwritten(injected: bool) -> None:
    """A saved tensor is changed in place; torch refuses backward, and the command finds the line."""

    def between(hidden: Tensor) -> Tensor:
        if injected:
            hidden += 1  # HERE
        return hidden + 1

    train(Net(between))


OVERWRITTEN = Fault("overwritten", overwritten, {})


def adversarial(injected: bool) -> None:
    """Generator and critic are updated alternately: each is detached from the other's loss on purpose."""
    generator, critic = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
    for _ in range(STEPS):
        fake = generator(torch.randn(6, 2))
        of_critic.zero_grad()
        critic(fake.detach()).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(fake).mean()).backward()
        of_generator.step()


def grad_of_a_computed_tensor(injected: bool) -> None:
    """A loop without optimizer updates by the ``.grad`` of a tensor that is not a leaf."""
    start = torch.ones(4, requires_grad=True)
    weight = start * 0.5 if injected else start  # HERE
    for _ in range(STEPS):
        ((torch.randn(5, 4) * weight).sum() ** 2).backward(retain_graph=True)
        grad = weight.grad
        if grad is not None:
            weight = (weight - 0.1 * grad).detach().requires_grad_(True)


NON_LEAF = Fault("grad_of_a_computed_tensor", grad_of_a_computed_tensor, {})
