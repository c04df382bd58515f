"""The life of a watch: started and stopped, at exit, never started; what it states about itself."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backlight
from backlight.capture.hub import HUB
from backlight.records import RunStatus
from backlight.store.errors import RunExistsError
from cases import CASES, STEPS, build_with_sgd, loop

MONITORS = ("health",)

SCRIPT = """
import torch, backlight
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch = backlight.watch(model, optimizer, run="run", monitors="health"){start}
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
{end}
"""


def run_script(folder: Path, start: str, end: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(start=start, end=end)],
        cwd=folder, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_started_watch_records_until_it_is_stopped(tmp_path: Path) -> None:
    model, optimizer = build_with_sgd()
    watch = backlight.watch(model, optimizer, run=tmp_path / "run", every=1, monitors=MONITORS)
    assert watch.start() is watch.start()
    loop(model, optimizer)
    watch.stop()
    assert not HUB.active
    loop(model, optimizer)
    watch.stop()
    assert watch.step == STEPS
    run = backlight.open_run(tmp_path / "run")
    assert (run.status, len(run.attempts)) == (RunStatus.FINISHED, 1)
    assert len(run.series_steps("gradient")) == STEPS


@pytest.mark.slow
def test_watch_stopped_within_its_block_records_no_more(tmp_path: Path) -> None:
    with backlight.watch(run=tmp_path / "run", every=1, monitors=MONITORS) as watch:
        CASES["plain"].train()
        watch.stop()
        CASES["plain"].train()
    assert watch.step == STEPS
    assert backlight.open_run(tmp_path / "run").status is RunStatus.FINISHED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "status"),
    [
        ("never_started = backlight.watch(model, optimizer, run='never')", 0, RunStatus.FINISHED),
        pytest.param("raise SystemExit(0)", 0, RunStatus.FINISHED, marks=pytest.mark.full),
        ("raise ValueError('injected')", 1, RunStatus.FAILED),
    ],
)
def test_started_watch_is_closed_at_exit(tmp_path: Path, end: str, code: int, status: RunStatus) -> None:
    done = run_script(tmp_path, ".start()", end)
    assert done.returncode == code, done.stderr
    run = backlight.open_run(tmp_path / "run")
    assert run.status is status
    assert [event.payload["type"] for event in run.events("exception")] == ["ValueError"] * code
    assert len(run.scalar("loss").steps) == 3
    warning = "RuntimeWarning: backlight: this watch was never started, so nothing was recorded: "
    unstarted = [line for line in done.stderr.splitlines() if "RuntimeWarning" in line]
    assert len(unstarted) == ("never_started" in end)
    for line in unstarted:
        assert line.startswith(f"<string>:10: {warning}write `with backlight.watch(...) as watch:` around")
    assert not (tmp_path / "never").exists()


def test_dropped_watch_warns_at_the_line_that_made_it() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"never started.*`watch = backlight.watch\(...\).start\(\)`"
    ) as caught:
        backlight.watch(monitors=MONITORS)
        gc.collect()
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "use",
    [
        lambda watch: watch.findings,
        lambda watch: watch.step,
        lambda watch: watch.monitors,
        lambda watch: watch.check_limit(),
        lambda watch: watch.stop(),
        lambda watch: watch.log(accuracy=1.0),
    ],
)
def test_reads_before_the_start_are_refused(use: Callable[[Any], object], tmp_path: Path) -> None:
    watch = backlight.watch(run=tmp_path / "run", monitors=MONITORS)
    with pytest.raises(RuntimeError, match=r"watch\.\w+: this watch was not started; write `with backlight"):
        use(watch)
    with watch:
        pass


def test_refused_start_leaves_the_watch_not_started(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no directory")
    watch = backlight.watch(run=tmp_path / "run", monitors=MONITORS)
    with pytest.raises(RunExistsError, match="is a file"):
        watch.start()
    with pytest.raises(RuntimeError, match="was not started"):
        _ = watch.findings
    assert repr(watch).startswith("<Watch: not started, ")


@pytest.mark.slow
def test_repr_names_state_steps_and_path(tmp_path: Path) -> None:
    path = tmp_path / "run"
    watch = backlight.watch(run=path, every=1, monitors=MONITORS)
    assert repr(watch) == f"<Watch: not started, {path}>"
    with watch:
        CASES["plain"].train()
        assert repr(watch) == f"<Watch: running, {STEPS} steps, {path}>"
    assert repr(watch) == f"<Watch: finished, {STEPS} steps, {path}>"
    failing = backlight.watch(run=tmp_path / "failing", monitors=MONITORS)
    with pytest.raises(KeyError), failing:
        raise KeyError
    assert repr(failing) == f"<Watch: failed with KeyError, 0 steps, {tmp_path / 'failing'}>"


@pytest.mark.slow
def test_log_takes_a_mapping_and_keywords(tmp_path: Path) -> None:
    with backlight.watch(run=tmp_path / "run", every=1, monitors=MONITORS) as watch:
        CASES["plain"].train()
        watch.log({"val/acc": 0.5, "values": 2}, loss_scale=3.0, step=70)
        with pytest.raises(TypeError, match=r"expected numbers by name, as in .*, got int"):
            watch.log(3)
        with pytest.raises(TypeError, match=r"watch.log: acc: expected a number .* got list"):
            watch.log({"acc": [1]})
    run = backlight.open_run(tmp_path / "run")
    logged = {name: run.scalar(name, source="user").values.tolist() for name in run.scalar_names("user")}
    assert logged == {"val/acc": [0.5], "values": [2.0], "loss_scale": [3.0], "step": [70.0]}
    with pytest.raises(RuntimeError, match=r"watch.log: this watch has ended"):
        watch.log({"acc": 1})


@pytest.mark.slow
def test_findings_print_as_the_command_does(
    tmp_path: Path, console_script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    nan_step = "model(torch.full((1, 2), torch.nan)).sum().backward(); optimizer.step()"
    done = run_script(tmp_path, ".start()", f"{nan_step}; watch.stop(); print(watch.findings)")
    assert done.returncode == 0, done.stderr
    assert "✕ error  non finite" in done.stdout
    assert done.stdout == console_script(tmp_path, "findings", "run").stdout
