"""Errors of a training loop that crash nothing, and loops without an error that come close to one."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from faults.injection import Fault, registrar

FAULTS: dict[str, Fault] = {}
fault = registrar(FAULTS)

CONTROLS: dict[str, Callable[[], None]] = {}
"""Loops without an error that come close to one."""

STEPS = 10


def control(train: Callable[[], None]) -> Callable[[], None]:
    """Register a loop that has no error."""
    CONTROLS[train.__name__] = train
    return train


def batches(count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.randn(8, 4), torch.randint(0, 3, (8,))


def perceptron(*last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3), *last)


def classify(
    model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy, steps: int = STEPS
) -> None:
    """Train a classifier without an error of the loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# Use of gradients


@fault(rule="gradients_not_cleared", severity="error", step=1)
def no_zero_grad(injected: bool) -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches():
        if not injected:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@fault(rule="gradients_not_cleared", severity="error", step=1)
def zero_grad_of_the_model_only(injected: bool) -> None:
    """The optimizer also holds a temperature, which is no parameter of the model."""
    model, temperature = perceptron(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    for x, y in batches():
        (model if injected else optimizer).zero_grad()
        F.cross_entropy(model(x) * temperature, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@fault(rule="gradients_discarded", severity="error", step=0)
def zero_grad_before_the_step(injected: bool) -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        if injected:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


@fault(rule="gradients_discarded", severity="warning", step=0)
def zero_grad_at_every_microbatch(injected: bool) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches(4 * STEPS)):
        if injected or number % 4 == 0:
            optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        if number % 4 == 3:
            optimizer.step()


@control
def zeros_through_data() -> None:
    """``.data.zero_()`` does not change the version of a gradient."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.data.zero_()


@control
def adversarial_pair() -> None:
    """The generator's backward adds to gradients of the critic, which are cleared before its own."""
    generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    first, second = (torch.optim.Adam(model.parameters(), lr=1e-3) for model in (generator, critic))
    for _ in range(STEPS):
        critic.zero_grad()
        (critic(torch.randn(8, 4)).mean() - critic(generator(torch.randn(8, 2)).detach()).mean()).backward()
        second.step()
        generator.zero_grad()
        critic(generator(torch.randn(8, 2))).mean().backward()
        first.step()


@control
def gradient_surgery() -> None:
    """The gradients of several tasks are read, cleared, and put back as one."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        taken = []
        for x, y in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            taken.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter, *grads in zip(model.parameters(), *taken, strict=True):
            parameter.grad = torch.stack(grads).mean(0)
        optimizer.step()


@control
def sharpness_aware() -> None:
    """SAM by hand: the first gradient moves the weights, and is cleared."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            moves = [0.01 * parameter.grad for parameter in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()


@control
def adversarial_examples() -> None:
    """The first backward is for the gradient of the input."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        x.requires_grad_()
        F.cross_entropy(model(x), y).backward()
        attacked = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        F.cross_entropy(model(attacked), y).backward()
        optimizer.step()


@control
def norms_of_two_tasks() -> None:
    """Of one forward, the gradients of each loss are read and cleared before those of the sum."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        out = model(x)
        losses = [F.cross_entropy(out, y), out.square().mean()]
        for loss in losses:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()


@control
def steps_that_a_scaler_skips() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y) * 1e3).backward()
        scaler.step(optimizer)
        scaler.update()


@control
def second_order_optimizer() -> None:
    model = perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    for x, y in batches(4):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


# Input of the loss


@fault(rule="loss_input", severity="warning", step=0, kind="softmax_twice")
def softmax_before_cross_entropy(injected: bool) -> None:
    classify(perceptron(nn.Softmax(dim=1)) if injected else perceptron())


@fault(rule="loss_input", severity="warning", step=0, kind="sigmoid_before_softmax")
def sigmoid_before_cross_entropy(injected: bool) -> None:
    classify(perceptron(nn.Sigmoid()) if injected else perceptron())


@fault(rule="loss_input", severity="error", step=0, kind="nll_of_scores")
def nll_of_logits(injected: bool) -> None:
    classify(perceptron() if injected else perceptron(nn.LogSoftmax(dim=1)), F.nll_loss)


@fault(rule="loss_input", severity="warning", step=0, kind="nll_of_probabilities")
def nll_of_probabilities(injected: bool) -> None:
    classify(perceptron(nn.Softmax(dim=1) if injected else nn.LogSoftmax(dim=1)), F.nll_loss)


@fault(rule="loss_input", severity="warning", step=0, kind="sigmoid_twice")
def sigmoid_twice(injected: bool) -> None:
    model = perceptron(nn.Sigmoid()) if injected else perceptron()
    classify(model, lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 3).float()))


def regress(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    classify(nn.Sequential(model, nn.Linear(3, 1)), lambda out, y: loss_of(out, y.float()))


@fault(rule="loss_input", severity="error", step=0, kind="broadcast")
def broadcast_in_mse(injected: bool) -> None:
    regress(perceptron(), lambda out, y: F.mse_loss(out if injected else out.squeeze(1), y))


@fault(rule="loss_input", severity="error", step=0, kind="broadcast")
def broadcast_by_hand(injected: bool) -> None:
    regress(perceptron(), lambda out, y: (y if injected else y[:, None]).sub(out).abs().mean() + 1.0)


@control
def pairwise_ranking() -> None:
    """Differences of all pairs of predictions are meant."""
    regress(perceptron(), lambda out, y: (out - out.T).sub(y[:, None] - y[None]).square().mean())


@control
def classes_of_probabilities() -> None:
    classify(perceptron(nn.Softmax(dim=1)), lambda out, y: F.nll_loss(torch.log(out + 1e-8), y))


# Modes


def normed(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3), *more
    )


@fault(rule="trained_in_eval_mode", severity="warning", step=0)
def trained_in_eval_mode(injected: bool) -> None:
    classify(normed().train(not injected))


@fault(rule="trained_in_eval_mode", severity="warning", step=6)
def no_train_after_the_evaluation(injected: bool) -> None:
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches()):
        if number == 6:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train(not injected)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@control
def frozen_batch_norm() -> None:
    model = normed()
    model[1].eval()
    classify(model)


@control
def new_head_on_a_frozen_model() -> None:
    backbone = normed(nn.Linear(3, 64)).requires_grad_(False)
    classify(nn.Sequential(backbone, nn.Linear(64, 3)).eval())


# Mixed precision


@fault(rule="clipped_before_unscale", severity="warning", step=0)
def clipped_before_unscale(injected: bool) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if not injected:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def scaled_steps(step: Callable[[torch.amp.GradScaler, torch.optim.Optimizer], object]) -> None:
    """Train with a scaled loss; ``step(scaler, optimizer)`` follows each backward."""
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        step(scaler, optimizer)


@fault(rule="scaler_bypassed", severity="warning", step=0)
def step_without_the_scaler(injected: bool) -> None:
    def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if injected:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    scaled_steps(step)


@control
def unscaled_by_hand() -> None:
    def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= scaler.get_scale()
        optimizer.step()

    scaled_steps(step)


@control
def clipped_without_a_scale() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


# Weights


def averaged(update: Callable[[nn.Module, nn.Module, int], None]) -> None:
    """Train a model with a copy of it; ``update(model, copy, step)`` follows each step."""
    model = perceptron()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            update(model, average, step)


def follow(model: nn.Module, average: nn.Module, weight: float) -> None:
    for own, mean in zip(model.parameters(), average.parameters(), strict=True):
        mean.lerp_(own, weight)


@fault(rule="weights_changed", severity="error", step=0)
def average_copied_into_the_model(injected: bool) -> None:
    def update(model: nn.Module, average: nn.Module, step: int) -> None:
        follow(model, average, 0.01)
        if injected:
            for own, mean in zip(model.parameters(), average.parameters(), strict=True):
                own.data = mean.data.clone()

    averaged(update)


@fault(rule="weights_changed", severity="error", step=0)
def state_restored_at_every_step(injected: bool) -> None:
    def update(model: nn.Module, average: nn.Module, step: int) -> None:
        if injected:
            model.load_state_dict(average.state_dict())

    averaged(update)


@fault(rule="weights_changed", severity="warning", step=1)
def weights_edited_before_backward(injected: bool) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if injected:
            model[0].weight.data += 0.01 * torch.randn(16, 4)
        loss.backward()
        optimizer.step()


@fault(rule="weights_changed", severity="info", step=0)
def noise_on_the_weights(injected: bool) -> None:
    """As in Langevin dynamics: worth knowing, and no error."""

    def update(model: nn.Module, average: nn.Module, step: int) -> None:
        if injected:
            for own in model.parameters():
                own.add_(1e-3 * torch.randn_like(own))

    averaged(update)


@fault(rule="weights_changed", severity="info", step=1)
def slow_weights(injected: bool) -> None:
    """Lookahead by hand: at every second step here, the weights go back half of their way."""

    def update(model: nn.Module, average: nn.Module, step: int) -> None:
        if injected and step % 2:
            follow(model, average, 0.5)
            model.load_state_dict(average.state_dict())

    averaged(update)


@control
def clipped_weights() -> None:
    """A Wasserstein critic, whose weights are clipped."""
    averaged(lambda model, *_: [own.clamp_(-0.2, 0.2) for own in model.parameters()])


@control
def rescaled_weights() -> None:
    averaged(lambda model, *_: [own.mul_(0.99) for own in model.parameters()])


@control
def pruned_weights() -> None:
    averaged(lambda model, *_: [own.mul_(own.abs() > 0.1) for own in model.parameters()])


@control
def two_optimizers() -> None:
    model = perceptron()
    optimizers = [torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 2)]
    for x, y in batches():
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()


@control
def weights_of_the_average_for_an_evaluation() -> None:
    def update(model: nn.Module, average: nn.Module, step: int) -> None:
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.state_dict())
        model(torch.randn(8, 4))
        model.load_state_dict(own)

    averaged(update)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y).backward()
        optimizer.step()


@fault(rule="updates_rounded_away", severity="warning", step=0)
def rate_below_the_spacing(injected: bool) -> None:
    model = perceptron()
    fit(model, torch.optim.AdamW(model.parameters(), lr=1e-10 if injected else 1e-5))


@fault(rule="updates_rounded_away", severity="warning", step=0)
def weights_in_bfloat16(injected: bool) -> None:
    model = perceptron().bfloat16()
    fit(model, torch.optim.AdamW(model.parameters(), lr=1e-5 if injected else 1e-2))


@control
def unused_rows_of_an_embedding() -> None:
    """Weights without a gradient stay as they are."""
    model = nn.Sequential(nn.EmbeddingBag(500, 16), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randint(0, 500, (8, 4))), y).backward()
        optimizer.step()


@control
def warm_up_from_zero() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (step - 4) / 10))
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()


# Batches


def epochs(
    loader: DataLoader[tuple[Tensor, ...]], before_epoch: Callable[[int], object] = lambda _: None
) -> None:
    """Train for four epochs, each with an evaluation in a fixed order."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evaluation = DataLoader(loader.dataset, batch_size=8)
    for epoch in range(4):
        before_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            for x, y in evaluation:
                F.cross_entropy(model(x), y)


def samples(count: int = 32) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4), torch.randint(0, 3, (count,)))


@fault(rule="same_order_every_epoch", severity="warning", step=7, kind="order")
def seeded_in_every_epoch(injected: bool) -> None:
    loader = DataLoader(samples(), batch_size=8, shuffle=True)
    epochs(loader, lambda epoch: torch.manual_seed(0 if injected else epoch))


@fault(rule="same_order_every_epoch", severity="warning", step=7, kind="order")
def no_set_epoch(injected: bool) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(samples(64), num_replicas=2, rank=0)
    loader = DataLoader(sampler.dataset, batch_size=8, sampler=sampler)
    epochs(loader, lambda _: None if injected else sampler.set_epoch(_))


@fault(rule="same_order_every_epoch", severity="warning", step=3, kind="batch")
def first_batch_only(injected: bool) -> None:
    loader = DataLoader(samples(), batch_size=8)
    model, endless = perceptron(), itertools.cycle(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = next(iter(loader)) if injected else next(endless)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@control
def whole_data_in_one_batch() -> None:
    epochs(DataLoader(samples(8), batch_size=8, shuffle=True))


@control
def two_batches_in_random_order() -> None:
    epochs(DataLoader(samples(16), batch_size=8, shuffle=True))


@control
def weights_become_nan() -> None:
    """Training diverges: a weight that is NaN differs from itself."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert model[0].weight.isnan().any()


# Tensors of optimizers


class Stack(nn.Module):
    def __init__(self, make_list: Callable[[list[nn.Module]], Any]) -> None:
        super().__init__()
        self.layers = make_list([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


@fault(rule="unregistered_modules", severity="warning", step=0, kind="Linear")
def modules_in_a_plain_list(injected: bool) -> None:
    classify(Stack(list if injected else nn.ModuleList))


@fault(rule="optimizer_of_other_tensors", severity="error", step=1)
def optimizer_of_a_copy(injected: bool) -> None:
    model = perceptron()
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW((model if injected else trained).parameters(), lr=1e-3)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(trained(x), y).backward()
        optimizer.step()


@control
def list_of_modules_that_another_optimizer_trains() -> None:
    model = Stack(tuple)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, *model.layers)]
    for x, y in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()


@control
def loss_network_that_is_not_trained() -> None:
    """A fixed network in the loss gets gradients, which no one uses."""
    network = nn.Linear(3, 5)
    classify(perceptron(), lambda out, y: F.cross_entropy(out, y) + network(out).square().mean())
