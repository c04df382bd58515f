"""The shared base of the framework integrations: errors of a watch never end the training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backlight
from backlight.integrations.hosted import Hosted, HostedCallback
from processes import run_captured


def hosted(run: Path | None, **more: Any) -> Hosted:
    return Hosted("Host", run, {"monitors": ("health",), **more.pop("settings", {})}, summary=False, **more)


class Loop:
    """A training loop with two parameters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 4)).square().mean().backward()
            self.optimizer.step()


def test_unusable_directory_warns_once_and_training_continues(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("no folder")
    loop, host = Loop(), hosted(tmp_path / "taken")
    with pytest.warns(
        RuntimeWarning, match=r"Host.begin: not recorded: anything .* is a file.*continues"
    ) as caught:
        host.begin([loop.model], [loop.optimizer], name="x")
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the caller's line, not one of backlight
    loop.steps(2)
    host.log({"a": 1.0})
    host.end()
    assert not host.active
    assert host.watch is None


def test_unknown_monitor_is_rejected_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no monitor is called 'helth'; expected some of: .*health"):
        hosted(tmp_path / "run", settings={"monitors": ("helth",)})


def test_findings_before_the_training_are_refused() -> None:
    class Callback(HostedCallback):
        """A callback without a framework."""

    with pytest.raises(RuntimeError, match=r"Callback.findings: no training run has begun"):
        _ = Callback().findings


def test_only_numbers_are_logged_under_any_metric_name(tmp_path: Path) -> None:
    loop, host = Loop(), hosted(tmp_path / "run")
    host.begin([loop.model], [loop.optimizer], name="x", step=4)
    loop.steps(2)
    values = {"text": "1.5", "table": [1, 2], "step": 9, "self": 1, "val/acc": torch.tensor([0.5]), "n": 3}
    host.log(values, step=6)
    host.end()
    run = backlight.open_run(tmp_path / "run")
    assert sorted(run.scalar_names("user")) == ["n", "step", "val/acc"]
    assert run.scalar("step", source="user").values.tolist() == [6.0]
    assert run.scalar("val/acc", source="user").steps.tolist() == [5]


def test_raising_user_hook_is_reported(tmp_path: Path) -> None:
    def send_mail(_findings: Any) -> None:
        raise OSError("no mail server")

    loop, host = Loop(), hosted(tmp_path / "run", on_end=send_mail)
    host.begin([loop.model], [loop.optimizer], name="x")
    loop.steps(1)
    with pytest.warns(
        RuntimeWarning, match=r"Host.on_end: .*send_mail would have done, after OSError: no mail"
    ):
        host.end()
    assert backlight.open_run(tmp_path / "run").status.value == "finished"


def test_abandoned_run_is_closed_when_the_next_begins(tmp_path: Path) -> None:
    first, second, host = Loop(), Loop(), hosted(tmp_path / "run")
    host.begin([first.model], [first.optimizer], name="x")
    first.steps(2)
    with pytest.warns(RuntimeWarning, match=r"Host.begin: .* holds a run of .* already \(failed\)"):
        host.begin([second.model], [second.optimizer], name="x")
    second.steps(1)
    host.begin([second.model], [second.optimizer], name="x", step=1)  # after a first step it goes on
    second.steps(3)
    host.end()
    host.end()
    run = backlight.open_run(tmp_path / "run")
    assert [attempt.status.value for attempt in run.attempts] == ["failed", "finished"]
    assert [attempt.step_offset for attempt in run.attempts] == [0, 1]


def test_default_directory_is_named_after_the_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loop, host = Loop(), hosted(None)
    for step in (0, 2, 0):
        host.begin([loop.model], [loop.optimizer], name="Net", step=step)
        loop.steps(2)
        host.end()
    first, third = sorted((tmp_path / "runs").iterdir(), key=lambda path: path.stat().st_ctime)
    assert first.name.startswith("Net-")
    attempts = {path: len(backlight.open_run(path).attempts) for path in (first, third)}
    assert sorted(attempts.values()) == [1, 2]


def test_run_is_closed_at_interpreter_exit(tmp_path: Path) -> None:
    program = f"""
import torch
from backlight.integrations.hosted import Hosted, HostedCallback
model = torch.nn.Linear(2, 1)
host = Hosted("Host", {str(tmp_path / "run")!r}, {{"monitors": ("health",)}}, summary=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
host.begin([model], [optimizer], name="x")
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
raise ValueError("injected")
"""
    done = run_captured([sys.executable, "-c", program], timeout=120)
    assert done.returncode == 1
    assert "injected" in done.stderr
    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "failed"
    assert run.last_step() == 0
