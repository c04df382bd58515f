"""Rows of inputs and targets that come into another order, together and apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from faults.silent.batches import samples
from faults.silent.loop import control, fault, perceptron

Pair = tuple[Tensor, Tensor]
Change = Callable[[Tensor, Tensor], Pair]
LossOf = Callable[[Tensor, Tensor], Tensor]


def paired(change: Change, loss_of: LossOf = F.cross_entropy, *, twice: bool = False) -> None:
    """Train on batches of a loader that ``change`` makes others of."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(samples(64), batch_size=8, shuffle=True):
        x, y = change(*batch)
        optimizer.zero_grad()
        output = model(x)
        loss = loss_of(output, y)
        if twice:
            loss = loss + (model(x + 0.1) - output).square().mean()
        loss.backward()
        optimizer.step()


def keep(x: Tensor, y: Tensor) -> Pair:
    return x, y


def sorted_targets(x: Tensor, y: Tensor) -> Pair:
    return x, y.sort().values


def shuffled_inputs(x: Tensor, y: Tensor) -> Pair:
    return x[torch.randperm(len(x))], y


@fault(rule="loss_input", kind="rows_apart", severity="warning", step=2, names="The targets of a batch")
def targets_that_are_sorted_alone(injected: bool) -> None:
    torch.manual_seed(1)
    paired(sorted_targets if injected else keep)


@fault(rule="loss_input", kind="rows_apart", severity="warning", step=2, names="The inputs of a batch")
def inputs_that_are_shuffled_alone(injected: bool) -> None:
    paired(shuffled_inputs if injected else keep)


@fault(rule="loss_input", kind="rows_apart", severity="warning", step=2, names="The inputs of a batch")
def bfloat16_inputs_that_are_shuffled_alone(injected: bool) -> None:
    model = perceptron().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(x.bfloat16(), y) for x, y in samples(64)]
    for x, y in DataLoader(data, batch_size=8):  # type: ignore[arg-type]
        optimizer.zero_grad()
        inputs = shuffled_inputs(x, y)[0] if injected else x
        F.cross_entropy(model(inputs).float(), y).backward()
        optimizer.step()


@control
def rows_that_are_shuffled_together() -> None:
    def change(x: Tensor, y: Tensor) -> Pair:
        order = torch.randperm(len(x))
        return x[order], y[order]

    paired(change)


@control
def outputs_in_the_order_of_the_targets() -> None:
    def loss_of(output: Tensor, y: Tensor) -> Tensor:
        order = y.argsort()
        return F.cross_entropy(output[order], y[order])

    paired(keep, loss_of)


@control
def mixed_inputs_with_both_targets() -> None:
    def change(x: Tensor, y: Tensor) -> Pair:
        return 0.6 * x + 0.4 * x.flip(0), y

    paired(change, lambda out, y: 0.6 * F.cross_entropy(out, y) + 0.4 * F.cross_entropy(out, y.flip(0)))


@control
def mixed_features_with_both_targets() -> None:
    paired(keep, lambda out, y: 0.6 * F.cross_entropy(out, y) + 0.4 * F.cross_entropy(out, y.flip(0)))


@control
def inputs_whose_features_are_flipped() -> None:
    paired(lambda x, y: (x.flip(1), y))


@control
def targets_of_other_names() -> None:
    """The classes are numbered anew."""
    paired(lambda x, y: (x, (y + 1) % 3))


@control
def two_forwards_of_shuffled_inputs() -> None:
    paired(shuffled_inputs, twice=True)


def two_loaders(
    *, seed: int | None = None, is_fed: bool = False, shuffle: bool = True, spare: int = 0
) -> None:
    """Take inputs and targets of two loaders; with a ``seed``, both shuffle in one order."""
    inputs = torch.randn(64, 4)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    targets = torch.cat([model(inputs).detach().flip(0), torch.zeros(spare, 3)])
    loaders = [
        DataLoader(
            TensorDataset(data),
            8,
            shuffle=shuffle,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
        )
        for data in (inputs, targets)
    ]
    other = torch.nn.Linear(3, 3)
    if is_fed:
        optimizer.add_param_group({"params": other.parameters()})
    for (x,), (y,) in zip(*loaders, strict=False):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if is_fed:
            loss = loss + other(y).square().mean()
        loss.backward()
        optimizer.step()


@fault(rule="loss_input", kind="loaders_apart", severity="warning", step=2, names="two loaders")
def two_loaders_that_shuffle_apart(injected: bool) -> None:
    two_loaders(seed=None if injected else 0)


@control
def two_loaders_in_the_order_of_the_data() -> None:
    two_loaders(shuffle=False)


@control
def two_loaders_of_other_lengths() -> None:
    two_loaders(spare=8)


@control
def two_loaders_that_both_reach_a_model() -> None:
    two_loaders(is_fed=True)
