"""Trace of backward: correct lines, flushed when they happen, and no gradient changes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import backlight
from backlight.monitors.stalls.instrument.backward_trace import Tracer
from backlight.monitors.stalls.settings import traced_kinds
from backlight.session.settings import Settings
from cases import CASE_NAMES, CASES, assert_equal, build
from ranks.launching import run_ranks


def trace(kinds: tuple[str, ...], train: object) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    tracer = Tracer(kinds, lambda text, payload: lines.append({"text": text, **payload}))
    tracer.start()
    try:
        train()
    finally:
        tracer.stop()
    return lines


def strip_root(name: str) -> str:
    """Remove the class of the root, which is printed while other models exist."""
    return re.sub(r"^NormedMlp(#\d+)?\.?", "", name)


def run_backward(model: nn.Module) -> None:
    model(torch.randn(5, 4)).pow(2).mean().backward()


def test_gradients_are_traced_in_the_order_of_backward() -> None:
    model = build()
    lines = [
        line for line in trace(("gradients",), lambda: run_backward(model)) if line["what"] == "gradient"
    ]
    names = [strip_root(line["name"]) for line in lines]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    assert {names.index("last.weight"), names.index("last.bias")} == {0, 1}
    assert [line["number"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[0]["text"].startswith("+")
    assert "gradient 1/" in lines[0]["text"]
    assert "[8x4]" in lines[names.index("first.weight")]["text"]


def test_modules_are_traced_from_the_last_to_the_first() -> None:
    model = build()
    lines = [line for line in trace(("modules",), lambda: run_backward(model)) if line["what"] == "module"]
    assert [strip_root(line["name"]) for line in lines] == ["last", "", "norm", "first"]


def test_removed_tracer_is_silent() -> None:
    model = build()
    lines = trace(("gradients", "modules"), lambda: run_backward(model))
    count = len(lines)
    run_backward(model)
    assert len(lines) == count
    assert not model.first.weight._post_accumulate_grad_hooks


def test_autograd_grad_traces_modules_and_no_parameter() -> None:
    model = build()

    def train() -> None:
        x = torch.randn(5, 4, requires_grad=True)
        torch.autograd.grad(model(x).pow(2).mean(), x)

    lines = trace(("gradients", "modules"), train)
    events = [line["what"] for line in lines]
    assert events == ["grad_begin", *["module"] * 4, "grad_end"]
    assert [strip_root(line["name"]) for line in lines[1:-1]] == ["last", "", "norm", "first"]


ALL_KINDS = ("gradients", "modules", "buckets")
WITHOUT_BACKWARD = {
    "functional_gradients": set[str](),
    "gradients_by_grad": {"grad_begin", "grad_end", "module"},
}
"""Traced events of cases that do not call backward."""


@pytest.mark.parametrize("name", CASE_NAMES)
def test_tracing_changes_nothing(name: str) -> None:
    case = CASES[name]
    warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
    traced: list[list[torch.Tensor]] = []
    plain = case.train()
    lines = trace(ALL_KINDS, lambda: traced.append(case.train()))
    assert_equal(plain, traced[0])
    recorded = {line["what"] for line in lines}
    assert recorded == WITHOUT_BACKWARD.get(name, {"begin", "end", "gradient", "module"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["plain", "checkpointing_reentrant", "copied_and_saved", "scaler_with_fused"]
)
def test_watch_with_trace_changes_nothing(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    plain = case.train()
    with backlight.watch(run=tmp_path / "run", every=1, stalls={"trace": ALL_KINDS}, monitors=("health",)):
        traced = case.train()
    assert_equal(plain, traced)
    events = backlight.open_run(tmp_path / "run").events("trace")
    assert {event.payload["what"] for event in events} == {"begin", "end", "gradient", "module"}
    assert {event.step for event in events} == set(range(case.steps))


@pytest.mark.slow
def test_long_chain_of_modules_is_traced_up_to_a_limit() -> None:
    def train() -> None:
        cell, y = nn.Tanh(), torch.ones(1, requires_grad=True)
        for _ in range(20_000):
            y = cell(y)
        y.sum().backward()  # its nodes are released afterwards: more wrappers would overflow the stack

    events = [line["what"] for line in trace(("modules",), train)]
    assert (events.count("module"), events.count("limit")) == (5000, 1)


def test_kinds() -> None:
    assert traced_kinds("gradients, buckets") == ("gradients", "buckets")
    assert traced_kinds(None, {"BACKLIGHT_TRACE": "modules"}) == ("modules",)
    assert traced_kinds(None, {}) == ()
    with pytest.raises(
        ValueError, match="BACKLIGHT_TRACE: cannot trace 'layers'; expected some of gradients,mod"
    ):
        traced_kinds(None, {"BACKLIGHT_TRACE": "layers"})
    with pytest.raises(ValueError, match=r"^stalls\.trace: cannot trace 'all'"):
        Settings.of({"stalls": {"trace": "all"}})


HANGING = """
import sys, time, torch
class Hanging(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad):
        print("stuck", flush=True)
        time.sleep(60)
        return grad
first, last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
last(Hanging.apply(first(torch.ones(2, 3)))).sum().backward()
optimizer.step()
"""


@pytest.mark.slow
def test_lines_and_events_are_stored_when_backward_hangs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANGING)
    process = subprocess.Popen(
        [sys.executable, "-m", "backlight", "run", "--out", "run", "train.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "BACKLIGHT_TRACE": "gradients"},
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "stuck\n"
        # Earlier lines are already in the pipe and in the run, without waiting for a flush.
        run = backlight.open_run(tmp_path / "run")
        names = [e.payload["name"] for e in run.events("trace") if e.payload["what"] == "gradient"]
        assert sorted(names) == ["last.bias", "last.weight"]
    finally:
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert [line.split(" ms ")[1] for line in errors.splitlines() if "gradient" in line] == [
        "gradient 1/4 last.bias [1]",
        "gradient 2/4 last.weight [1x3]",
    ]


DISTRIBUTED = """
import os, sys, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Linear(200, 200) for _ in range(4)])
model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.35)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    if step == 2:
        with model.no_sync():
            model(torch.randn(2, 200)).sum().backward()
    else:
        model(torch.randn(2, 200)).sum().backward()
    optimizer.step()
print("sum", rank, float(sum(p.double().sum() for p in net.parameters())), flush=True)
dist.destroy_process_group()
"""


def trace_ranks(folder: Path) -> list[subprocess.CompletedProcess[str]]:
    (folder / "train.py").write_text(DISTRIBUTED)
    kinds = "gradients,modules,buckets"
    done = run_ranks(
        folder, "-m", "backlight", "run", "--out", "run", "--set", f"stalls.trace={kinds}", "train.py"
    )
    assert [process.returncode for process in done] == [0, 0], [process.stderr for process in done]
    return done


@pytest.mark.full
def test_tracing_leaves_ranks_unchanged(tmp_path: Path) -> None:
    traced = trace_ranks(tmp_path)
    assert [process.stdout for process in run_ranks(tmp_path, "train.py")] == [
        process.stdout for process in traced
    ]


@pytest.mark.slow
def test_buckets_over_two_ranks(tmp_path: Path) -> None:
    for rank, done in enumerate(trace_ranks(tmp_path)):
        lines = [line for line in done.stderr.splitlines() if line.startswith(f"[rank {rank}]")]
        steps = [[line for line in lines if f" step {n} " in line] for n in range(3)]
        assert "Sequential: 1 buckets (assignment of the first backward" in "\n".join(steps[0])
        # Rebuilt in the order in which gradients arrived: a bucket is full with three layers of 160.8 kB.
        first = [line.split(" ms ")[1] for line in steps[1] if "bucket" in line]
        assert first[0] == "Sequential: 2 buckets"
        assert "its all-reduce starts" in first[1]
        assert first[-1].endswith("every bucket is reduced")
        assert "not reduced (no_sync)" in "\n".join(steps[2])
        assert "every bucket is reduced" not in "\n".join(steps[2])
    run = backlight.open_run(tmp_path / "run")
    last = [e for e in run.events("trace") if e.payload["what"] == "assignment" and e.step == 1]
    assert {event.rank for event in last} == {0, 1}
    # What DDP itself logs a step later agrees, apart from the note on no_sync.
    logged = [e for e in run.events("trace") if e.payload["what"] == "assignment" and e.step == 2]
    assert [e.payload["buckets"] for e in logged] == [e.payload["buckets"] for e in last]
    parameters = [name for bucket in last[0].payload["buckets"] for name in bucket]
    assert sorted(parameters) == sorted(f"{n}.{kind}" for n in range(4) for kind in ("weight", "bias"))
    complete = [
        e.payload
        for e in run.events("trace")
        if e.payload["what"] == "bucket" and e.step == 1 and e.rank == 0
    ]
    assert [p["parameters"] for p in complete] == last[0].payload["buckets"]
