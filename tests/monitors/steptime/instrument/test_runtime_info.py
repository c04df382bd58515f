"""Recorded runtime info of a run, and the findings of real faults."""

from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import backlight
from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.steptime.instrument.runtime_info import compilation, optimizer_groups
from backlight.monitors.steptime.monitor import GarbagePauses


def train(path: Path, steps: int = 40, **optimizer: Any) -> backlight.Run:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(60)))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, **optimizer)
    # The model is tiny, and other tests may take its core.
    floors = {"steptime": {"optimizer_floor": 0.0, "busy_share": 1.0, "steady_steps": 5}}
    with backlight.watch(model, adamw, run=path, monitors=("steptime",), every=1, thresholds=floors):
        for _ in range(steps):
            adamw.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            adamw.step()
    return backlight.open_run(path)


def rules(run: backlight.Run) -> set[str]:
    return {finding.rule for finding in evaluate_rules(run)}


@pytest.mark.slow
def test_for_loop_optimizer_is_found_and_fused_is_not(tmp_path: Path) -> None:
    slow = train(tmp_path / "slow", foreach=False)
    (event,) = slow.events("runtime_info")
    payload = event.payload
    assert payload["optimizers"] == [
        {"optimizer": 0, "type": "AdamW", "tensors": 120, "fused": False, "foreach": False}
    ]
    assert payload["threads"] == torch.get_num_threads()
    assert payload["memory"]["peak"] > 2**20
    assert "bottleneck" in rules(slow)
    fused = train(tmp_path / "fused", steps=2, fused=True)
    assert fused.events("runtime_info")[0].payload["optimizers"][0]["fused"] is True


class UserOptimizer(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_foreach_of_optimizers_without_the_option_is_not_known() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    assert optimizer_groups(UserOptimizer(parameters, {}))[0]["foreach"] is None
    assert optimizer_groups(torch.optim.LBFGS(parameters))[0]["foreach"] is None
    assert optimizer_groups(torch.optim.SGD(parameters))[0] == {
        "optimizer": 0, "type": "SGD", "tensors": 1, "fused": False, "foreach": False
    }  # fmt: skip


def test_pauses_are_kept_until_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[str, dict[str, Any], int | None]] = []
    lock = threading.Lock()

    def record(*event: Any) -> None:
        with lock:
            recorded.append(event)

    monkeypatch.setattr("backlight.monitors.steptime.monitor.MIN_PAUSE_S", 0.0)
    pauses = GarbagePauses(record, itertools.repeat(7))
    pauses.start()
    try:
        with lock:  # like a collection inside the writer
            gc.collect()
        assert recorded == []
        pauses.flush()
    finally:
        pauses.stop()
    assert pauses._on_collection not in gc.callbacks
    kind, payload, step = recorded[0]
    assert (kind, step) == ("garbage_collection", 7)
    assert payload["seconds"] > 0


def test_pause_is_recorded_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.25)  # every collection takes a quarter of a second
    monkeypatch.setattr(
        "backlight.monitors.steptime.monitor.clock", SimpleNamespace(perf_counter=clock.__next__)
    )
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.disable()
    try:
        with backlight.watch(model, optimizer, run=tmp_path / "run", monitors=("steptime",), every=1):
            for step in range(6):
                optimizer.zero_grad()
                model(torch.randn(2, 4)).sum().backward()
                if step in {2, 4}:
                    gc.collect()
                optimizer.step()
    finally:
        gc.enable()
    pauses = backlight.open_run(tmp_path / "run").events("garbage_collection")
    assert {2, 4} <= {event.step for event in pauses}
    assert {event.payload["seconds"] for event in pauses} == {0.25}


@pytest.mark.slow
def test_graph_breaks_and_recompilations_are_found(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(x: torch.Tensor, scale: float) -> torch.Tensor:
        x = x * scale
        torch._dynamo.graph_break()  # before tensors that need gradients: torch warns when it resumes there
        return model(x).square().sum()

    compiled = torch.compile(loss, backend="eager", dynamic=False)
    with backlight.watch(model, optimizer, run=tmp_path / "run", monitors=("steptime",), every=1):
        for step in range(8):
            optimizer.zero_grad()
            compiled(torch.randn(step + 1, 4), 0.5).backward()
            optimizer.step()
    run = backlight.open_run(tmp_path / "run")
    facts = run.events("runtime_info")[0].payload["compilation"]
    assert sum(facts["graph_breaks"].values()) >= 1
    again = max(facts["recompiled"], key=lambda row: row["count"])
    assert again["count"] >= 3
    assert "size mismatch" in again["reason"]
    titles = [finding.title for finding in evaluate_rules(run) if finding.rule == "compilation"]
    assert any("graph break" in title for title in titles)
    assert any("was recompiled" in title for title in titles)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert compilation() is None


def run_compiled_step(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Take three steps, each of which is compiled with its backward."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def step(x: torch.Tensor) -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(step, backend="eager")
    for _ in range(3):
        compiled(torch.randn(2, 4))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_hooks_on_a_compiled_step_are_no_graph_breaks_of_the_script(tmp_path: Path) -> None:
    counted = []
    for is_watched in (False, True):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if is_watched:
            with backlight.watch(model, optimizer, run=tmp_path / "run", monitors=("steptime",), every=1):
                run_compiled_step(optimizer, model)
        else:
            run_compiled_step(optimizer, model)
        counted.append(dict(torch._dynamo.utils.counters["stats"]))
    assert counted[0] == counted[1]  # graphs, and operations in them
    facts = backlight.open_run(tmp_path / "run").events("runtime_info")[0].payload["compilation"]
    assert facts["graphs"] == counted[1]["unique_graphs"]
    assert sorted(facts["graph_breaks"]) == [
        "Attempted to inline function marked as skipped",  # Optimizer.zero_grad, as without hooks
        "Unsupported Tensor.backward() call",
    ]
