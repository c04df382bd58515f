"""Controls: suspicions, effects of a control, confirmed and withdrawn claims."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from backlight.diagnose.profile import controls
from backlight.diagnose.profile.controls import (
    CACHED_BATCH,
    FUSED_OPTIMIZER,
    NO_CLIPPING,
    ONE_THREAD,
    WITHOUT_LINE,
    Control,
    ControlRunError,
    Suspicion,
    find_suspicions,
    run_controls,
)
from backlight.diagnose.profile.optimizations import LiveObjects, Optimization
from backlight.diagnose.profile.run import ProfileOptions


def profile(shares: dict[str, float], **options: Any) -> Any:
    return SimpleNamespace(
        result=SimpleNamespace(
            phases={name: SimpleNamespace(share=share) for name, share in shares.items()},
            optimizations=[Optimization("fused optimizer", options.get("fused", "off"), "")],
        ),
        observed=SimpleNamespace(live=LiveObjects(threads=options.get("threads", 1), cores=4)),
        operations=SimpleNamespace(
            operators=[SimpleNamespace(calls=10, host_ms=options.get("host", 10.0))],
            copies=[SimpleNamespace(line=line, share=share) for line, share in options.get("copies", ())],
        ),
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (profile({"data": 0.05, "clip": 0.01, "optimizer": 0.05}), []),
        (profile({"data": 0.3}), [CACHED_BATCH]),
        (profile({"clip": 0.2}), [NO_CLIPPING]),
        (profile({"optimizer": 0.2}), [FUSED_OPTIMIZER]),
        (profile({"optimizer": 0.2}, fused="on"), []),
        (profile({}, threads=8), [ONE_THREAD]),
        (profile({}, threads=4), []),
        (profile({}, threads=4, host=0.2), [ONE_THREAD]),
        (profile({}, copies=[("a.py:3 (f)", 0.04), ("a.py:3 (f), backward", 0.03)]), [WITHOUT_LINE]),
        (profile({}, copies=[("a.py:3 (f)", 0.04), ("a.py:4 (f)", 0.03), ("", 0.5)]), []),
    ],
)
def test_suspicions_of_a_profile(found: Any, expected: list[str]) -> None:
    assert [suspicion.name for suspicion in find_suspicions(found)] == expected


def outcome(monkeypatch: pytest.MonkeyPatch, without: list[Any], with_it: list[Any]) -> Any:
    durations: dict[bool, list[Any]] = {False: list(without), True: list(with_it)}
    order: list[bool] = []

    def run(_profile: Any, _options: ProfileOptions, _what: Suspicion, *, module: bool, on: bool) -> float:
        order.append(on)
        duration = durations[on].pop(0)
        if isinstance(duration, str):
            raise ControlRunError(duration)
        return duration

    monkeypatch.setattr(controls, "_run", run)
    (found,) = run_controls(profile({"data": 0.3}), ProfileOptions(), module=False, pairs=len(without))
    return found, order


def test_faster_control_confirms_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    found, order = outcome(monkeypatch, [10, 11, 10.5, 10], [7, 7.8, 7.3, 7.1])
    assert found.outcome == "confirmed"
    assert found.low < found.ratio < found.high < 1
    assert found.ratio == pytest.approx(0.70, abs=0.02)
    assert found.text.startswith("confirmed: waiting for data takes 30% of a step; with the control (cached")
    assert order == [False, True, True, False, False, True, True, False]


def test_control_without_effect_withdraws_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = outcome(monkeypatch, [10, 11, 10.5], [10.1, 10.8, 10.6])
    assert found.outcome == "withdrawn"
    assert found.text.startswith("withdrawn: waiting for data takes 30% of a step, but with the control")


def test_interval_with_no_effect_and_the_expected_one_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = outcome(monkeypatch, [10, 14, 9], [9, 9, 10])
    assert found.low < 0.7
    assert found.high > 1
    assert found.outcome == "undecided"
    assert found.text.startswith("undecided: waiting for data takes 30% of a step, but")


def test_failed_control_confirms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found, order = outcome(monkeypatch, [10, 10, 10], ["with the control: the script failed", 1, 1])
    assert found.outcome == ""
    assert found.ratio is None
    assert found.text.endswith("takes 30% of a step; with the control: the script failed")
    assert order == [False, True]


def test_several_ranks_and_two_pairs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--pairs 2: expected 3 or more"):
        run_controls(profile({}), ProfileOptions(), module=False, pairs=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--confirm: controls are run by one process"):
        run_controls(profile({}), ProfileOptions(), module=False, pairs=5)


@pytest.mark.parametrize("on", [True, False])
def test_cached_batch_repeats_the_first_batch(on: bool) -> None:
    with Control(CACHED_BATCH, on=on):
        loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
        batches = [batch.tolist() for _ in range(2) for (batch,) in loader]
    whole = [[0, 1], [2, 3], [4, 5]]
    assert batches == ([[0, 1]] * len(batches) if on else whole * 2)
    assert len(batches) == 6 if not on else len(batches) >= 6
    assert [b.tolist() for (b,) in loader] == whole


def test_no_clipping_keeps_gradients() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().mul(100).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with Control(NO_CLIPPING):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_optimizers_are_fused(kind: Any) -> None:
    with Control(FUSED_OPTIMIZER):
        assert kind(nn.Linear(2, 2).parameters(), lr=0.1).param_groups[0]["fused"]
    assert not kind(nn.Linear(2, 2).parameters(), lr=0.1).param_groups[0]["fused"]


def test_one_thread_cannot_be_changed_by_the_script() -> None:
    with Control(ONE_THREAD):
        torch.set_num_threads(2)
        assert torch.get_num_threads() == 1


def cast(x: Tensor) -> Tensor:
    return x.double().float()  # the line


LINE = 1 + next(i for i, line in enumerate(Path(__file__).read_text().splitlines()) if "# the line" in line)


@pytest.mark.parametrize(("line", "same"), [(LINE, True), (LINE + 1, False)])
def test_copy_of_one_line_is_skipped(line: int, same: bool) -> None:
    x = torch.ones(3)
    with Control(WITHOUT_LINE, f"{__file__}:{line}") as control:
        assert (cast(x) is x) == same
        control._mode.__exit__(None, None, None)


def test_unknown_control_is_refused() -> None:
    with pytest.raises(ValueError, match="no control is called 'luck'; expected one of: cached batch"):
        Control("luck")


SCRIPT = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 4000
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.ones(4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for batch in DataLoader(Data(), batch_size=2):
    model(batch).sum().backward()
    time.sleep(0.002)
    optimizer.step()
"""


@pytest.mark.full
def test_slow_loader_is_confirmed_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "backlight", "profile", "--json", "--confirm", "--pairs", "3"]
    done = subprocess.run(
        [*command, "--timed", "12", "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = {row["name"]: row for row in json.loads(done.stdout)["controls"]}
    assert found[CACHED_BATCH]["outcome"] == "confirmed"
    assert found[CACHED_BATCH]["ratio"] < 1
