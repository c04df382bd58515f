"""Compiled models, losses, steps and backwards: correct numbers, and a reason for missing ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backlight
from backlight.store import spectra as stored
from setups.truth import STEPS, Noted, backward, batches, check, net, train

# Compiler warnings are not under test.
pytestmark = pytest.mark.filterwarnings("ignore")

Fit = Callable[[], Noted]
MONITORS = "health,stalls,grokking,spectra,steptime"


@dataclass(frozen=True)
class Made:
    """A prepared run: the arguments of watch, and the training function."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    fit: Fit


def made(model: nn.Module, optimizer: torch.optim.Optimizer, **how: Any) -> Made:
    return Made(model, optimizer, lambda: train(model, optimizer, **how))


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def wrapper(backend: str) -> Made:
    model, optimizer = plain()
    return made(torch.compile(model, backend=backend), optimizer)  # type: ignore[arg-type]


def one_graph(backend: str) -> Made:
    model, optimizer = plain()
    return made(torch.compile(model, backend=backend, fullgraph=True), optimizer)  # type: ignore[arg-type]


def in_place(backend: str) -> Made:
    model, optimizer = plain()
    model.compile(backend=backend, fullgraph=True)
    return made(model, optimizer)


def by_regions(backend: str) -> Made:
    """Only one block is compiled."""
    model, optimizer = plain()
    model.middle = torch.compile(model.middle, backend=backend)  # type: ignore[assignment]
    return made(model, optimizer)


def loss(backend: str) -> Made:
    """Call the model inside a compiled function."""
    model, optimizer = plain()

    @torch.compile(backend=backend, fullgraph=True)
    def compute(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    return made(model, optimizer, backward=lambda m, x, y: compute(m, x, y).backward())


def step(backend: str) -> Made:
    model, optimizer = plain()
    return made(model, optimizer, step=torch.compile(optimizer.step, backend=backend))


def autograd(backend: str) -> Made:
    """Compile backward around a compiled forward."""
    model, optimizer = plain()

    def compiled(model: nn.Module, x: Tensor, y: Tensor) -> None:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            backward(model, x, y)

    return made(torch.compile(model, backend=backend), optimizer, backward=compiled)  # type: ignore[arg-type]


def whole(backend: str) -> Made:
    """Compile forward, loss and backward as one function and the step as another."""
    model, optimizer = plain()
    return made(
        model,
        optimizer,
        backward=torch.compile(backward, backend=backend),
        step=torch.compile(optimizer.step, backend=backend),
    )


CASES = (wrapper, one_graph, in_place, by_regions, loss, step, autograd)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def sample_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def watched(
    make: Callable[[str], Made], path: Path, *, warm: bool, backend: str = "aot_eager"
) -> tuple[backlight.Run, int]:
    """Train unwatched and watched; return the run and the number of graphs compiled while watched."""
    alone = _fit(make(backend), warm=warm)
    torch._dynamo.reset()
    one = make(backend)
    if warm:
        one.fit()
    torch._dynamo.utils.counters.clear()
    with backlight.watch(
        one.model,
        one.optimizer,
        run=path,
        monitors=MONITORS,
        every=1,
        health={"exact_updates": 1},
        samples=(sample_loss, next(batches())),
        grokking={"every": 1, "gram": 1, "agop": 1, "vectors": 0},
        spectra={"split": 3},
    ):
        noted = one.fit()
    graphs = int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))
    check(alone, noted, path)
    return backlight.open_run(path), graphs


def _fit(one: Made, *, warm: bool) -> Noted:
    if warm:
        one.fit()
    return one.fit()


def phases(run: backlight.Run) -> dict[str, int]:
    names = [name for name in run.scalar_names() if name.startswith("phase/")]
    return {name.removeprefix("phase/"): len(run.scalar(name).steps) for name in names}


@pytest.mark.parametrize(
    ("make", "warm"),
    [
        pytest.param(
            make,
            warm,
            id=f"{make.__name__}-compiled {'before' if warm else 'while watched'}",
            marks=() if make is in_place and warm else pytest.mark.full,
        )
        for make in CASES
        for warm in (False, True)
    ],
)
def test_compiled_training_is_measured(make: Callable[[str], Made], warm: bool, tmp_path: Path) -> None:
    run, graphs = watched(make, tmp_path / "run", warm=warm)
    assert not run.events("unmeasured"), [e.payload for e in run.events("unmeasured")]
    assert len(run.scalar("loss").steps) == STEPS
    assert list(run.scalar("backwards").values) == [1.0] * STEPS
    assert len(run.array("gram/model/matrix")[0]) == STEPS
    assert {m.step for m in stored.measurements(run)} == set(range(STEPS))
    found = phases(run)
    if make is loss:
        assert found["between"] == STEPS
        assert "forward" not in found
    else:
        assert found["forward"] == found["loss"] == STEPS
    if warm and make in {wrapper, one_graph, in_place, by_regions}:
        assert graphs <= 1  # for the microbatches, whose size is another


@pytest.mark.full
def test_backward_in_a_compiled_function_is_not_observable(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="no backward gave gradients that hooks of parameters see"):
        run, _ = watched(whole, tmp_path / "run", warm=False)
    reasons = {str(e.payload["what"]): str(e.payload["reason"]) for e in run.events("unmeasured")}
    assert "a backward inside a compiled function; loss and time of backward are not recorded" in reasons.pop(
        "loss and backward"
    )
    assert set(reasons) == {"spectra"}
    assert len(run.scalar("loss").steps) == 0
    assert not stored.measurements(run)
    assert len(run.array("gram/model/matrix")[0]) == STEPS
    assert "backward" not in phases(run)


@pytest.mark.full
@pytest.mark.parametrize("make", [one_graph, step], ids=lambda m: m.__name__)
def test_inductor_training_is_measured(make: Callable[[str], Made], tmp_path: Path) -> None:
    run, _ = watched(make, tmp_path / "run", warm=False, backend="inductor")
    assert not run.events("unmeasured")


@pytest.mark.full
def test_model_compiled_after_the_watch_began(tmp_path: Path) -> None:
    """A model that was not passed to watch is found, and followed after it is wrapped."""
    alone = wrapper("aot_eager").fit()
    torch._dynamo.reset()
    with backlight.watch(
        run=tmp_path / "run", monitors="health,stalls,steptime", every=1, health={"exact_updates": 1}
    ):
        noted = wrapper("aot_eager").fit()
    check(alone, noted, tmp_path / "run")
    run = backlight.open_run(tmp_path / "run")
    assert not run.events("unmeasured")
    found = phases(run)
    assert found["backward"] == STEPS
    assert found["forward"] + found["between"] == STEPS
