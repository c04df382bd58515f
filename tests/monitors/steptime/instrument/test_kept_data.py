"""Tensors without a graph that a script gathers: loops that do, their twins, and bounded ones."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backlight
from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.steptime.instrument import kept_tensors
from backlight.monitors.steptime.instrument.kept_tensors import KeptDataTracker
from backlight.records import Finding, Severity

STEPS = 72
BYTES = 64 * 2**10
"""Bytes of the output of a step."""

Loop = Callable[[bool], None]


@pytest.fixture(autouse=True)
def growing_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory in use grows by a MiB between readings, whatever the allocator of the machine keeps."""
    levels = itertools.count(0, 2**20)
    monkeypatch.setattr(kept_tensors, "memory_level", lambda: next(levels))


def outputs(count: int = STEPS) -> Iterator[Tensor]:
    """Yield the output of each step, before the optimizer's step is over."""
    model = nn.Linear(64, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(count):
        output = model(torch.randn(64, 64))
        optimizer.zero_grad()
        output.square().mean().backward()
        yield output
        optimizer.step()


def list_of_outputs(keeps: bool) -> None:
    gathered = []
    for output in outputs():
        gathered.append(output.detach() if keeps else output.mean().item())  # HERE


def list_that_is_added_to(keeps: bool) -> None:
    gathered: list[Any] = []
    for output in outputs():
        gathered += [output.detach() if keeps else 0.0]  # HERE


def concatenated(keeps: bool) -> None:
    gathered = torch.zeros(0, 256)
    for output in outputs():
        latest = output.detach() if keeps else gathered[:0]
        gathered = torch.cat([gathered, latest])  # HERE


def dictionary_by_step(keeps: bool) -> None:
    gathered = {}
    for step, output in enumerate(outputs()):
        gathered[step if keeps else 0] = output.detach()  # HERE


class Meter:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def update(self, value: Any) -> None:
        self.values.append({"value": value})  # HERE


def meter(keeps: bool) -> None:
    average = Meter()
    for output in outputs():
        average.update(output.detach() if keeps else output.mean().item())


def rows_of_outputs(keeps: bool) -> None:
    rows = []
    for output in outputs():  # a row holds the storage of the whole output
        rows.append(output.detach()[0] if keeps else output.detach()[0].tolist())  # HERE


FAULTS: list[Loop] = [
    list_of_outputs,
    list_that_is_added_to,
    concatenated,
    dictionary_by_step,
    meter,
    rows_of_outputs,
]


def bounded_deque() -> None:
    latest: deque[Tensor] = deque(maxlen=1000)
    for output in outputs():
        latest.append(output.detach())


def list_with_a_length() -> None:
    buffer = []
    for output in outputs():
        buffer.append(output.detach())
        if len(buffer) > 1000:
            buffer.pop(0)


def last_items() -> None:
    latest = []
    for output in outputs():
        latest.append(output.detach())
        latest = latest[-1000:]


def list_of_an_epoch() -> None:
    for _ in range(2):
        predictions = []
        for output in outputs():
            predictions.append(output.detach())


class Module:
    def __init__(self) -> None:
        self.predictions: list[Tensor] = []

    def step(self, output: Tensor) -> None:
        self.predictions.append(output.detach())

    def on_epoch_end(self) -> None:
        self.predictions.clear()


def attribute_that_a_method_empties() -> None:
    module = Module()
    for output in outputs():
        module.step(output)


def data_that_is_there() -> None:
    data = [torch.randn(64, 256) for _ in range(200)]
    for step, output in enumerate(outputs()):
        output.detach().add_(data[step])


def small_metrics() -> None:
    losses = []
    for output in outputs():
        losses.append(output.detach().square().mean())


def cache_that_is_filled() -> None:
    cache = {}
    for step, output in enumerate(outputs(130)):
        cache[step % 40] = output.detach()


CONTROLS: list[Callable[[], None]] = [
    bounded_deque,
    list_with_a_length,
    last_items,
    list_of_an_epoch,
    attribute_that_a_method_empties,
    data_that_is_there,
    small_metrics,
    cache_that_is_filled,
]


def findings(path: Path, loop: Callable[[], None], **limits: float) -> list[Finding]:
    torch.manual_seed(0)
    with backlight.watch(run=path, monitors=("steptime",), every=1):
        loop()
    found = evaluate_rules(backlight.open_run(path), {"steptime": limits})
    return [finding for finding in found if finding.rule == "memory"]


@pytest.mark.slow
@pytest.mark.parametrize("loop", FAULTS, ids=lambda loop: loop.__name__)
def test_growth_is_found_with_its_line_and_size(
    loop: Loop, tmp_path: Path, marked_line: Callable[[Any], str]
) -> None:
    (found,) = findings(tmp_path / "keeps", lambda: loop(True))
    assert found.severity is Severity.INFO
    assert found.title.endswith("grows by 65.5 kB a step")
    assert found.subject.line is not None
    assert found.subject.line.endswith(marked_line(Meter if loop is meter else loop))
    assert not findings(tmp_path / "twin", lambda: loop(False))


@pytest.mark.slow
@pytest.mark.parametrize("loop", CONTROLS, ids=lambda loop: loop.__name__)
def test_what_has_a_bound_is_no_finding(loop: Callable[[], None], tmp_path: Path) -> None:
    assert not findings(tmp_path / "run", loop)


@pytest.mark.slow
def test_large_list_is_a_warning_and_a_large_cache_is_not(tmp_path: Path) -> None:
    share = 1e-6  # of the memory of the machine: 24 kB of 24 GB
    (found,) = findings(tmp_path / "list", lambda: list_of_outputs(True), kept_share=share)
    assert found.severity is Severity.WARNING
    (found,) = findings(tmp_path / "cache", lambda: dictionary_by_step(True), kept_share=share)
    assert found.severity is Severity.INFO


def test_names_are_read_only_while_the_memory_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tensors, "memory_level", lambda: 10 * 2**20)
    searched = []
    monkeypatch.setattr(kept_tensors, "find_data_holders", lambda *_: searched.append(1) or [])
    tracker = KeptDataTracker(lambda facts, step: None, kept_tensors.doubling_steps())
    for step in range(1, 1000):
        if step >= tracker.next_step:
            tracker.read(step)
    assert not searched
    assert tracker.next_step == 7 * 2**8


def test_container_that_ceases_to_grow_is_taken_back() -> None:
    recorded: list[dict[str, Any]] = []
    tracker = KeptDataTracker(lambda facts, step: recorded.append(facts), itertools.count(1, 20))
    gathered = []
    for step in range(1, 82, 20):
        gathered += [torch.zeros(2**17) for _ in range(20)]
        tracker.read(step)
    assert [facts["holder"]["name"] for facts in recorded] == ["gathered", "gathered"]
    assert [facts["bytes_per_step"] for facts in recorded] == [2**19, 2**19]
    same = gathered
    del same[8:]
    tracker.read(101)
    assert recorded[-1] == {"since": 101, "bytes": 0, "bytes_per_step": 0.0, "holder": None}
    json.dumps(recorded)
