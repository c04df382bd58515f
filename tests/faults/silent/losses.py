"""Loss functions with an input that they are not made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from faults.silent.loop import STEPS, batches, control, fault, perceptron, train


@fault(rule="loss_input", severity="warning", step=0, kind="softmax_twice", names="output of softmax")
def softmax_before_cross_entropy(injected: bool) -> None:
    train(perceptron(nn.Softmax(dim=1)) if injected else perceptron())


class Mixture(nn.Module):
    """A mixture of the distributions of experts, or of their logits."""

    def __init__(self, of_probabilities: bool) -> None:
        super().__init__()
        self.experts, self.gate = nn.ModuleList(perceptron() for _ in range(3)), nn.Linear(4, 3)
        self.of_probabilities = of_probabilities

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts])
        parts = outputs.softmax(2) if self.of_probabilities else outputs
        return (self.gate(x).softmax(1).T[..., None] * parts).sum(0)


@fault(rule="loss_input", severity="warning", step=0, kind="probabilities", names="mixture of softmaxes")
def mixture_of_softmaxes(injected: bool) -> None:
    train(Mixture(injected), is_compiled=False)


@control
def logarithm_of_a_mixture() -> None:
    train(Mixture(True), loss_of=lambda out, y: F.cross_entropy(out.log(), y), is_compiled=False)


def targets_of(classes: Callable[[int], Tensor]) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """Return batches of 128 samples, and the classes of each of them."""
    return lambda count: ((torch.randn(128, 4), classes(step)) for step in range(count))


@fault(rule="loss_input", severity="warning", step=7, kind="one_class", names="class 1")
def targets_of_one_class(injected: bool) -> None:
    classes = torch.ones(128, dtype=torch.long)
    train(perceptron(), data=targets_of(lambda _: classes if injected else torch.randint(3, (128,))))


class Contrast(nn.Module):
    """Similarities of each sample to another view of it, which come first, and to other samples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        one, other = (F.normalize(self.encoder(x + 0.1 * torch.randn_like(x))) for _ in range(2))
        return torch.cat([(one * other).sum(1, keepdim=True), one @ other.detach().flip(0).T], 1) / 0.1


@control
def contrastive_loss() -> None:
    train(Contrast(), data=targets_of(lambda _: torch.zeros(128, dtype=torch.long)), is_compiled=False)


@fault(
    rule="loss_input", severity="warning", step=0, kind="sigmoid_before_softmax", names="output of a sigmoid"
)
def sigmoid_before_cross_entropy(injected: bool) -> None:
    train(perceptron(nn.Sigmoid()) if injected else perceptron())


@fault(rule="loss_input", severity="error", step=0, kind="nll_of_scores", names="made by addmm")
def nll_of_logits(injected: bool) -> None:
    train(perceptron() if injected else perceptron(nn.LogSoftmax(dim=1)), loss_of=F.nll_loss)


@fault(rule="loss_input", severity="warning", step=0, kind="nll_of_probabilities", names="made by softmax")
def nll_of_probabilities(injected: bool) -> None:
    train(perceptron(nn.Softmax(dim=1) if injected else nn.LogSoftmax(dim=1)), loss_of=F.nll_loss)


@fault(
    rule="loss_input",
    severity="warning",
    step=0,
    kind="sigmoid_twice",
    names="binary_cross_entropy_with_logits",
)
def sigmoid_twice(injected: bool) -> None:
    model = perceptron(nn.Sigmoid()) if injected else perceptron()
    train(model, loss_of=lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 3).float()))


class OwnSoftmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        exponentials = (x - x.max(dim=1, keepdim=True).values).exp()
        return exponentials / exponentials.sum(dim=1, keepdim=True)


@fault(rule="loss_input", severity="warning", step=0, kind="softmax_twice", names="output of softmax")
def own_softmax_before_cross_entropy(injected: bool) -> None:
    """The control takes the logarithm of its probabilities."""
    model = perceptron(OwnSoftmax())
    train(model, loss_of=lambda out, y: F.cross_entropy(out if injected else (out + 1e-8).log(), y))


@fault(rule="loss_input", severity="warning", step=0, kind="softmax_twice", names="output of softmax")
def softmax_before_smoothed_labels(injected: bool) -> None:
    model = perceptron(nn.Softmax(dim=1)) if injected else perceptron()
    train(model, loss_of=nn.CrossEntropyLoss(label_smoothing=0.1))


@fault(rule="loss_input", severity="warning", step=0, kind="nll_of_probabilities", names="made by softmax")
def nll_of_own_softmax(injected: bool) -> None:
    train(perceptron(OwnSoftmax() if injected else nn.LogSoftmax(dim=1)), loss_of=F.nll_loss)


def regress(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    train(nn.Sequential(model, nn.Linear(3, 1)), loss_of=lambda out, y: loss_of(out, y.float()))


@fault(rule="loss_input", severity="error", step=0, kind="broadcast", names="shape [8, 1]")
def broadcast_in_mse(injected: bool) -> None:
    regress(perceptron(), lambda out, y: F.mse_loss(out if injected else out.squeeze(1), y))


@fault(rule="loss_input", severity="error", step=0, kind="broadcast", names="shape [8, 1]")
def broadcast_by_hand(injected: bool) -> None:
    regress(perceptron(), lambda out, y: (y if injected else y[:, None]).sub(out).abs().mean() + 1.0)


@fault(rule="loss_input", severity="error", step=0, kind="broadcast", names="shape [8, 1]")
def broadcast_below_a_root(injected: bool) -> None:
    regress(perceptron(), lambda out, y: ((y if injected else y[:, None]) - out).square().mean().sqrt())


@fault(rule="loss_input", severity="error", step=0, kind="broadcast", names="shape [8, 1]")
def broadcast_of_advantages(injected: bool) -> None:
    """The logarithms of probabilities are ``[N, 1]``, and what they are weighted with is ``[N]``."""
    regress(perceptron(), lambda out, y: -(F.logsigmoid(out) * (y if injected else y[:, None])).mean())


@fault(rule="loss_input", severity="error", step=0, kind="broadcast", names="shape [8, 1]")
def broadcast_in_own_cross_entropy(injected: bool) -> None:
    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        p, y = out.sigmoid(), (y > 0).float()
        y = y if injected else y[:, None]
        return -(y * torch.log(p + 1e-6) + (1 - y) * torch.log(1 - p + 1e-6)).mean()

    regress(perceptron(), loss_of)


@control
def samples_at_risk() -> None:
    """The partial likelihood of Cox compares each sample with those that are still at risk."""

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        at_risk = (y[None] >= y[:, None]).float()
        return (torch.log((at_risk * out[:, 0].exp()).sum(1)) - out[:, 0]).mean()

    regress(perceptron(), loss_of)


@control
def pairwise_ranking() -> None:
    """Differences of all pairs of predictions are meant."""
    regress(perceptron(), lambda out, y: (out - out.T).sub(y[:, None] - y[None]).square().mean())


@control
def classes_of_probabilities() -> None:
    train(perceptron(nn.Softmax(dim=1)), loss_of=lambda out, y: F.nll_loss(torch.log(out + 1e-8), y))


@control
def probabilities_in_binary_cross_entropy() -> None:
    train(
        perceptron(nn.Sigmoid()),
        loss_of=lambda out, y: F.binary_cross_entropy(out, F.one_hot(y, 3).float()),
        autocast=False,  # torch refuses this function under autocast
    )


@control
def probabilities_of_a_teacher() -> None:
    teacher = perceptron(nn.Softmax(dim=1)).requires_grad_(False)
    train(perceptron(), data=lambda count: [(x, teacher(x)) for x, _ in batches(count)])


@control
def batches_of_one_sample() -> None:
    """``[1, 1]`` and ``[1]`` broadcast to one difference."""
    train(
        nn.Linear(4, 1),
        loss_of=lambda out, y: (out - y).square().mean(),
        data=lambda count: [(x[:1], y[:1].float()) for x, y in batches(count)],
    )


def pairs(targets: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4), torch.randn(targets)) for _ in range(8 * STEPS)]


def stacked(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]), torch.cat([y for _, y in samples])


@fault(rule="loss_input", severity="error", step=0, kind="sizes", names="8 and 16 samples")
def two_targets_per_input(injected: bool) -> None:
    train(
        nn.Linear(4, 1),
        loss_of=lambda out, y: (out - (y if injected else y[:, None])).square().mean(),
        loader=DataLoader(pairs(2 if injected else 1), batch_size=8, collate_fn=stacked),
        evaluates=False,
    )


@control
def one_prediction_and_several_levels() -> None:
    """Each prediction is compared with the same five levels, which are no part of the batch."""
    levels = torch.linspace(-1, 1, 5)
    train(
        nn.Linear(4, 1),
        loss_of=lambda out, _: (out - levels).square().mean(),
        loader=DataLoader(pairs(1), batch_size=8, collate_fn=stacked),
    )


def distilled(scores_of: Callable[[Tensor], Tensor], **options: Any) -> None:
    """Follow the distribution of a teacher by ``kl_div``."""
    teacher = perceptron(nn.Softmax(dim=1)).requires_grad_(False)
    train(
        perceptron(),
        loss_of=lambda out, x: F.kl_div(scores_of(out), teacher(x).float(), reduction="batchmean", **options),
        data=lambda count: [(x, x) for x, _ in batches(count)],
        is_compiled=False,
    )


@fault(rule="loss_input", severity="warning", step=0, kind="kl_of_probabilities", names="`kl_div` is given")
def kl_div_of_probabilities(injected: bool) -> None:
    distilled(lambda out: out.softmax(1) if injected else out.log_softmax(1))


@control
def kl_div_of_mixed_logarithms() -> None:
    """The input is the logarithm of a mean of probabilities."""
    distilled(lambda out: (0.5 * out.softmax(1) + 0.5 / 3).log())


@control
def kl_div_of_measures() -> None:
    """Logarithms of values that do not add up to 1, some of which exceed 1."""
    distilled(lambda out: out)


def distilled_with_labels(scores_of: Callable[[Tensor], Tensor]) -> None:
    """Follow the distribution of a teacher, and the labels."""
    teacher = perceptron(nn.Softmax(dim=1)).requires_grad_(False)

    def loss_of(out: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        soft = F.kl_div(scores_of(out), teacher(x).float(), reduction="batchmean")
        return F.cross_entropy(out, y) + soft

    train(
        perceptron(),
        loss_of=loss_of,
        data=lambda count: [(x, (x, y)) for x, y in batches(count)],
        is_compiled=False,
    )


@fault(rule="loss_input", severity="warning", step=0, kind="kl_of_probabilities", names="`kl_div` is given")
def kl_div_of_probabilities_and_cross_entropy(injected: bool) -> None:
    """Distillation with both losses: the cross-entropy gets what it expects."""
    distilled_with_labels(lambda out: out.softmax(1) if injected else out.log_softmax(1))


def gathered(dimension: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss that chooses the log-probabilities of the targets itself."""
    return lambda out, y: -out.log_softmax(dimension).gather(-1, y[:, None]).mean()


@fault(rule="loss_input", severity="error", step=0, kind="softmax_dimension", names="`gather` takes its")
def log_softmax_over_the_batch_and_gather(injected: bool) -> None:
    train(perceptron(), loss_of=gathered(0 if injected else -1))


@control
def columns_of_similarities() -> None:
    """A contrastive loss whose log-probabilities are those of the other view."""
    keys = torch.randn(8, 3)

    def loss_of(out: Tensor, _: Tensor) -> Tensor:
        similarities = out @ keys[: len(out)].T
        pairs = torch.arange(len(out))[:, None]
        return -(
            similarities.log_softmax(0).gather(1, pairs) + similarities.log_softmax(1).gather(1, pairs)
        ).mean()

    train(perceptron(), loss_of=loss_of)


@control
def gather_of_the_logarithm_over_time() -> None:
    """Attention over positions: the softmax runs over them, and so does the choice."""
    train(perceptron(), loss_of=lambda out, y: -out.T.log_softmax(0).gather(0, y[None]).mean())


@fault(rule="loss_input", severity="error", step=0, kind="one_output", names="over a single class")
def cross_entropy_over_one_class(injected: bool) -> None:
    outputs = 1 if injected else 2
    train(nn.Linear(4, outputs), loss_of=lambda out, y: F.cross_entropy(out, y.clamp(max=outputs - 1)))


@fault(rule="loss_input", severity="error", step=0, kind="one_output", names="over a single class")
def cross_entropy_over_one_class_of_pixels(injected: bool) -> None:
    outputs = 1 if injected else 2
    train(
        nn.Conv2d(1, outputs, 3, padding=1),
        loss_of=F.cross_entropy,
        data=lambda count: (
            (torch.randn(2, 1, 6, 6), torch.randint(0, outputs, (2, 6, 6))) for _ in range(count)
        ),
    )


@control
def one_output_and_a_binary_loss() -> None:
    train(
        nn.Linear(4, 1),
        loss_of=lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], (y > 0).float()),
    )


@control
def attention_over_one_key() -> None:
    """A softmax over one value inside of the model is what a sequence of length 1 has."""
    model = nn.MultiheadAttention(4, 1, batch_first=True)
    train(
        lambda x: model(x[:, None], x[:, None], x[:, None])[0][:, 0],
        parts=[model],
        loss_of=F.cross_entropy,
    )


def masked(share: float, first: int = 0) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """Return batches of which a share of the targets is ignored, and all of them in the first so many."""

    def data(count: int) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(count):
            x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
            ignored = torch.arange(64) < (64 if number < first else int(64 * share))
            yield x, y.masked_fill(ignored, -100)

    return data


@fault(rule="loss_input", severity="error", step=3, kind="no_target", names="all of them are ignored")
def every_target_ignored(injected: bool) -> None:
    train(
        perceptron(),
        loss_of=lambda out, y: F.cross_entropy(out, y, reduction="sum") / 64,
        data=masked(1.0 if injected else 0.9),
    )


@control
def first_targets_ignored() -> None:
    """Batches without a target, before others with some."""
    train(
        perceptron(),
        loss_of=lambda out, y: F.cross_entropy(out, y, reduction="sum") / 64,
        data=masked(0.5, first=3),
    )


class Recogniser(nn.Module):
    """Gives log-probabilities ``[frames, N, labels]`` of sequences ``[N, frames, 4]``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).transpose(0, 1).float().log_softmax(-1)


FRAMES = 6
LONG_FROM = 12
"""Step from which on one target is too long."""


def recognise(
    length: int, labels: Callable[[int], Tensor] = lambda count: torch.arange(count) % 5 + 1, **options: Any
) -> None:
    """Train on eight targets of up to four labels, one of which has ``length`` from step 12 on."""

    def data(count: int) -> Iterator[tuple[Tensor, Any]]:
        for step in range(count):
            lengths = torch.randint(1, 4, (8,))
            targets = torch.stack([labels(8) for _ in range(8)])
            if step >= LONG_FROM:
                lengths[3] = length
            yield torch.randn(8, FRAMES, 4), (targets, lengths)

    def loss_of(out: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return F.ctc_loss(out, target[0], torch.full((8,), FRAMES), target[1], **options)

    train(Recogniser(), data=data, loss_of=loss_of, steps=16, is_compiled=False)


@fault(rule="loss_input", severity="error", step=12, kind="ctc", names="needs 7 frames, and has 6")
def ctc_target_longer_than_its_frames(injected: bool) -> None:
    recognise(7 if injected else 6)


@fault(rule="loss_input", severity="error", step=12, kind="ctc", names="needs 7 frames, and has 6")
def ctc_target_with_equal_labels(injected: bool) -> None:
    recognise(4 if injected else 3, lambda count: torch.ones(count).long())


@control
def ctc_that_ignores_infinity() -> None:
    recognise(7, zero_infinity=True)


@control
def ctc_of_as_many_labels_as_frames() -> None:
    recognise(6)


@control
def ctc_of_no_label() -> None:
    recognise(0)


@control
def ctc_of_equal_labels_that_fit() -> None:
    recognise(3, lambda count: torch.ones(count).long())


@control
def ctc_of_padding_behind_the_labels() -> None:
    """What is behind the length of a target does not count."""
    recognise(4, lambda count: torch.tensor([1, 2, 3, 4, 0, 0, 0, 0])[:count])


@control
def ctc_of_targets_in_one_row() -> None:
    def data(count: int) -> Iterator[tuple[Tensor, Any]]:
        for _ in range(count):
            lengths = torch.randint(1, 4, (8,))
            yield torch.randn(8, FRAMES, 4), (torch.randint(1, 6, (int(lengths.sum()),)), lengths)

    def loss_of(out: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return F.ctc_loss(out, target[0], [FRAMES] * 8, target[1].tolist())

    train(Recogniser(), data=data, loss_of=loss_of, is_compiled=False)


CLASSES = 4


def labelled(order: Callable[[Tensor], Tensor], per_class: int = 64) -> TensorDataset:
    """Return samples of several classes, whose labels are in the order of a function."""
    y = order(torch.arange(CLASSES).repeat_interleave(per_class))
    return TensorDataset(torch.randn(len(y), 4) + y[:, None], y)


def train_epochs(epochs: int, *loaders: DataLoader[Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for loader in loaders:
            train(model, optimizer, loader=loader)


def as_they_are(labels: Tensor) -> Tensor:
    return labels


@fault(rule="loss_input", kind="sorted", severity="warning", step=8, names="sorted by class")
def batches_sorted_by_class(injected: bool) -> None:
    train_epochs(2, DataLoader(labelled(as_they_are), batch_size=16, shuffle=not injected))


@fault(rule="loss_input", kind="sorted", severity="warning", step=9, names="sorted by class")
def batches_sorted_downwards_with_mixed_borders(injected: bool) -> None:
    def order(labels: Tensor) -> Tensor:
        return labels.flip(0) if injected else labels[torch.randperm(len(labels))]

    train_epochs(1, DataLoader(labelled(order, per_class=60), batch_size=16))


@control
def data_shuffled_before_training() -> None:
    train_epochs(2, DataLoader(labelled(lambda y: y[torch.randperm(len(y))]), batch_size=16))


@control
def classes_interleaved_in_blocks() -> None:
    """Batches of one class each, in turn."""
    blocks = torch.arange(CLASSES).repeat(6).repeat_interleave(16)
    train_epochs(1, DataLoader(labelled(lambda y: blocks), batch_size=16))


@control
def tasks_one_after_the_other() -> None:
    """Class-incremental learning: a loader for each class."""
    data = labelled(as_they_are)
    parts = [Subset(data, range(64 * c, 64 * c + 64)) for c in range(CLASSES)]
    train_epochs(1, *(DataLoader(part, batch_size=16) for part in parts))


@control
def batches_of_one_class_by_a_sampler() -> None:
    data = labelled(as_they_are)
    order = [list(range(16 * b, 16 * b + 16)) for b in range(len(data) // 16)]
    train_epochs(1, DataLoader(data, batch_sampler=order))


@control
def sorted_data_with_few_samples_in_a_batch() -> None:
    train_epochs(1, DataLoader(labelled(as_they_are, per_class=8), batch_size=2))


class Tagger(nn.Module):
    """Scores of tokens, by a linear layer that torch splits: a recurrent layer returns a transposed view."""

    def __init__(self, *heads: nn.Module) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(2, 8, batch_first=True)
        self.head = nn.Sequential(nn.Linear(8, 3), *heads)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.recurrent(x.unflatten(1, (2, 2)))[0])
        return scores.flatten(0, 1)


def of_tokens(loss: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss of two tokens per sample, both of its class."""
    return lambda out, y: loss(out, y.repeat_interleave(2))


@fault(rule="loss_input", severity="error", step=0, kind="nll_of_scores", names="made by linear")
def nll_of_logits_behind_a_recurrent_layer(injected: bool) -> None:
    train(Tagger() if injected else Tagger(nn.LogSoftmax(dim=2)), loss_of=of_tokens(F.nll_loss))


@fault(rule="loss_input", severity="error", step=3, kind="no_target", names="all of them are ignored")
def every_target_ignored_behind_a_recurrent_layer(injected: bool) -> None:
    loss = of_tokens(lambda out, y: F.cross_entropy(out, y, reduction="sum") / 128)
    train(Tagger(), loss_of=loss, data=masked(1.0 if injected else 0.9))
