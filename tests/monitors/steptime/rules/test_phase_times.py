"""Rules on phase times: injected faults and their controls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backlight.monitors.steptime.model.evidence import RUNTIME_INFO
from backlight.records import Severity
from backlight.store.read.run import Run
from injected_faults import LATE, LOOP, WAITS
from injected_faults import PHASES as HEALTHY
from run_builder import build_run

WAITING = HEALTHY | {"data": 0.02}
FUSED = {"optimizers": [{"type": "AdamW", "tensors": 148, "fused": True, "foreach": False}]}


PROFILE = {"controls": []}


def control(ratio: float, high: float | None = None) -> dict[str, Any]:
    row = {"name": "cached batch", "ratio": ratio, "low": ratio - 0.01, "high": high or ratio + 0.01}
    return {"controls": [row]}


LINES = {
    "samples": 60,
    "lines": [
        ["data", "/home/ann/train.py:9", "Images.__getitem__", 40],
        ["data", "/home/ann/train.py:8", "f", 9],
    ],
}


def test_a_long_wait_for_data_is_a_warning_with_its_line(stored: Any, evaluated: Any) -> None:
    (finding,) = evaluated(stored(WAITING, events=[(59, "sampled_lines", LINES)]), "bottleneck")
    assert finding.severity is Severity.WARNING
    assert finding.subject.line == "/home/ann/train.py:9"
    assert "mostly at train.py:9 (Images.__getitem__)." in finding.detail
    assert finding.evidence[0].path == "scalars/phase/data"
    assert "backlight profile --confirm" in finding.fix


def test_a_short_wait_and_one_on_a_busy_machine_are_hints(stored: Any, evaluated: Any) -> None:
    short = {name: seconds / 4 for name, seconds in WAITING.items()}
    for run in (stored(short), stored(WAITING, runtime_info={"core_wait": 0.2})):
        (finding,) = evaluated(run, "bottleneck")
        assert finding.severity is Severity.INFO


def test_a_wait_in_the_thread_that_trains_is_its_own_on_a_busy_machine(stored: Any, evaluated: Any) -> None:
    """Of the step 29 % are a wait: what the thread waited for a core is taken off, and without workers."""
    for waited, workers, severity in (
        (0.06, 0, Severity.WARNING), (0.15, 0, Severity.INFO), (0.06, 2, Severity.INFO),
        (0.06, None, Severity.INFO),
    ):  # fmt: skip
        run = stored(WAITING, runtime_info={"core_wait": waited, "workers": workers})
        (finding,) = evaluated(run, "bottleneck")
        assert finding.severity is severity
        assert f"waited for a core {100 * waited:.2g} % of the time" in finding.detail


def test_a_short_run_waits_where_the_interval_shows_it(stored: Any, evaluated: Any) -> None:
    (finding,) = evaluated(stored(WAITING, steps=10), "bottleneck")
    assert (finding.severity, "(9 steps)" in finding.detail) == (Severity.WARNING, True)
    uneven = {(step, "data"): 0.0 for step in range(1, 5)}  # the others wait: five of nine
    (hint,) = evaluated(stored(WAITING, steps=10, changes=uneven), "bottleneck")
    assert hint.severity is Severity.INFO
    first = {(step, "data"): 0.3 for step in (0, 1, 2)}  # workers that start
    for control in (
        stored(WAITING, steps=8),
        stored(HEALTHY, steps=10),
        stored(HEALTHY, steps=10, changes=first),
    ):
        assert not evaluated(control, "bottleneck")


def test_a_wait_in_fewer_than_half_of_the_steps_has_no_finding(stored: Any, evaluated: Any) -> None:
    changes = {(step, "data"): 0.2 for step in range(0, 60, 3)}
    assert not evaluated(stored(HEALTHY, changes=changes), "bottleneck")


GENERATOR = HEALTHY | {"data": 0.0, "between": 0.08}


def sampled(*rows: tuple[str, int, str]) -> list[tuple[int, str, dict[str, Any]]]:
    """Return the event of samples in a phase, so many, with what they wait for; each row has a line."""
    lines = [
        [phase, f"/home/ann/train.py:{n}", "f", count, waits] for n, (phase, count, waits) in enumerate(rows)
    ]
    return [(59, "sampled_lines", {"samples": sum(row[3] for row in lines), "lines": lines})]


def test_any_iterator_that_is_waited_for_is_data(stored: Any, evaluated: Any) -> None:
    """Between the phases lie seven tenths of a step, which wait for an iterator in all samples."""
    (finding,) = evaluated(stored(GENERATOR, events=sampled(("other", 40, "batch"))), "bottleneck")
    assert (finding.severity, finding.subject.line) == (Severity.WARNING, "/home/ann/train.py:0")
    assert finding.evidence[1].path == "events/sampled_lines"
    half = sampled(("other", 5, "batch"), ("other", 5, ""))
    (hint,) = evaluated(
        stored(GENERATOR, events=sampled(("other", 3, "batch"), ("other", 7, ""))), "bottleneck"
    )
    assert hint.severity is Severity.INFO
    (finding,) = evaluated(stored(GENERATOR, events=half), "bottleneck")
    assert finding.severity is Severity.WARNING
    for control in (sampled(("other", 40, "")), sampled(("other", 2, "batch")), ()):
        assert not evaluated(stored(GENERATOR, events=control), "bottleneck")


def test_saving_is_a_warning_and_evaluation_a_hint(stored: Any, evaluated: Any) -> None:
    rows = (("checkpoint", 40, ""), ("evaluation", 30, ""), ("forward", 30, ""))
    found = {f.subject.phase: f for f in evaluated(stored(HEALTHY, events=sampled(*rows)), "bottleneck")}
    assert {phase: f.severity for phase, f in found.items()} == {
        "checkpoint": Severity.WARNING, "evaluation": Severity.INFO,
    }  # fmt: skip
    assert found["checkpoint"].subject.line == "/home/ann/train.py:0"
    assert found["checkpoint"].evidence[0].value == pytest.approx(0.4)
    (busy,) = evaluated(
        stored(HEALTHY, events=sampled(rows[0], ("forward", 60, "")), runtime_info={"core_wait": 0.3}),
        "bottleneck",
    )
    assert (busy.severity, "waited for a core 30 % of the time" in busy.detail) == (Severity.INFO, True)
    for control in (
        (("checkpoint", 15, ""), ("forward", 30, "")),
        (("checkpoint", 40, ""), ("forward", 170, "")),
    ):
        assert not evaluated(stored(HEALTHY, events=sampled(*control)), "bottleneck")


@pytest.mark.parametrize(("waits", "does"), [("item", "waits for the device"), ("to", "copies")])
def test_waits_for_the_device_cost_what_it_is_idle(
    stored: Any, evaluated: Any, waits: str, does: str
) -> None:
    events = sampled(("other", 60, waits), ("forward", 40, ""))
    (hint,) = evaluated(stored(HEALTHY, events=events), "bottleneck")
    assert (hint.severity, hint.subject.line) == (Severity.INFO, "/home/ann/train.py:0")
    assert hint.title == f"The host {does} in `{waits}()` for 60 % of the time"
    assert "not known" in hint.detail
    for used, severity in ((0.5, Severity.WARNING), (0.9, Severity.INFO)):
        utilization = {"gpu/utilization": dict.fromkeys(range(60), used)}
        (finding,) = evaluated(stored(HEALTHY, events=events, scalars=utilization), "bottleneck")
        assert (finding.severity, f"idle for {100 - 100 * used:.0f} %" in finding.detail) == (severity, True)
    assert not evaluated(
        stored(HEALTHY, events=sampled(("other", 10, waits), ("forward", 90, ""))), "bottleneck"
    )


@pytest.mark.slow
def test_control_confirms_or_refutes_the_data_wait(stored: Any, evaluated: Any) -> None:
    (found,) = evaluated(stored(WAITING, profile=control(0.72)), "bottleneck")
    assert found.severity is Severity.WARNING
    assert found.evidence[1].value == 0.72
    assert any("controls/cached batch" in evidence.path for evidence in found.evidence)
    for refuting in (control(0.97), control(0.8, 1.02), control(1.1)):
        assert not evaluated(stored(WAITING, profile=refuting), "bottleneck")


@pytest.mark.slow
def test_fast_loader_and_short_run_have_no_finding(stored: Any, evaluated: Any) -> None:
    assert not evaluated(stored(HEALTHY), "bottleneck")
    assert not evaluated(stored(WAITING, steps=8, profile=PROFILE), "bottleneck")
    assert evaluated(stored(WAITING, steps=8, profile=PROFILE), "bottleneck", measured_steps=7)


@pytest.mark.slow
def test_for_loop_optimizer_is_found_if_it_takes_time(stored: Any, evaluated: Any) -> None:
    slow = HEALTHY | {"optimizer": 0.012}
    (found,) = evaluated(stored(slow, runtime_info=LOOP), "bottleneck")
    assert found.subject.phase == "optimizer"
    assert found.evidence[1].value == "AdamW: fused off, foreach off"
    assert not evaluated(stored(slow, runtime_info=FUSED), "bottleneck")
    assert not evaluated(stored(HEALTHY, runtime_info=LOOP), "bottleneck")
    toy = {name: seconds / 20 for name, seconds in slow.items()}
    assert not evaluated(stored(toy, runtime_info=LOOP), "bottleneck")
    assert not evaluated(stored(slow), "bottleneck")  # no optimizer is recorded
    (adamw,) = LOOP["optimizers"]
    for others in ([adamw, adamw | {"type": "Muon"}], [adamw | {"type": "RMSprop"}]):
        assert not evaluated(stored(slow, runtime_info={"optimizers": others}), "bottleneck")
    assert not evaluated(stored(slow, runtime_info=LOOP | {"core_wait": 0.2}), "bottleneck")


@pytest.mark.parametrize(("slow", "expected"), [(1, ["optimizer_time/1"]), (0, [])])
def test_several_optimizers_are_evaluated_by_their_own_time(
    stored: Any, evaluated: Any, slow: int, expected: list[str]
) -> None:
    """AdamW loops; it is named where its own time is long, and not where Muon takes that of the phase."""
    groups = [
        {"optimizer": 0, "type": "Muon", "tensors": 20, "fused": False, "foreach": None},
        {"optimizer": 1, **LOOP["optimizers"][0]},
    ]
    times = {f"optimizer_time/{n}": dict.fromkeys(range(60), 0.011 if n == slow else 1e-4) for n in (0, 1)}
    run = stored(HEALTHY | {"optimizer": 0.012}, runtime_info={"optimizers": groups}, scalars=times)
    found = evaluated(run, "bottleneck")
    assert [one.evidence[0].path for one in found] == [f"scalars/{name}" for name in expected]
    assert all(one.evidence[1].value == "AdamW: fused off, foreach off" for one in found)


def test_outliers_are_reported_by_cause(stored: Any, evaluated: Any) -> None:
    changes = {(step, "data"): 0.4 - step / 1000 for step in (30, 40, 45)}
    changes |= {(step, "backward"): 0.5 for step in (50, 52, 54)}
    events = [(step, "garbage_collection", {"seconds": 0.46, "generation": 2}) for step in (50, 52, 54)]
    found = evaluated(stored(HEALTHY, changes=changes, events=events), "outlier_steps")
    assert {f.severity for f in found} == {Severity.INFO}
    by_phase = {f.subject.phase: f for f in found}
    assert set(by_phase) == {"data", None}
    assert by_phase["data"].evidence[0].path == "scalars/phase/data"
    assert by_phase["data"].subject.step == 30
    assert by_phase[None].evidence[0].path == "events/garbage_collection"
    assert "gc.freeze()" in by_phase[None].fix


@pytest.mark.slow
def test_one_or_two_outliers_and_a_busy_machine_have_no_finding(stored: Any, evaluated: Any) -> None:
    changes = {(step, "backward"): 0.5 for step in (30, 40, 50)}
    assert evaluated(stored(HEALTHY, changes=changes, runtime_info={"core_wait": 0.01}), "outlier_steps")
    assert not evaluated(stored(HEALTHY, changes=changes, runtime_info={"core_wait": 0.2}), "outlier_steps")
    assert not evaluated(stored(HEALTHY, changes=changes, runtime_info=None), "outlier_steps")  # goes on
    del changes[30, "backward"]
    assert not evaluated(stored(HEALTHY, changes=changes), "outlier_steps")


def test_short_pause_is_not_the_cause_of_a_long_step(stored: Any, evaluated: Any) -> None:
    events = [(50, "garbage_collection", {"seconds": 0.01, "generation": 2})]
    changes = {(step, "backward"): 0.5 for step in (48, 50, 52)}
    (found,) = evaluated(stored(HEALTHY, changes=changes, events=events), "outlier_steps")
    assert found.subject.phase == "backward"


@pytest.mark.parametrize(("optimizers", "expected"), [(1, 1), (2, 0)])
def test_a_step_is_compared_with_steps_of_the_same_optimizers(
    tmp_path: Path, evaluated: Any, optimizers: int, expected: int
) -> None:
    """Muon steps in every third step, or all steps are of one optimizer."""
    scalars = {}
    for step in range(90):
        is_muon = step >= 12 and step % 3 == 0
        times = {"phase/forward": 0.1 + 0.0001 * (step % 7), "phase/optimizer": 0.3 if is_muon else 0.01}
        scalars[step] = times | {f"lr/{int(is_muon) if optimizers == 2 else 0}/0": 0.1}
    run = build_run(
        tmp_path / "run", monitors=("steptime",), scalars=scalars, events=[(89, RUNTIME_INFO, {})]
    )
    assert len(evaluated(run, "outlier_steps")) == expected


@pytest.mark.slow
def test_steps_with_an_evaluation_are_no_outliers(stored: Any, evaluated: Any) -> None:
    levels = HEALTHY | {"evaluation": 0.0}
    changes = {(step, "data"): 0.4 for step in (20, 30, 40)}
    assert evaluated(stored(levels, changes=changes), "outlier_steps")
    changes |= {(step, "evaluation"): 0.1 for step in (20, 30, 40)}  # the data is that of the evaluation
    assert not evaluated(stored(levels, changes=changes), "outlier_steps")
    acting = {**levels, "evaluation": 0.01}  # a policy acts in every step
    assert evaluated(stored(acting, changes=changes), "outlier_steps")


def test_longer_episodes_are_no_outliers(stored: Any, evaluated: Any) -> None:
    changes = {(step, "backward"): 0.5 for step in (30, 40, 50)}
    forwards = {step: 100.0 if step in {30, 40, 50} else 5.0 for step in range(60)}
    assert not evaluated(stored(HEALTHY, changes=changes, scalars={"forwards": forwards}), "outlier_steps")
    equal = dict.fromkeys(forwards, 5.0)
    assert evaluated(stored(HEALTHY, changes=changes, scalars={"forwards": equal}), "outlier_steps")


@pytest.mark.slow
def test_scatter_cold_start_and_short_pauses_are_no_outliers(stored: Any, evaluated: Any) -> None:
    assert not evaluated(stored(HEALTHY, changes={(0, "backward"): 2.0}), "outlier_steps")
    # Far above the median, but a negligible share of the run.
    assert not evaluated(stored(HEALTHY, changes={(30, "data"): 0.06}, steps=300), "outlier_steps")
    short = {name: seconds / 30 for name, seconds in HEALTHY.items()}
    for seconds, is_found in ((0.04, False), (0.08, True)):
        changes = {(step, "backward"): seconds for step in (30, 31, 32)}
        assert bool(evaluated(stored(short, changes=changes), "outlier_steps")) == is_found


@pytest.mark.slow
def test_straggler_is_found_with_its_phase(stored: Any, evaluated: Any) -> None:
    (found,) = evaluated(stored(ranks=[WAITS, WAITS, LATE, WAITS]), "bottleneck")
    assert (found.subject.rank, found.subject.phase) == (2, "data")
    assert [evidence.value for evidence in found.evidence] == pytest.approx([0.012, 0.001], rel=0.05)


@pytest.mark.slow
def test_equal_ranks_and_ranks_without_waits_have_no_finding(stored: Any, evaluated: Any) -> None:
    assert not evaluated(stored(ranks=[WAITS] * 4), "bottleneck")
    assert not evaluated(stored(LATE), "bottleneck")
    # A slower rank that no other rank waits for.
    alone = WAITS | {"data": 0.012}
    assert not evaluated(stored(ranks=[WAITS, WAITS, alone]), "bottleneck")


def epochs(path: Path, first: float, other: float, batches: int = 8, step: float = 0.02) -> Run:
    """Write a run of six epochs with a wait for the first batch of each, and for every other one."""
    count = 6 * batches
    waits = [first if number % batches == 0 else other for number in range(count)]
    scalars = {
        "phase/data": waits,
        "phase/backward": [step] * count,
        "batch": [number % batches for number in range(count)],
    }
    return build_run(path, monitors=("steptime",), scalars=scalars)


def test_wait_for_the_first_batch_of_each_epoch(tmp_path: Path, evaluated: Any) -> None:
    (finding,) = evaluated(epochs(tmp_path / "run", first=0.4, other=0.001), "bottleneck")
    assert finding.severity is Severity.WARNING
    assert finding.title == "Waiting for the first batch takes 71 % of an epoch"
    assert "persistent_workers=True" in finding.fix


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"workers": 0}, False),
        ({"batches": 2}, False),
        ({"wait": 0.01}, False),
        ({"step": 2.0}, False),
    ],
    ids=["workers", "no workers", "two batches", "short", "long steps"],
)
def test_iterator_with_workers_in_every_step(
    changes: dict[str, Any], expected: bool, tmp_path: Path, evaluated: Any
) -> None:
    case: dict[str, Any] = {"workers": 2, "batches": 1, "wait": 0.2, "step": 0.02} | changes
    scalars = {
        "phase/data": [case["wait"]] * 48,
        "phase/backward": [case["step"]] * 48,
        "batch": [number % case["batches"] for number in range(48)],
    }
    info = (47, RUNTIME_INFO, {"cores": 8, "threads": 1, "workers": case["workers"]})
    run = build_run(tmp_path / "run", monitors=("steptime",), scalars=scalars, events=[info])
    titles = [finding.title for finding in evaluated(run, "bottleneck")]
    assert ("Every step creates an iterator of its loader, with workers" in titles) == expected


@pytest.mark.parametrize(
    "times",
    [
        {"first": 0.004, "other": 0.001},
        {"first": 0.4, "other": 0.001, "step": 0.5},
        {"first": 0.4, "other": 0.06, "step": 0.3},
        {"first": 0.03, "other": 0.0001, "step": 0.001},
        {"first": 0.4, "other": 0.4, "step": 0.5},
        {"first": 0.4, "other": 0.001, "batches": 1, "step": 2.0},
    ],
    ids=["short", "long steps", "others wait as well", "nothing to gain", "equal waits", "one batch"],
)
def test_waits_that_are_no_wait_for_the_first_batch(
    times: dict[str, Any], tmp_path: Path, evaluated: Any
) -> None:
    findings = evaluated(epochs(tmp_path / "run", **times), "bottleneck")
    assert not [finding for finding in findings if "first batch" in finding.title]
