"""A spike names its samples: injected ones, a control, and shares against one backward per sample."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import backlight
from backlight.capture.forward import Forwards
from backlight.capture.hub import HUB
from backlight.capture.loss_graph import SHOWS_HOOKS
from backlight.capture.step_inputs import StepInputs
from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.health import samples_monitor
from backlight.monitors.health.instrument.sample_shares import samples_of_step
from backlight.monitors.health.model.spike_samples import SAMPLES, samples_of
from backlight.records import Finding
from backlight.store.read.run import Run, open_run
from ranks.launching import run_ranks

STEPS, SPIKE, N, BAD = 40, 35, 16, 5
reads_losses = pytest.mark.skipif(
    not SHOWS_HOOKS, reason="this torch does not show the hooks of saved tensors, so no loss is read"
)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(STEPS * N, 8)
    return x, (x @ torch.randn(8, 4)).argmax(1)


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def order(at: int, bad: int) -> list[int]:
    """Return an order of all samples in which ``bad`` lies at position ``at``."""
    found = torch.randperm(STEPS * N, generator=torch.Generator().manual_seed(1)).tolist()
    found.remove(bad)
    found.insert(at, bad)
    return found


def train(
    path: Path,
    model: nn.Module,
    batches: Iterator[Any] | DataLoader[Any],
    loss_of: Callable[[Any], Tensor],
    *,
    rate: Callable[[int], float] = lambda step: 0.01,
    parts: int = 1,
    every: int = 1,
    decompose: tuple[int, ...] = (),
    thresholds: dict[str, float] | None = None,
) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings: Any = {
        "every": every,
        "health": {"decompose": decompose},
        "monitors": ("health",),
        "quiet": True,
    }
    settings["thresholds"] = {"health": thresholds or {}}
    with backlight.watch(model, optimizer, run=path, **settings):
        for number, batch in enumerate(batches):
            (loss_of(batch) / parts).backward()
            if (number + 1) % parts == 0:
                if parts > 1:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.param_groups[0]["lr"] = rate(number // parts)
                optimizer.step()
                optimizer.zero_grad()
    return open_run(path)


def spike(run: Run) -> Finding:
    found = [f for f in evaluate_rules(run) if f.rule == "spike" and f.subject.step == SPIKE]
    assert found
    return found[0]


def event(run: Run) -> Any:
    (found,) = [e for e in run.events(SAMPLES) if e.step == SPIKE]
    return found.payload


@pytest.mark.slow
def test_thresholds_of_the_run_hold_while_it_goes_on(tmp_path: Path) -> None:
    found = {}
    for name, thresholds in (
        ("default", {}),
        ("higher", {"spike_norm_ratio": 1e9, "spike_loss_ratio": 1e9}),
    ):
        x, y = data()
        x[123] *= 1000
        loader = DataLoader(Samples(x, y), batch_size=N, sampler=order(SPIKE * N + BAD, 123))
        model = classifier()
        run = train(
            tmp_path / name,
            model,
            loader,
            lambda b, model=model: functional.cross_entropy(model(b[0]), b[1]),
            thresholds=thresholds,
        )
        spikes = [f.subject.step for f in evaluate_rules(run) if f.rule == "spike"]
        found[name] = spikes, [e.step for e in run.events(SAMPLES)]
    assert found == {"default": ([SPIKE], [SPIKE]), "higher": ([], [])}


@pytest.mark.slow
def test_more_work_of_a_step_is_no_leap_while_the_run_goes_on(tmp_path: Path) -> None:
    x, y = data()
    model = classifier()
    batches = [(x[i : i + N], y[i : i + N], 1) for i in range(0, STEPS * N, N)]
    batches[SPIKE] = (x, y, STEPS)  # the sum of many more losses

    def loss(batch: tuple[Tensor, Tensor, int]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    run = train(tmp_path / "run", model, iter(batches), loss, rate=lambda step: 1e-4)
    assert run.scalar("loss").values[SPIKE] > 20 * run.scalar("loss").values[SPIKE - 1]
    assert not run.events(SAMPLES)


@pytest.fixture(autouse=True)
def _machine_may_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_monitor, "END_TIMEOUT_S", samples_monitor.TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_corrupted_image_is_named_by_its_dataset_index(tmp_path: Path, workers: int) -> None:
    x, y = data()
    x[123] *= 1000
    loader = DataLoader(Samples(x, y), batch_size=N, sampler=order(SPIKE * N + BAD, 123), num_workers=workers)
    model = classifier()
    run = train(tmp_path / "run", model, loader, lambda b: functional.cross_entropy(model(b[0]), b[1]))
    found = spike(run)
    assert f"Sample {BAD} of {N} (dataset index 123) carries 100 %" in found.detail
    assert any(e.path == f"events/{SAMPLES}, share of sample {BAD}" for e in found.evidence)
    (call,) = event(run)["calls"]
    assert call["indices"] == order(SPIKE * N + BAD, 123)[SPIKE * N : (SPIKE + 1) * N]
    assert call["top"][0]["without"] < 3 * event(run)["usual_norm"]


@pytest.mark.slow
@reads_losses
def test_wrong_label_is_named_by_its_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    y = torch.randint(0, 4, (STEPS * N,))
    x = 6 * functional.one_hot(y, 8).float() + 0.1 * torch.randn(STEPS * N, 8)
    model = nn.Linear(8, 4)
    with torch.no_grad():
        model.weight.copy_(torch.eye(4, 8))  # learned
    y[7] = (y[7] + 1) % 4
    loader = DataLoader(Samples(x, y), batch_size=N, sampler=order(SPIKE * N + BAD, 7))
    run = train(tmp_path / "run", model, loader, lambda b: functional.cross_entropy(model(b[0]), b[1]))
    assert f"Sample {BAD} of {N} (dataset index 7) carries 101 %" in spike(run).detail
    assert event(run)["calls"][0]["highest"][0]["index"] == 7


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.tokens(ids))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.slow
def test_long_run_of_one_token_is_named_by_sample_and_positions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = Language(), []
    with torch.no_grad():
        model.tokens.weight[11] *= 200  # a token that is never trained on
    for step in range(STEPS):
        ids = torch.randint(0, 11, (N, 32))
        if step == SPIKE:
            ids[BAD, 20:31] = 11
        batches.append((ids, (ids + 1) % 11))
    run = train(tmp_path / "run", model, iter(batches), lambda b: model(*b)[1])
    top = event(run)["calls"][0]["top"][0]
    assert top["sample"] == BAD
    assert 20 <= top["first"] <= top["last"] <= 30
    assert f"Sample {BAD} of {N} carries" in spike(run).detail
    assert "of 32 hold" in spike(run).detail


@pytest.mark.slow
def test_batch_of_copies_is_named(tmp_path: Path) -> None:
    x, y = data()
    indices = order(0, 9)
    indices[SPIKE * N : (SPIKE + 1) * N] = [9] * N
    x[9] *= 4
    model = classifier()
    loader = DataLoader(Samples(x, y), batch_size=N, sampler=indices)
    run = train(tmp_path / "run", model, loader, lambda b: functional.cross_entropy(model(b[0]), b[1]))
    assert f"{N} copies of one sample of {N} (dataset index 9) carry 100 %" in spike(run).detail


@pytest.mark.slow
def test_leap_of_the_learning_rate_names_no_sample(tmp_path: Path) -> None:
    x, y = data()
    model = classifier()
    loader = DataLoader(Samples(x, y), batch_size=N, sampler=order(0, 0))
    run = train(
        tmp_path / "run",
        model,
        loader,
        lambda b: functional.cross_entropy(model(b[0]), b[1]),
        rate=lambda step: 60.0 if step == SPIKE - 1 else 0.01 if step < SPIKE else 1e-9,
    )
    found = [f for f in evaluate_rules(run) if f.rule == "spike"]
    assert found
    assert all("No sample stands out" in f.detail for f in found)
    assert event(run)["calls"][0]["share"] == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_microbatch_of_an_accumulation_is_named(tmp_path: Path) -> None:
    x, y = data()
    x[123] *= 1000
    x, y = torch.cat([x, x]), torch.cat([y, y])
    indices = [*order(SPIKE * 2 * N + N + BAD, 123)]
    indices = [*indices, *(i for i in range(STEPS * N) if i != 123), 124][: STEPS * 2 * N]
    indices.remove(123)
    indices.insert(SPIKE * 2 * N + N + BAD, 123)
    model = classifier()
    loader = DataLoader(Samples(x, y), batch_size=N, sampler=indices)
    loss = lambda b: functional.cross_entropy(model(b[0]), b[1])  # noqa: E731
    run = train(tmp_path / "run", model, loader, loss, parts=2)
    assert f"Sample {BAD} of {N} of forward pass 2 (dataset index 123) carries" in spike(run).detail
    assert event(run)["difference"] < 1e-5


@pytest.mark.slow
def test_requested_step_names_the_sample_with_the_largest_share(tmp_path: Path) -> None:
    x, y = data()
    x[123] *= 3  # no spike
    model = classifier()
    loader = DataLoader(Samples(x, y), batch_size=N, sampler=order(SPIKE * N + BAD, 123))
    loss = lambda b: functional.cross_entropy(model(b[0]), b[1])  # noqa: E731
    run = train(tmp_path / "run", model, loader, loss, every=50, decompose=(SPIKE, SPIKE + 1))
    assert [e.payload["cause"] for e in run.events(SAMPLES)] == ["requested", "requested"]
    assert f"Sample {BAD} of {N} (dataset index 123) has the largest share" in samples_of(run, SPIKE)
    assert event(run)["calls"][0]["share"] == pytest.approx(1, abs=1e-4)
    assert not [f for f in evaluate_rules(run) if f.rule == "spike"]
    assert "`backlight run --set health.decompose=3`" in samples_of(run, 3)
    assert f"not decomposed; those of {SPIKE}, {SPIKE + 1} were." in samples_of(run, 3)


def test_request_without_health_or_of_a_negative_step_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"health\.decompose: needs the monitor health, which is not requested",
    ):
        backlight.watch(classifier(), health={"decompose": 3}, monitors=("steptime",))
    with pytest.raises(ValueError, match="decompose: -1: expected numbers of steps from 0 on"):
        backlight.watch(classifier(), health={"decompose": -1})


@pytest.mark.slow
def test_sample_that_is_not_finite_is_named(tmp_path: Path) -> None:
    x, y = data()
    x[123, 2] = torch.nan
    model = classifier()
    loader = DataLoader(Samples(x, y), batch_size=N, sampler=order(SPIKE * N + BAD, 123))
    run = train(tmp_path / "run", model, loader, lambda b: functional.cross_entropy(model(b[0]), b[1]))
    (found,) = [f for f in evaluate_rules(run) if f.rule == "non_finite"]
    assert f"gradient of sample {BAD} of {N} (dataset index 123) is not finite" in found.detail
    assert "Its input holds NaN or Inf." in found.detail


# The decomposition

ZOO: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "dropout": lambda: (
        nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)),
        torch.randn(7, 6),
    ),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
        torch.randn(7, 1, 6, 6),
    ),
    "recurrent": lambda: (Recurrent(), torch.randn(7, 5, 4)),  # has no kernel
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


@reads_losses
@pytest.mark.parametrize("name", ZOO)
def test_shares_are_those_of_one_backward_per_sample(name: str) -> None:
    torch.manual_seed(0)
    model, x = ZOO[name]()
    model, x, y = model.double(), x.double(), torch.randint(0, 3, (7,))
    inputs, forwards = StepInputs(), Forwards()
    inputs.is_requested = True  # there is no optimizer
    HUB.add(inputs)
    forwards.follow([model])
    state = torch.get_rng_state()
    try:
        functional.cross_entropy(model(x), y).backward()
    finally:
        forwards.leave()
        HUB.remove(inputs)
    named = dict(model.named_parameters())
    found = samples_of_step(
        inputs.calls, list(named.values()), [p.grad for p in named.values()], list(named),
        scale=1.0, loss_scale=1.0, world_size=1,
    )  # fmt: skip
    rows = []
    for n in range(7):
        torch.set_rng_state(state)
        loss = functional.cross_entropy(model(x), y, reduction="none")[n] / 7
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(named.values()))]))
    A = torch.stack(rows)
    G = A.sum(0)
    assert found["difference"] < 1e-12
    assert found["covered"] == pytest.approx(1)
    (call,) = found["calls"]
    assert len(call["top"]) == 7
    chosen = torch.zeros(7, dtype=torch.bool)
    for one in call["top"]:
        chosen[one["sample"]] = True
        assert one["norm"] == pytest.approx(float(A[one["sample"]].norm()), rel=1e-9)
        assert one["share"] == pytest.approx(float(A[one["sample"]] @ G / (G @ G)), abs=1e-9)
        assert one["without"] == pytest.approx(float((G - A[chosen].sum(0)).norm()), abs=1e-7)
        with torch.no_grad():
            torch.set_rng_state(state)
            loss = functional.cross_entropy(model(x), y, reduction="none")[one["sample"]]
        assert one["loss"] == pytest.approx(float(loss))


def test_a_backward_that_no_step_follows_keeps_no_batch() -> None:
    model, inputs, forwards = nn.Linear(4, 2), StepInputs(), Forwards()
    HUB.add(inputs)
    forwards.follow([model])

    def alive(*backwards: weakref.ref[Tensor]) -> list[bool]:
        return [reference() is not None for reference in backwards]

    def backward() -> weakref.ref[Tensor]:
        x = torch.randn(8, 4)
        model(x).sum().backward()
        return weakref.ref(x)

    try:
        assert alive(backward()) == [False]  # there is no optimizer
        assert not inputs.calls[0].deltas
        assert not inputs.calls[0].random
        inputs.restart()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        first = backward()
        assert alive(first) == [True]  # its step may come
        assert alive(first, backward()) == [False, False]
        optimizer.step()
        inputs.restart()  # it was accumulated: now two are expected
        first, second = backward(), backward()
        assert alive(first, second) == [True, True]
        assert alive(first, second, backward()) == [False, False, False]
        optimizer.step()
        inputs.restart()
        inputs.is_requested = True
        assert alive(*[backward() for _ in range(5)]) == [True] * 5
        inputs.restart()
        inputs.is_requested = False
        del optimizer
        gc.collect()
        assert alive(backward()) == [False]
    finally:
        forwards.leave()
        HUB.remove(inputs)


ON_TWO_RANKS = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import backlight
from backlight.monitors.health import samples_monitor
samples_monitor.END_TIMEOUT_S = 120.0  # for a busy machine
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x, y = torch.randn(1280, 8), torch.randint(0, 4, (1280,))
x[35 * 32 + 16 + 5] *= 1000  # the second half of batch 35, sample 5
indices = [i for b in range(40) for i in range(32 * b + 16 * rank, 32 * b + 16 * rank + 16)]
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with backlight.watch(model, optimizer, run=sys.argv[1], monitors=("health",), every=1, quiet=True):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=16, sampler=indices):
        functional.cross_entropy(model(a), b).backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_rank_of_the_sample_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ON_TWO_RANKS)
    done = run_ranks(tmp_path, "train.py", str(tmp_path / "run"))
    assert [process.returncode for process in done] == [0, 0], done
    run = open_run(tmp_path / "run")
    assert f"Sample 5 of 16 on rank 1 (dataset index {35 * 32 + 21:,}) carries" in spike(run).detail
    found = [e.payload["calls"][0]["share"] for e in run.events(SAMPLES) if e.step == SPIKE]
    assert len(found) == 2
    assert sum(found) == pytest.approx(1, abs=1e-4)


COMMUNICATING = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.distributed.fsdp import fully_shard
import backlight
dist.init_process_group("gloo")
rank, kind = dist.get_rank(), sys.argv[2]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
if kind == "sharded":
    fully_shard(model)
else:  # as a layer of tensor parallelism by hand does
    class Reduces(nn.Module):
        def forward(self, x):
            dist.all_reduce(x.detach().clone())
            return x
    model = nn.parallel.DistributedDataParallel(nn.Sequential(model, Reduces()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
settings = {"monitors": ("health",), "health": {"decompose": 1}, "quiet": True}
with backlight.watch(model, optimizer, run=sys.argv[1], **settings):
    for step in range(3):
        functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(0, 4, (16,))).backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [("sharded", "its parameters are sharded over ranks"), ("reduces", "communicates with other ranks")],
)
def test_pass_that_needs_other_ranks_is_not_computed_again(tmp_path: Path, kind: str, reason: str) -> None:
    (tmp_path / "train.py").write_text(COMMUNICATING)
    done = run_ranks(tmp_path, "train.py", str(tmp_path / "run"), kind)
    assert [process.returncode for process in done] == [0, 0], done
    run = open_run(tmp_path / "run")
    found = run.events(SAMPLES)
    assert [e.step for e in found] == [1, 1]
    assert all(reason in e.payload["reason"] for e in found)
    assert f"not decomposed: {reason}" in samples_of(run, 1).replace("its forward pass ", "")
