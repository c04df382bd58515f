"""Growth of a process's memory, and words about its GPU, from stored readings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.steptime.model.machine import machine_words, memory_growth
from backlight.monitors.steptime.model.step_line import step_line
from backlight.records import Severity
from backlight.store.read.run import Run
from run_builder import build_steptime_run

MIB = 2**20
READINGS = range(0, 300, 5)
TIMES = {"data": 0.001, "backward": 0.03, "optimizer": 0.002, "between": 0.017}


def run_of(path: Path, memory: Callable[[int], float], **gpu: float) -> Run:
    """Return a run whose process had ``memory(step)`` bytes, and a GPU with constant counters."""
    scalars = {"host/memory": {step: memory(step) for step in READINGS}}
    scalars |= {f"gpu/{name}": dict.fromkeys(READINGS, value) for name, value in gpu.items()}
    return build_steptime_run(path / "run", TIMES, steps=300, scalars=scalars)


def leaking(step: int) -> float:
    """A process that grows by 1 MiB a step, and by 200 MiB while it warms up."""
    return (400 + 200 * min(1.0, step / 50) + step) * MIB


CONTROLS: dict[str, Callable[[int], float]] = {
    "warms up": lambda step: (400 + 200 * min(1.0, step / 50)) * MIB,
    "a cache that fills": lambda step: (400 + min(step, 180)) * MIB,
    "a sawtooth of epochs": lambda step: (400 + step % 60) * MIB,
    "less than an allocator may": lambda step: (4000 + 0.5 * step) * MIB,
}


def test_growth_is_the_slope_after_the_warm_up(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 2 * MIB, 300)
    growth = memory_growth(run_of(tmp_path, lambda step: leaking(step) + noise[step]))
    assert growth is not None
    assert growth.per_step == pytest.approx(MIB, rel=0.05)
    assert (growth.since, growth.until) == (100, 295)


@pytest.mark.parametrize("memory", CONTROLS.values(), ids=list(CONTROLS))
def test_memory_that_settles_does_not_grow(memory: Callable[[int], float], tmp_path: Path) -> None:
    run = run_of(tmp_path, memory)
    assert memory_growth(run) is None
    assert not [finding for finding in evaluate_rules(run) if finding.rule == "memory"]


def test_growth_without_a_holder_is_a_hint(tmp_path: Path) -> None:
    (finding,) = [f for f in evaluate_rules(run_of(tmp_path, leaking)) if f.rule == "memory"]
    assert (finding.severity, finding.subject.step) == (Severity.INFO, 100)
    assert finding.evidence[0].path == "scalars/host/memory"


def test_the_line_of_facts_names_the_machine(tmp_path: Path) -> None:
    run = run_of(tmp_path, leaking, utilization=0.62, temperature=71.0, throttled=0.0)
    assert machine_words(run) == ["GPU 62 % busy at 71 °C", "memory 938 MB, 1.05 MB more each step"]
    line = step_line(run)
    assert line is not None
    assert line.text.endswith("; GPU 62 % busy at 71 °C, memory 938 MB, 1.05 MB more each step")


def test_a_throttled_clock_is_named_and_an_idle_line_is_not(tmp_path: Path) -> None:
    run = run_of(tmp_path, CONTROLS["warms up"], throttled=1.0)
    assert machine_words(run) == ["GPU clock throttled 100 % of the time"]
    assert not machine_words(run_of(tmp_path / "other", CONTROLS["warms up"]))
