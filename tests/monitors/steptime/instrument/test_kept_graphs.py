"""Graphs that are kept from step to step: loops that keep them, each with its twin, and loops that do not."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backlight
from backlight.findings.evaluate import evaluate_rules
from backlight.monitor import RunHandle
from backlight.records import Finding, Severity

pytestmark = pytest.mark.slow

STEPS = 60
Loop = Callable[..., None]
FAULTS: list[Loop] = []
CONTROLS: list[Loop] = []


def fault(loop: Loop) -> Loop:
    FAULTS.append(loop)
    return loop


def control(loop: Loop) -> Loop:
    CONTROLS.append(loop)
    return loop


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def batches(count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.randn(8, 4), torch.randint(0, 3, (8,))


def train(use: Callable[[Tensor], object], count: int = STEPS) -> None:
    model, optimizer = small()
    for x, y in batches(count):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        use(loss)


class History:
    """Lists of values by name."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}

    def update(self, **values: Any) -> None:
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)  # HERE


class Trainer:
    """A model, its optimizer and a history, two objects away from the loop."""

    def __init__(self) -> None:
        self.model, self.optimizer = small()
        self.history = History()

    def step(self, x: Tensor, y: Tensor, *, keeps: bool) -> None:
        output = self.model(x)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(output, y)
        loss.backward()
        self.optimizer.step()
        entropy = -(output.softmax(1) * output.log_softmax(1)).sum(1).mean()
        self.history.update(loss=loss.item(), entropy=entropy if keeps else entropy.item())


@fault
def history_of_a_trainer(keeps: bool) -> None:
    trainer = Trainer()
    for x, y in batches():
        trainer.step(x, y, keeps=keeps)


@fault
def list_of_losses(keeps: bool) -> None:
    losses: list[Any] = []
    model, optimizer = small()
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss if keeps else loss.item())  # HERE


@fault
def sum_of_losses(keeps: bool) -> None:
    model, optimizer = small()
    for _ in range(1):
        total: Any = 0.0
        for x, y in batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss = loss + 0.0
            loss.backward()
            optimizer.step()
            total += loss if keeps else loss.item()  # HERE


@fault
def list_of_other_sums(keeps: bool) -> None:
    sums: list[Tensor] = []
    model, optimizer = small()
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss + 0 * model(x).sum()
        sums.append(value if keeps else value.detach())  # HERE


@fault
def hidden_state(keeps: bool) -> None:
    cell, head = nn.GRUCell(4, 8), nn.Linear(8, 3)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    state = torch.zeros(8, 8)
    for x, y in batches():
        optimizer.zero_grad()
        state = cell(x, state if keeps else state.detach())  # HERE
        F.cross_entropy(head(state), y).backward(retain_graph=keeps)
        optimizer.step()


class Meter:
    def __init__(self) -> None:
        self.total: Any = 0.0

    def update(self, value: Any, count: int) -> None:
        self.total += value * count  # HERE


@fault
def meter(keeps: bool) -> None:
    average = Meter()
    model, optimizer = small()
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        average.update(loss if keeps else loss.item(), len(x))


@fault
def history_of_lists(keeps: bool) -> None:
    history: dict[str, list[Any]] = {"loss": [], "accuracy": []}
    model, optimizer = small()
    for x, y in batches():
        optimizer.zero_grad()
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
        loss.backward()
        optimizer.step()
        history["loss"].append({"value": loss} if keeps else loss.item())  # HERE
        history["accuracy"].append((outputs.argmax(1) == y).float().mean())


@fault
def moving_average(keeps: bool) -> None:
    average: Any = 0.0
    model, optimizer = small()
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        average = 0.9 * average + 0.1 * (loss if keeps else loss.detach())  # HERE


class Remembering(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.keeps = keeps
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        features = self.layer(x)
        self.features.append(features if self.keeps else features.detach())  # HERE
        return features


@fault
def features_of_a_module(keeps: bool) -> None:
    model = Remembering(keeps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@fault
def evaluation_outputs(keeps: bool) -> None:
    predicted: list[Tensor] = []
    model, optimizer = small()
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % 5 == 4:
            model.eval()
            with torch.set_grad_enabled(keeps):
                predicted.append(model(torch.randn(8, 4)))  # HERE
            model.train()


@control
def bounded_deque_of_losses() -> None:
    latest: deque[Tensor] = deque(maxlen=200)
    train(latest.append)


@control
def list_that_is_emptied() -> None:
    losses: list[Tensor] = []

    def use(loss: Tensor) -> None:
        losses.append(loss)
        if len(losses) == 10:
            losses.clear()

    train(use)


@control
def replay_buffer() -> None:
    buffer: list[tuple[Tensor, Tensor]] = []
    train(lambda loss: buffer.append((torch.randn(64), loss.detach())))


@control
def best_loss_alone() -> None:
    best: list[Tensor] = []
    train(lambda loss: best.append(loss) if not best else None)


@control
def policy_gradients() -> None:
    model, optimizer = small()
    for _ in range(STEPS):
        chosen = []
        for x, _ in batches(10):
            chosen.append(F.log_softmax(model(x), 1)[:, 0].mean())
        optimizer.zero_grad()
        torch.stack(chosen).mean().backward()
        optimizer.step()


@control
def truncated_backward_through_time() -> None:
    cell, head = nn.GRUCell(4, 8), nn.Linear(8, 3)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    state = torch.zeros(8, 8)
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        if step % 20 == 0:
            state = state.detach()
        state = cell(x, state)
        F.cross_entropy(head(state), y).backward(retain_graph=True)
        optimizer.step()


@control
def two_losses_of_a_graph() -> None:
    model, optimizer = small()
    for x, y in batches():
        optimizer.zero_grad()
        outputs = model(x)
        F.cross_entropy(outputs, y).backward(retain_graph=True)
        outputs.square().mean().backward()
        optimizer.step()


@control
def penalty_through_a_gradient() -> None:
    model, optimizer = small()
    for x, y in batches():
        optimizer.zero_grad()
        x.requires_grad_()
        loss = F.cross_entropy(model(x), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + gradient.square().sum()
        loss.backward()
        optimizer.step()


@control
def last_loss_is_kept_for_a_plot() -> None:
    losses: dict[str, Tensor] = {}
    train(lambda loss: losses.update(last=loss))


@control
def weights_average_and_checkpoints() -> None:
    averages: list[list[Tensor]] = []
    model, optimizer = small()
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        averages.append([p.detach().clone() for p in model.parameters()])


def findings(path: Path, loop: Callable[[], None]) -> list[Finding]:
    torch.manual_seed(0)
    with backlight.watch(run=path, monitors=("steptime",), every=1):
        loop()
    return [f for f in evaluate_rules(backlight.open_run(path)) if f.rule == "memory"]


@pytest.mark.parametrize("loop", FAULTS, ids=lambda loop: loop.__name__)
def test_kept_graphs_are_found_with_their_line(
    loop: Loop, tmp_path: Path, marked_line: Callable[[Any], str]
) -> None:
    (found,) = findings(tmp_path / "keeps", lambda: loop(True))
    assert found.severity is Severity.WARNING
    assert "keeps the graphs of" in found.title
    sources = {"meter": Meter, "history_of_a_trainer": History, "features_of_a_module": Remembering}
    source = sources.get(loop.__name__, loop)
    assert found.subject.line is not None
    assert found.subject.line.endswith(marked_line(source))
    assert not findings(tmp_path / "twin", lambda: loop(False))


@pytest.mark.parametrize("loop", CONTROLS, ids=lambda loop: loop.__name__)
def test_graphs_that_are_released_are_no_finding(loop: Loop, tmp_path: Path) -> None:
    assert not findings(tmp_path / "run", loop)


LIST = """
from torch import nn
values = []  # its end is that of the script
for x, y in batches(STEPS):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    values.append(loss)
"""


@pytest.mark.parametrize(
    ("change", "is_early"),
    [
        (("", ""), True),
        (("values.append(loss)", "values.append(loss)\n    if len(values) > 64: values.pop()"), False),
        (("values.append(loss)", "values.append(loss)\n    if len(values) > 64: values = []"), False),
        (("values.append(loss)", "values.append(loss.detach())"), False),
    ],
)
def test_a_list_of_the_script_that_only_grows_is_found_early(
    change: tuple[str, str], is_early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: list[str] = []  # a rule is evaluated at once for each
    monkeypatch.setattr(RunHandle, "fact", lambda run, rule, kind="": facts.append(rule))
    script = tmp_path / "train.py"
    script.write_text(LIST.replace(*change) if change[0] else LIST)
    steps = 12  # fewer than an unrolled loop may keep

    def loop() -> None:
        model, optimizer = small()
        names = {"model": model, "optimizer": optimizer, "batches": batches, "F": F, "STEPS": steps}
        exec(compile(script.read_text(), str(script), "exec"), names)

    reports = findings(tmp_path / "run", loop)
    assert len(reports) == is_early
    assert set(facts) == ({"memory"} if is_early else set())
    if is_early:
        assert reports[0].title.startswith("`values` keeps the graphs of 9 steps")
        assert reports[0].severity is Severity.WARNING


def test_a_list_of_a_function_may_end_with_it(tmp_path: Path) -> None:
    def epochs() -> None:
        for _ in range(3):
            losses: list[Tensor] = []
            train(losses.append, 12)

    assert not findings(tmp_path / "run", epochs)


def test_watching_keeps_nothing_alive(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def use(loss: Tensor) -> None:
        alive.append(weakref.ref(loss))
        assert sum(one() is not None for one in alive) == 1

    def loop() -> None:
        kept: list[Tensor] = []
        train(use, 40)
        train(kept.append, 40)  # what holds graphs is searched for in these frames

    gc.disable()
    try:
        assert findings(tmp_path / "run", loop)
    finally:
        gc.enable()
