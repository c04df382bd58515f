"""The verdict never claims more than was measured."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from synthetic import Plan, finding, write_run

from backlight.records import OTHERS, Layout, ParameterRecord, Placement, RunStatus, Severity
from backlight.report.page import model
from backlight.report.source import APART, Source
from backlight.report.terminal import summary_text
from backlight.report.verdict import hints_line, outcome
from backlight.store.read.run import Run, open_run
from run_builder import build_health_run, build_run, fill, gradient_row, open_ranks, parameter


def build_gradients(path: Path, status: RunStatus, exception: str = "", message: str = "") -> Run:
    """Build a run of three steps of one parameter, which may end with an exception at step 2."""
    table = [parameter("a", (2,))]
    series = {"gradient": dict.fromkeys(range(3), gradient_row(table))}
    events = [(2, "exception", {"type": exception, "message": message})] if exception else []
    return build_run(path, monitors=("health",), table=table, series=series, events=events, status=status)


def test_findings_set_tone_and_headline(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=10))
    findings = [
        finding("embed.weight", 3, severity=Severity.INFO),
        finding("embed.weight", 3),
        finding("embed.weight", 4),
        finding("embed.weight", 3, severity=Severity.WARNING),
    ]
    result = outcome(Source(run, findings))
    assert (result.tone, result.headline) == ("error", findings[1].title)
    assert result.summary == f"2 errors, 1 warning. {result.detail}"
    assert result.hints == 1
    assert result.detail == "Gradients of all 51 parameters and the loss were measured at all 10 steps."
    assert result.losses == ()
    assert result.unmeasured == ()


def test_sentence_on_what_was_measured_is_literally_true(tmp_path: Path) -> None:
    nan = float("nan")
    rms = {"a": [1e-2] * 40, "b": [1e-2, 1e-2, nan, nan] * 10}
    alternating = {f"lr/{n}/0": {step: 0.1 for step in range(n, 40, 2)} for n in (0, 1)}
    detail = outcome(Source(build_health_run(tmp_path / "late", rms))).detail
    assert detail.startswith("Gradients of all 2 parameters were measured at 20 to 40 of 40 steps.")
    detail = outcome(Source(build_health_run(tmp_path / "gan", {"a": rms["a"]}, scalars=alternating))).detail
    assert detail.startswith("Gradients of the one parameter were measured at all 40 optimizer steps.")


def test_no_findings_lists_what_was_not_checked(tmp_path: Path) -> None:
    plan = Plan(steps=10, unmeasured={7: "frozen", 9: "frozen", 30: "unused in forward"}, updates=False)
    result = outcome(Source(write_run(tmp_path / "run", plan)))
    assert (result.tone, result.headline) == ("clear", "No findings")
    assert result.summary == result.detail
    assert "48 of 51 parameters" in result.detail
    assert "Only recorded data was checked" in result.detail
    gaps = {(gap.what, gap.reason): gap.names for gap in result.unmeasured}
    assert gaps["2 parameters", "frozen"] == ("blocks.0.ln_2.weight", "blocks.0.mlp.up.weight")
    assert gaps["1 parameter", "unused in forward"] == ("blocks.2.attn.out.bias",)
    assert gaps["update", "the optimizer steps inside backward"] == ()


def test_nothing_measured_is_not_healthy(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=10, gradients=False, updates=False))
    result = outcome(Source(run))
    assert (result.tone, result.headline) == ("unmeasured", "Nothing was measured")
    assert result.detail.startswith("No optimizer step was seen. Nothing can be said")
    words = f"{result.headline} {result.detail} {result.status}".casefold()
    assert "healthy" not in words
    assert "no findings" not in words


def test_killed_run_reports_attempts_and_losses(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=40, attempts=2, killed=True))
    result = outcome(Source(run))
    assert result.status.startswith("the process ended without closing the run")
    assert "2 attempts (restarted at step 20)" in result.status
    assert result.losses
    assert "attempt 1" in result.losses[0]


@pytest.mark.parametrize("severity", [None, Severity.WARNING, Severity.ERROR])
def test_exception_is_as_bad_as_an_error(severity: Severity | None, tmp_path: Path) -> None:
    run = build_gradients(tmp_path / "run", RunStatus.FAILED, "ValueError", "bad \x1b[32mbatch")
    found = [] if severity is None else [finding("embed.weight", 3, severity=severity)]
    result = outcome(Source(run, found))
    failed = "Failed with ValueError at step 2"
    assert result.tone == "error"
    assert result.headline == (found[0].title if severity is Severity.ERROR else failed)
    counted = {None: "No findings", Severity.WARNING: "1 warning", Severity.ERROR: "1 error"}[severity]
    assert result.tally == f"{failed}. {counted}"
    assert result.summary.count("Failed") == (severity is Severity.ERROR)
    assert result.status.startswith(r"ValueError: bad \x1b[32mbatch")


def test_status_of_an_interrupt(tmp_path: Path) -> None:
    run = build_gradients(tmp_path / "run", RunStatus.FAILED, "KeyboardInterrupt")
    result = outcome(Source(run, []))
    assert (result.state, result.headline) == ("interrupted", "Interrupted at step 2")
    assert result.status.startswith("started ")


@pytest.mark.parametrize(
    ("status", "ended"),
    [
        (RunStatus.FAILED, "Failed. No findings"),
        (RunStatus.KILLED, "Killed. Incomplete: recording stopped at step 2"),
        (RunStatus.FINISHED, "No findings"),
    ],
)
def test_ending_names_what_is_known(status: RunStatus, ended: str, tmp_path: Path) -> None:
    result = outcome(Source(build_gradients(tmp_path / "run", status)))
    assert result.tally == ended
    assert (result.tone == "clear") == (status is RunStatus.FINISHED)


@pytest.mark.parametrize(("every", "expected"), [(1, ()), (2, ("1 parameter at 3 of 6 steps",))])
def test_partly_recorded_shards_are_unmeasured(tmp_path: Path, every: int, expected: tuple[str, ...]) -> None:
    writers = open_ranks(tmp_path / "run", monitors=("health",))
    for rank, writer in enumerate(writers):
        placements = (
            Placement(Layout.SHARD, (8, 4), (4, 4), (4 * rank, 0)),
            Placement(Layout.REPLICATE, (8, 4), (8, 4), (0, 0)),
        )
        table = [
            ParameterRecord(
                name, (8, 4), "float32", "cpu", int(np.prod(placement.local_shape)), placement=placement
            )
            for name, placement in zip(("split", "copied"), placements, strict=True)
        ]
        steps = range(0, 6, every if rank else 1)
        seen = {"backwards_seen": {step: step + 1.0 for step in steps}}
        series = {"gradient": dict.fromkeys(steps, gradient_row(table))}
        fill(writer, table=table, series=series, scalars=seen)
    for writer in reversed(writers):
        writer.close()
    source = Source(open_run(tmp_path / "run"))
    gaps = [gap for gap in outcome(source).unmeasured if gap.reason == APART]
    assert tuple(gap.what for gap in gaps) == expected
    assert [gap.names for gap in gaps] == [("split",)] * len(expected)
    assert source.unmeasured_parameters == {}


@pytest.mark.parametrize(("at", "text"), [((2, 2), "2 parameters at 2"), ((1, 2), "2 parameters at up to 2")])
def test_parameters_lacking_different_steps_are_bounded(
    tmp_path: Path, at: tuple[int, int], text: str
) -> None:
    source = Source(write_run(tmp_path / "run", Plan(steps=5)))
    unjoined = np.zeros_like(source.coverage.unjoined)
    unjoined[:2] = at
    source.coverage = dataclasses.replace(source.coverage, unjoined=unjoined)
    assert [gap.what for gap in outcome(source).unmeasured if gap.reason == APART] == [f"{text} of 5 steps"]


@pytest.mark.parametrize("joined", [True, False])
def test_joined_part_is_complete(tmp_path: Path, joined: bool) -> None:
    writers = open_ranks(tmp_path / "run", ranks=1 + joined, monitors=("health",))
    writers[-1].event(None, "unmeasured", {"what": OTHERS, "reason": "rank 1 found no running attempt"})
    for writer in reversed(writers):
        writer.close()
    result = outcome(Source(open_run(tmp_path / "run")))
    assert [gap.what for gap in result.unmeasured] == ([] if joined else [OTHERS])


def test_model_command_and_host_are_named(tmp_path: Path) -> None:
    model, command, host = outcome(Source(write_run(tmp_path / "run", Plan(steps=5)))).about
    assert re.fullmatch(r"GPT, [\d,]+ parameters", model)
    assert (command, host) == ("train.py --steps 300", "node-1, cpu")


def test_hints_are_counted_and_nothing_else(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=5))
    hint = finding("embed.weight", 3, rule="bottleneck", monitor="steptime", severity=Severity.INFO)
    alone, none = outcome(Source(run, (hint,))), outcome(Source(run))
    assert (alone.tone, alone.headline, alone.summary) == ("clear", "No findings", none.summary)
    assert (alone.hints, none.hints) == (1, 0)
    command = f"backlight findings {run.location} --hints"
    assert hints_line(Source(run, (hint,))) == f"1 hint: {hint.title}; {command}"
    assert hints_line(Source(run, (hint, hint))) == f"2 hints: {command}"
    assert hints_line(Source(run)) == ""
    assert outcome(Source(run, (hint, finding("embed.weight", 3)))).tally == "1 error"


def test_degraded_measurement_is_listed(tmp_path: Path) -> None:
    change = {"from": "full factors", "to": "Gram", "reason": "1.2 GB are free"}
    run = build_run(tmp_path / "run", monitors=("grokking",), events=[(3, "degradation", change)])
    (item,) = outcome(Source(run)).unmeasured
    assert (item.what, item.reason) == ("full factors", "1.2 GB are free; recorded instead: Gram.")


@pytest.fixture
def step_times(tmp_path: Path) -> Source:
    times = {"phase/forward": [1.0, *[0.02] * 19], "phase/backward": [0.03] * 20, "phase/other": [0.001] * 20}
    return Source(build_run(tmp_path / "run", monitors=("steptime",), scalars=times))


def test_headline_reports_step_times(step_times: Source) -> None:
    result = outcome(step_times)
    assert result.headline == "A step takes 51 ms (median)"
    assert result.summary.startswith("No findings. The times of 20 steps were measured.")
    assert "Rules on phase times were not evaluated: 19 steady steps, 20 are needed." in result.summary


def test_step_time_sums_all_phases(step_times: Source) -> None:
    assert np.allclose(step_times.step_times, [1.031, *[0.051] * 19])
    figures = {figure["label"]: figure["value"] for figure in model(step_times)["verdict"]["figures"]}
    assert figures == {
        "steps": "20",
        "median step": "51 ms",
        "95th percentile": "100 ms",
        "first step": "1.03 s",
    }


def test_run_of_other_monitors_keeps_its_headline(tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", monitors=("health", "steptime"), scalars={"phase/forward": [0.02]})
    assert outcome(Source(run)).headline == "Nothing was measured"


def test_the_end_of_a_run_lists_what_was_looked_at(tmp_path: Path, step_times: Source) -> None:
    """Times only where there are enough steady steps, and nothing of monitors that did not watch."""
    few = "waits for data, memory and compilation; other times need 20 steady steps"
    assert outcome(step_times).checked == (few,)
    assert f"checked {few}\n" in summary_text(step_times.run.path, ())
    times = {"phase/forward": [1.0, *[0.02] * 29], "phase/backward": [0.03] * 30}
    whole = Source(build_run(tmp_path / "whole", monitors=("steptime",), scalars=times))
    (line,) = outcome(whole).checked
    assert line.startswith("time and memory: waits for data and device")
    assert outcome(Source(whole.run, (finding("embed.weight", 3),))).checked == ()


def test_each_monitor_names_what_its_rules_look_at(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=10))
    lines = outcome(Source(run)).checked
    subjects = {"health": "gradients and updates: ", "correctness": "the loop, at ", "steptime": "memory "}
    wanted = [subject for monitor, subject in subjects.items() if monitor in run.monitors]
    assert len(lines) == len(wanted) > 0
    assert all(any(line.startswith(subject) for line in lines) for subject in wanted)
