"""Modules in the wrong mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from faults.silent.batches import samples
from faults.silent.loop import Loop, control, fault, perceptron, train


def normed(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3), *more
    )


@fault(rule="module_modes", kind="trained_in_evaluation", severity="error", step=0, names="BatchNorm1d")
def trained_in_eval_mode(injected: bool) -> None:
    train(normed().train(not injected))


@fault(rule="module_modes", kind="trained_in_evaluation", severity="error", step=6, names="BatchNorm1d")
def no_train_after_the_evaluation(injected: bool) -> None:
    model = normed()

    def evaluate(step: int) -> None:
        if step == 6:
            model.eval()
            with torch.no_grad():
                model(torch.randn(8, 4))
            model.train(not injected)

    loop = Loop(model)
    loop.before_step = evaluate
    loop.run()


class Wrapper(nn.Module):
    """A model in another, as that of a framework's module."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@fault(
    rule="module_modes", kind="trained_in_evaluation", severity="warning", step=0, names="`net` of Wrapper"
)
def inner_model_in_eval_mode(injected: bool) -> None:
    train(Wrapper(normed().train(not injected)))


class Parts(nn.Module):
    """An encoder, another one, and a head with dropout."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.head = normed(nn.Linear(3, 8)), normed(nn.Linear(3, 8)), head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.first(x), self.second(x)], 1))


def dropping_head() -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 3))


@fault(
    rule="module_modes",
    kind="trained_in_evaluation",
    severity="warning",
    step=0,
    names="`first` and `second`",
)
def two_encoders_in_eval_mode(injected: bool) -> None:
    model = Parts(nn.Linear(16, 3))
    model.first.train(not injected)
    model.second.train(not injected)
    train(model)


@fault(rule="module_modes", kind="trained_in_evaluation", severity="warning", step=0, names="`first`")
def encoders_in_eval_mode_below_a_head_that_drops(injected: bool) -> None:
    model = Parts(dropping_head())
    model.first.train(not injected)
    model.second.train(not injected)
    train(model)


@fault(rule="module_modes", kind="trained_in_evaluation", severity="warning", step=0, names="1 BatchNorm1d")
def loaded_batch_norm_in_eval_mode(injected: bool) -> None:
    """It may be meant that the statistics of a model from a file stay."""
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    model.load_state_dict(model.state_dict())
    train(model.train(not injected))


def below_half(model: Parts) -> None:
    """One of two encoders is kept as it is."""
    model.first.eval()
    model.second.append(nn.Linear(8, 8)).append(nn.Linear(8, 8))


def frozen_encoders(model: Parts) -> None:
    model.first.eval().requires_grad_(False)
    model.second.eval().requires_grad_(False)


def frozen_stages(model: Parts) -> None:
    for part in (model.first[:2], model.second[:2]):
        part.requires_grad_(False)
        for module in part:
            module.eval()


def adapters(model: Parts) -> None:
    """Low-rank weights on frozen layers, all in evaluation mode."""
    for part in (model.first, model.second):
        part.eval().requires_grad_(False)
        part[0] = nn.Sequential(part[0], nn.Linear(16, 1), nn.Linear(1, 16))


def norms_in_evaluation(model: Parts) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()


def without_dropout(model: Parts) -> None:
    for part in (model.first, model.second):
        part.eval()
        part[3].p = 0.0


def dropouts_one_by_one(model: Parts) -> None:
    model.first[3].eval()
    model.second[3].eval()


def train_after_construction(model: Parts) -> None:
    model.first.eval()
    model.train()


def encoder_that_no_optimizer_holds(model: Parts) -> None:
    """A teacher that is kept in the same module."""
    model.first.eval().requires_grad_(False)
    model.teacher = normed().eval().requires_grad_(False)


MODES = [
    below_half,
    frozen_encoders,
    frozen_stages,
    adapters,
    norms_in_evaluation,
    without_dropout,
    dropouts_one_by_one,
    train_after_construction,
    encoder_that_no_optimizer_holds,
]


def _mode_control(prepare: Callable[[Parts], None]) -> None:
    def loop() -> None:
        model = Parts(dropping_head())
        prepare(model)
        train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))

    loop.__name__ = prepare.__name__
    control(loop)


for one in MODES:
    _mode_control(one)


@control
def inner_batch_norm_frozen() -> None:
    train(Wrapper(nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).eval()))


@control
def frozen_batch_norm() -> None:
    model = normed()
    model[1].eval()
    train(model)


@control
def new_head_on_a_frozen_model() -> None:
    backbone = normed(nn.Linear(3, 64)).requires_grad_(False)
    train(nn.Sequential(backbone, nn.Linear(64, 3)).eval())


class Stages(nn.Sequential):
    """Stages of a backbone; ``train()`` sets the first ones, or all norms, to evaluation each time."""

    def __init__(self, frozen: int, *, norm_eval: bool) -> None:
        sizes = (4, 16, 16, 16)
        stages = (
            nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.1))
            for a, b in pairwise(sizes)
        )
        super().__init__(*stages, nn.Linear(16, 3))
        self.frozen, self.norm_eval = frozen, norm_eval

    def train(self, mode: bool = True) -> Stages:
        super().train(mode)
        for stage in list(self)[: self.frozen]:
            stage.eval().requires_grad_(False)
        for module in self.modules():
            if mode and self.norm_eval and isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


def evaluated(
    model: nn.Module, evaluate: Callable[[Iterable[list[Tensor]]], object], epochs: int = 3
) -> None:
    """Train for some epochs, each followed by ``evaluate`` with the batches of another data set."""
    held_out = DataLoader(samples(24), batch_size=8)
    loader = DataLoader(samples(32), batch_size=8, shuffle=True)
    # Functions in compiled code are not observed.
    loop = Loop(model, loader=loader, epochs=epochs, evaluates=False, is_compiled=False)
    loop.before_epoch = lambda _: model.train()
    loop.after_epoch = torch.no_grad()(lambda _: evaluate(held_out))
    loop.run()


def _evaluated_in_eval_mode(model: nn.Module) -> None:
    """The optimizer holds all parameters, and is built before the first ``train()``."""

    def evaluate(held_out: Iterable[list[Tensor]]) -> None:
        model.eval()
        for x, _ in held_out:
            model(x)

    evaluated(model, evaluate)


@control
def stages_frozen_by_train() -> None:
    _evaluated_in_eval_mode(Stages(2, norm_eval=False))


@control
def stages_frozen_and_norms_in_evaluation_by_train() -> None:
    _evaluated_in_eval_mode(Stages(1, norm_eval=True))


@control
def norms_in_evaluation_by_train() -> None:
    _evaluated_in_eval_mode(Stages(0, norm_eval=True))


@control
def backbone_frozen_by_train_below_a_head() -> None:
    _evaluated_in_eval_mode(nn.Sequential(Stages(4, norm_eval=True), nn.Dropout(0.1), nn.Linear(3, 3)))


@fault(rule="module_modes", kind="evaluated_in_training", severity="warning", step=4, names="BatchNorm1d")
def no_eval_before_the_evaluation(injected: bool) -> None:
    model = normed()

    def evaluate(held_out: Iterable[list[Tensor]]) -> None:
        model.train(injected)
        for x, _ in held_out:
            model(x)

    evaluated(model, evaluate)


class Dropping(nn.Module):
    """Classifies with dropout and attention that are functions."""

    def __init__(self, dropout: bool, attention: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)
        self.dropout, self.attention = dropout, attention

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)[None]
        p = 0.1 if self.training or self.attention else 0.0
        hidden = F.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=p)[0]
        hidden = F.dropout(hidden, 0.2) if self.dropout else F.dropout(hidden, 0.2, self.training)
        return self.last(hidden)


def in_evaluation_mode(model: nn.Module) -> Callable[[Iterable[list[Tensor]]], None]:
    """Return an evaluation of ``model``."""

    def evaluate(held_out: Iterable[list[Tensor]]) -> None:
        model.eval()
        for x, _ in held_out:
            model(x)

    return evaluate


@fault(rule="module_modes", kind="dropout_in_evaluation", severity="warning", step=4, names="`F.dropout`")
def functional_dropout_in_the_evaluation(injected: bool) -> None:
    model = Dropping(dropout=injected, attention=False)
    evaluated(model, in_evaluation_mode(model))


@fault(
    rule="module_modes",
    kind="dropout_in_evaluation",
    severity="warning",
    step=4,
    names="`F.scaled_dot_product_attention`",
)
def attention_drops_in_the_evaluation(injected: bool) -> None:
    model = Dropping(dropout=False, attention=injected)
    evaluated(model, in_evaluation_mode(model))


@fault(
    rule="module_modes", kind="initial_statistics", severity="warning", step=4, names="running mean of `1`"
)
def batch_norm_without_momentum(injected: bool) -> None:
    model = nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16, momentum=0.0 if injected else 0.1), nn.Linear(16, 3)
    )
    evaluated(model, in_evaluation_mode(model))


@control
def statistics_of_batch_norm_estimated_again() -> None:
    """As for an average of weights: the batches of the training set, in training mode."""
    model = normed()
    loader = DataLoader(samples(), batch_size=8)

    def estimate(_: Iterable[list[Tensor]]) -> None:
        torch.optim.swa_utils.update_bn(loader, model)

    evaluated(model, estimate)


@control
def samples_from_dropout() -> None:
    """Several forwards of each batch in training mode give a spread."""
    model = normed()

    def sample(held_out: Iterable[list[Tensor]]) -> None:
        for x, _ in held_out:
            torch.stack([model(x) for _ in range(4)]).std(0)

    evaluated(model, sample)


@control
def dropout_that_is_written_out_as_active() -> None:
    model = perceptron()

    def sample(held_out: Iterable[list[Tensor]]) -> None:
        model.eval()
        for x, _ in held_out:
            F.dropout(model(F.dropout(x, 0.1, training=True)), 0.1, True)

    evaluated(model, sample)


@control
def pseudo_labels_of_unlabelled_batches() -> None:
    """Their forward without gradients is in training mode, and is followed by one with gradients."""
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labelled, unlabelled = (DataLoader(samples(40), batch_size=8, shuffle=True) for _ in range(2))
    for _ in range(2):
        for (x, y), (weak, _) in zip(labelled, unlabelled, strict=True):
            with torch.no_grad():
                guess = model(weak).argmax(1)
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + F.cross_entropy(model(weak), guess)).backward()
            optimizer.step()


def two_phases(model: nn.Module, mode_of: Callable[[int], bool], steps: Callable[[int], bool]) -> None:
    """Train for three epochs on two loaders by turns; ``mode_of`` and ``steps`` are by their number."""
    loaders = [DataLoader(samples(32), 8, shuffle=True), DataLoader(samples(24), 8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for number, loader in enumerate(loaders):
            model.train(mode_of(number))
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                if steps(number):
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()


@fault(
    rule="module_modes",
    kind="steps_on_evaluation",
    also="trained_in_evaluation",
    severity="warning",
    step=12,
    names="24 samples",
)
def evaluation_that_takes_steps(injected: bool) -> None:
    two_phases(normed(), lambda number: not number, lambda number: injected or not number)


@fault(rule="module_modes", kind="steps_on_evaluation", severity="warning", step=12, names="24 samples")
def evaluation_without_dropout_that_takes_steps(injected: bool) -> None:
    two_phases(perceptron(), lambda number: not number, lambda number: injected or not number)


@control
def two_data_sets_by_turns() -> None:
    """As for the weights and the architecture of a search."""
    two_phases(normed(), lambda _: True, lambda _: True)


@control
def evaluation_with_gradients_and_no_step() -> None:
    two_phases(perceptron(), lambda number: not number, lambda number: not number)


@control
def second_stage_in_evaluation_mode() -> None:
    """A model is trained on one data set, and then on another, with its norms as they are."""
    model = perceptron()
    train(model.train(), loader=DataLoader(samples(32), 8))
    train(model.eval(), loader=DataLoader(samples(32), 8))
