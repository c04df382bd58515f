"""The origin of injected non-finite values is found; controls are silent and nothing changes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from answers import Command
from backlight.capture.hub import HUB
from backlight.diagnose.nan.tracer import NanTracer
from cases import CASE_NAMES, CASES, assert_equal
from faults import missing_gradients
from faults.injection import Fault, Train, end, run_under
from faults.missing_gradients import Net, train
from faults.non_finite import FAULTS, scaler_searches
from ranks.launching import run_ranks


def tracer(train: Train, injected: bool) -> NanTracer:
    observer = NanTracer(end)
    run_under(observer, train, injected)
    assert not HUB.active
    return observer


EACH = pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))


@EACH
def test_origin(fault: Fault) -> None:
    found = tracer(fault.train, injected=True).origin
    expected = dict(fault.expected)
    assert (found.constant is not None) == expected.pop("constant", False)
    assert found.is_input == expected.pop("is_input", False)
    record = found.record
    if "operation" in expected:
        assert record.operation.split(".")[0] == expected.pop("operation")
    for name, value in expected.items():
        assert getattr(record if name in {"phase", "node"} else found, name) == value, name
    if fault.line is not None:
        assert record.line.number == fault.line
    if record.phase in {"forward", "backward"}:
        assert found.parameters


@pytest.mark.parametrize("name", ["origin_in_backward_only", "origin_in_forward", "overflow_in_forward"])
def test_value_that_has_a_part_in_the_loss_is_not_left_out(name: str) -> None:
    assert not tracer(FAULTS[name].train, injected=True).origin.is_zero_gradient


LIBRARY = """
import torch

def forward(hidden):
    return torch.log(hidden - 2)
"""


def test_line_of_a_library_is_named_next_to_the_line_that_calls_it() -> None:
    library: dict[str, Callable[[Tensor], Tensor]] = {}
    exec(compile(LIBRARY, "/env/lib/python3/site-packages/layers/logs.py", "exec"), library)
    record = tracer(lambda _: train(Net(library["forward"])), injected=True).origin.record
    assert (record.library_line.path.rpartition("/")[2], record.library_line.number) == ("logs.py", 5)
    assert record.line.path == missing_gradients.__file__
    own = tracer(FAULTS["origin_in_forward"].train, injected=True).origin.record
    assert own.library_line is None


@EACH
def test_control_is_silent(fault: Fault) -> None:
    observer = tracer(fault.train, injected=False)
    assert observer.origin is None
    assert observer.backwards == 4


@pytest.mark.parametrize(("max_steps", "steps"), [(2, 2), (9, 4), (None, 4)])
def test_steps_are_counted_to_the_last(max_steps: int | None, steps: int) -> None:
    observer = NanTracer(end, max_steps)
    run_under(observer, FAULTS["origin_in_forward"].train, False)
    assert (observer.observed_steps, observer.backwards) == (steps, steps)


def test_spread_of_a_non_finite_value() -> None:
    found = tracer(FAULTS["origin_in_backward_only"].train, injected=True).origin
    # Backward goes from the last layer to the first: parameters behind the origin are affected, none before.
    assert set(found.parameters) == {"first.weight", "first.bias"}
    assert "Root" not in found.modules
    found = tracer(FAULTS["origin_in_forward"].train, injected=True).origin
    assert found.modules == ["second", "last"]


def test_custom_backward_has_its_own_line() -> None:
    found = tracer(FAULTS["origin_in_a_custom_backward"].train, injected=True).origin
    assert "ctx.divisor" in found.record.own_line.text
    assert found.record.line.function in {"forward", "third"}


def test_skipped_steps_of_a_searching_scaler_are_not_reported() -> None:
    skipped: list[int] = []
    observer = tracer(lambda _injected: skipped.append(scaler_searches()), injected=False)
    assert observer.origin is None
    assert skipped == [observer.skipped_steps]
    assert observer.skipped_steps > 0


OVERFLOWING = {"scaler_skips", "scaler_skips_with_fused"}
"""Cases that multiply the loss itself by infinity, before the scaler does anything."""


@pytest.mark.parametrize("name", CASE_NAMES)
def test_cases_stay_bit_identical_and_finite(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
    case = CASES[name]
    plain = case.train()

    ended = []
    observer = NanTracer(lambda: ended.append(name))
    with observer:
        watched = case.train()
    assert_equal(plain, watched)
    assert observer.notes == []
    if name in OVERFLOWING:
        assert name in ended
        assert "inf" in observer.origin.record.line.text
    else:
        assert observer.origin is None


SCRIPT = """
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    print("step", step)
    loss = torch.log(model(torch.ones(2, 3)).mean() * (0 if step == 3 else 0.01) + (0 if step == 3 else 1))
    loss.backward()
    optimizer.step()
"""


def test_command(tmp_path: Path, command: Command) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code, out, errors = command("nan", "--json", "--fail-on", "any", "train.py")
    assert code == 1, errors
    found = json.loads(out)["origin"]
    assert (found["step"], found["phase"], found["value"]) == (3, "forward", "infinity")
    assert found["line"]["number"] == 8
    assert errors == "step 0\nstep 1\nstep 2\nstep 3\n"


RANKS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    out = model(torch.randn(3, 4))
    if dist.get_rank() == 1 and step == 2:
        out = torch.sqrt(out - 100)
    optimizer.zero_grad()
    out.mean().backward()
    dist.barrier()
    optimizer.step()
"""


@pytest.mark.full
def test_rank_of_the_origin(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    done = run_ranks(tmp_path, "-m", "backlight", "nan", "--json", "train.py")
    assert all(one.stdout for one in done), [one.stderr for one in done]
    found = [json.loads(one.stdout)["origin"] for one in done]
    assert [(f["step"], f["is_input"]) for f in found] == [(2, True), (2, False)]
    assert found[1]["operation"] == "sqrt.default"
    assert found[1]["line"]["number"] == 11
    assert sorted(found[0]["parameters"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
