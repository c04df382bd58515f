"""Batches in the wrong order, or the same again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from faults.silent.loop import Loop, control, fault, perceptron, train


def epochs(
    loader: DataLoader[tuple[Tensor, ...]],
    before_epoch: Callable[[int], object] = lambda _: None,
    count: int = 4,
) -> None:
    """Train for some epochs, each with an evaluation in a fixed order."""
    model = perceptron()
    evaluation = DataLoader(loader.dataset, batch_size=8)

    def evaluate(_: int) -> None:
        with torch.no_grad():
            for x, y in evaluation:
                F.cross_entropy(model(x), y)

    loop = Loop(model, loader=loader, epochs=count)
    loop.before_epoch, loop.after_epoch = before_epoch, evaluate
    loop.run()


def samples(count: int = 32) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4), torch.randint(0, 3, (count,)))


@fault(rule="repeated_data", severity="warning", step=8, kind="seeded", also="order", names="manual_seed(0)")
def seeded_in_every_epoch(injected: bool) -> None:
    loader = DataLoader(samples(), batch_size=8, shuffle=True)
    epochs(loader, lambda epoch: torch.manual_seed(0 if injected else epoch))


@fault(rule="repeated_data", severity="warning", step=7, kind="order", names="DistributedSampler")
def no_set_epoch(injected: bool) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(samples(64), num_replicas=2, rank=0)
    loader = DataLoader(sampler.dataset, batch_size=8, sampler=sampler)
    epochs(loader, lambda _: None if injected else sampler.set_epoch(_))


def loaders_anew(
    seed_of: Callable[[int], int], *, count: int = 4, is_optimizer_anew: bool = False, shuffle: bool = True
) -> None:
    """Train for some epochs, each with a loader of its own over the same data."""
    data, model = samples(), perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(count):
        if is_optimizer_anew:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(seed_of(epoch))
        for x, y in DataLoader(data, batch_size=8, shuffle=shuffle, generator=generator):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@fault(rule="repeated_data", severity="warning", step=11, kind="order", names="RandomSampler")
def loader_with_the_same_seed_for_each_epoch(injected: bool) -> None:
    loaders_anew(lambda epoch: 0 if injected else epoch)


@control
def two_loaders_with_the_same_seed() -> None:
    loaders_anew(lambda _: 0, count=2)


@control
def optimizers_that_are_compared_on_the_same_order() -> None:
    loaders_anew(lambda _: 0, is_optimizer_anew=True)


@control
def loader_anew_in_the_order_of_the_data() -> None:
    loaders_anew(lambda _: 0, shuffle=False)


@fault(rule="repeated_data", severity="warning", step=3, kind="first", names="loader of TensorDataset")
def first_batch_only(injected: bool) -> None:
    loader = DataLoader(samples(), batch_size=8)
    endless = itertools.cycle(loader)

    def data(count: int) -> Iterator[list[Tensor]]:
        for _ in range(count):
            yield next(iter(loader)) if injected else next(endless)

    train(perceptron(), data=data)


@control
def whole_data_in_one_batch() -> None:
    epochs(DataLoader(samples(8), batch_size=8, shuffle=True))


@control
def two_batches_in_random_order() -> None:
    epochs(DataLoader(samples(16), batch_size=8, shuffle=True))


@fault(rule="repeated_data", severity="error", step=3, kind="stale", names="loader of TensorDataset")
def batch_of_another_name(injected: bool) -> None:
    loader = DataLoader(samples(160), batch_size=8)
    x, _ = next(iter(loader))
    train(perceptron(), loader=((x if injected else images, labels) for images, labels in loader))


@fault(rule="repeated_data", severity="info", step=7, kind="held", names="loader of TensorDataset")
def one_batch(injected: bool) -> None:
    batch = next(iter(DataLoader(samples(32 if injected else 8), batch_size=8)))
    train(perceptron(), data=lambda count: [batch] * count)


def indexed(draw: Callable[[], Tensor], **options: Any) -> None:
    """Train on rows of tensors that are chosen by hand."""
    inputs, labels = torch.randn(64, 4), torch.randint(0, 3, (64,))

    def data(count: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(count):
            rows = draw()
            yield inputs[rows], labels[rows]

    train(perceptron(), data=data, **options)


@fault(rule="repeated_data", severity="warning", step=7, kind="same", names="8 samples")
def same_rows_at_every_step(injected: bool) -> None:
    indexed((lambda: torch.arange(8)) if injected else (lambda: torch.randint(64, (8,))))


@fault(rule="repeated_data", severity="info", step=7, kind="perhaps_same", names="8 samples")
def same_rows_and_a_loss_written_out(injected: bool) -> None:
    """The targets are not known."""
    indexed(
        (lambda: torch.arange(8)) if injected else (lambda: torch.randint(64, (8,))),
        loss_of=lambda out, y: (out[:, 0] - y).square().mean(),
    )


@control
def one_batch_that_is_kept() -> None:
    """As to test whether a model can learn it; each step gets views of it."""
    x, y = torch.randn(64, 4)[:8], torch.randint(0, 3, (8,))
    train(perceptron(), data=lambda count: ((x[:, :], y[:]) for _ in range(count)))


@control
def arrays_that_are_kept() -> None:
    """Each step makes tensors of the same NumPy arrays, as tutorials do with all of their data."""
    x, y = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32), np.arange(16) % 3
    train(perceptron(), data=lambda count: ((torch.from_numpy(x), torch.from_numpy(y)) for _ in range(count)))


@control
def state_that_is_made_anew() -> None:
    """The script keeps its only batch; the zeros of a hidden state are new in each step."""
    x, y = torch.randn(8, 5, 4), torch.randint(0, 3, (8,))
    model = torch.nn.GRU(4, 3, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        outputs, _ = model(x, torch.zeros(1, 8, 3))
        F.cross_entropy(outputs[:, -1], y).backward()
        optimizer.step()


@control
def points_of_a_grid() -> None:
    """All points of an interval, computed at each step."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    train(
        model,
        loss_of=F.mse_loss,
        data=lambda count: ((x, x.sin()) for x in (torch.linspace(0, 3, 50)[:, None] for _ in range(count))),
    )


@control
def one_observation_at_every_step() -> None:
    """An agent begins each episode in the same state."""
    train(
        perceptron(), data=lambda count: ((torch.eye(4)[:1], torch.randint(0, 3, (1,))) for _ in range(count))
    )


@control
def same_inputs_with_other_targets() -> None:
    inputs = torch.randn(8, 4)
    train(
        perceptron(), data=lambda count: ((inputs.clone(), torch.randint(0, 3, (8,))) for _ in range(count))
    )


Sample = tuple[Tensor, Tensor]


class Numbers(Dataset[Sample]):
    """Samples with noise; ``rng`` is where the noise comes from, None for NumPy's global generator."""

    def __init__(self, rng: np.random.Generator | None, *, uses_index: bool = True) -> None:
        self.rng, self.uses_index = rng, uses_index

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Sample:
        return torch.full((4,), index * self.uses_index / 64) + self._noise(), torch.tensor(index % 3)

    def _noise(self) -> float:
        return float(np.random.normal() if self.rng is None else self.rng.normal())


class Placeholder(Numbers):
    def __getitem__(self, index: int) -> Sample:
        return super().__getitem__(index * self.uses_index)

    def _noise(self) -> float:
        return 0.0


@fault(rule="repeated_data", severity="warning", step=3, kind="constant", names="Placeholder")
def index_that_is_not_used(injected: bool) -> None:
    epochs(DataLoader(Placeholder(None, uses_index=not injected), batch_size=8))


@fault(rule="repeated_data", severity="warning", step=1, kind="generator", names="`rng`")
def generator_in_every_worker(injected: bool) -> None:
    data = Numbers(np.random.default_rng(0) if injected else None)
    epochs(DataLoader(data, batch_size=8, num_workers=2))


class Stream(IterableDataset[Sample]):
    def __init__(self, *, is_split: bool) -> None:
        self.is_split = is_split
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        order = self.rng.permutation(64)
        if self.is_split and info is not None:
            order = order[info.id :: info.num_workers]
        for number in order:
            yield torch.full((4,), number / 64), torch.tensor(number % 3)


@fault(rule="repeated_data", severity="warning", step=3, kind="workers", names="Stream")
def stream_that_is_not_split(injected: bool) -> None:
    epochs(DataLoader(Stream(is_split=not injected), batch_size=8, num_workers=2))


@control
def whole_graph_with_batches_of_nodes() -> None:
    """The model gets the whole data at every step; a loader chooses which outputs count."""
    data, labels = torch.randn(128, 4), torch.randint(0, 3, (128,))
    loader = DataLoader(TensorDataset(torch.randperm(128)), batch_size=8)
    train(
        perceptron(),
        loss_of=lambda out, nodes: F.cross_entropy(out[nodes], labels[nodes]),
        loader=((data, nodes) for (nodes,) in loader),
        evaluates=False,
    )


@control
def whole_data_at_every_step() -> None:
    data, labels = torch.randn(64, 4), torch.randint(0, 3, (64,))
    train(perceptron(), data=lambda count: [(data, labels)] * count)


@control
def images_with_an_empty_border() -> None:
    """Pixels at equal distances are those of the border in every image."""
    images = torch.zeros(64, 1, 28, 28)
    images[..., 4:24, 4:24] = torch.rand(64, 1, 20, 20)
    train(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 3)),
        loss_of=lambda out, _: out.square().mean(),
        loader=DataLoader(TensorDataset(images, images), batch_size=8),
        evaluates=False,
    )


@control
def generator_seeded_by_worker() -> None:
    def seed(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.rng = np.random.default_rng(worker)

    data = Numbers(np.random.default_rng(0))
    epochs(DataLoader(data, batch_size=8, shuffle=True, num_workers=2, worker_init_fn=seed))


@control
def whole_data_for_every_index() -> None:
    """As for fitting one image: an index is a step, and the loader adds a dimension."""
    data = (torch.randn(64, 4), torch.randint(0, 3, (64,)))
    train(perceptron(), data=lambda count: ((x[0], y[0]) for x, y in DataLoader([data] * count)))


@control
def positions_of_one_row() -> None:
    """A field that belongs to no sample is the same in every batch."""

    def collate(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        x, y = (torch.stack(one) for one in zip(*rows, strict=True))
        return {"x": x, "labels": y, "position_ids": torch.arange(4)[None]}

    loader = DataLoader(samples(), batch_size=8, collate_fn=collate)
    train(perceptron(), loader=((one["x"] + one["position_ids"], one["labels"]) for one in loader))


def seeded_by_number(worker: int) -> None:
    np.random.seed(worker)


def seeded_by_torch(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)


def with_workers(init: Callable[[int], None] | None, data: Numbers | None = None, **options: Any) -> None:
    loader = DataLoader(data or Numbers(None), 8, shuffle=True, num_workers=2, worker_init_fn=init, **options)
    epochs(loader, count=3)


@fault(rule="repeated_data", severity="warning", step=8, kind="worker_seed", names="`np.random`")
def workers_seeded_by_their_number(injected: bool) -> None:
    with_workers(seeded_by_number if injected else seeded_by_torch)


@fault(rule="repeated_data", severity="warning", step=8, kind="worker_seed", names="`np.random`")
def workers_seeded_by_a_constant(injected: bool) -> None:
    seed = 42

    def seed_everything(value: int) -> None:
        np.random.seed(value)
        torch.manual_seed(value)

    with_workers((lambda _: seed_everything(seed)) if injected else None)


@control
def seeded_workers_that_persist() -> None:
    with_workers(seeded_by_number, persistent_workers=True)


@control
def seeded_workers_whose_samples_draw_nothing() -> None:
    with_workers(seeded_by_number, Placeholder(None))


@control
def seeded_workers_whose_samples_draw_elsewhere() -> None:
    def seed(worker: int) -> None:
        torch.manual_seed(worker)

    with_workers(seed)


@control
def workers_seeded_by_a_counter() -> None:
    """The number of the epoch is in a variable of another name."""
    rounds = 0

    def seed(worker: int) -> None:
        np.random.seed(1000 * rounds + worker)

    loader = DataLoader(Numbers(None), 8, shuffle=True, num_workers=2, worker_init_fn=seed)

    def begin(number: int) -> None:
        nonlocal rounds
        rounds = number

    epochs(loader, begin, count=3)
