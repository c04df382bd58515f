"""Findings that a pyproject.toml accepts: notes with the reason, which fail nothing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backlight.findings.accepted import AcceptanceError, AcceptanceWarning, acceptances, mark_accepted, parsed
from backlight.findings.evaluate import findings_of, parse_fail_on, withdrawn
from backlight.records import Finding, ParameterRecord, Severity, Subject
from backlight.report.annotations import render_annotations
from backlight.report.source import Source
from backlight.report.verdict import outcome
from backlight.store.format.schema import REPORTED
from backlight.store.read.run import Run
from run_builder import build_run

Command = Callable[..., tuple[int, str, str]]

ENTRY = '[[tool.backlight.accept]]\nrule = "{}"\nsubject = "{}"\nreason = "{}"\n'


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the pyproject.toml of the working directory, which another directory is below."""
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    return tmp_path / "pyproject.toml"


def write_run(path: Path, **more: object) -> Run:
    """Write a run in which two parameters have no gradient."""
    names = ("alive", "head.weight", "head.bias")
    records = tuple(ParameterRecord(n, (4, 4), "float32", "cpu", 16, group="0/0") for n in names)
    floats = np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    ints = np.array([[1, 16, 0, 0, 0], [1, 16, 16, 0, 0], [1, 16, 16, 0, 0]])
    series = {"gradient": dict.fromkeys(range(30), (floats, ints))}
    return build_run(path, table=records, series=series, monitors=("health",), **more)


def test_accepted_finding_is_a_note_with_the_reason(tmp_path: Path, project: Path) -> None:
    run = write_run(tmp_path / "run")
    (before,) = findings_of(run)
    assert before.severity is Severity.WARNING
    fails = parse_fail_on(f"warning,{before.rule}")
    assert fails(before)
    project.write_text(ENTRY.format(before.rule, "head.*", "trained later."))
    (after,) = findings_of(run)
    assert after.severity is Severity.INFO
    assert after.label == "accepted"
    assert after.detail == f"Accepted (warning): trained later. {before.detail}"
    assert not after.is_hint
    assert not fails(after)
    summary = outcome(Source(run, (after,)))
    assert (summary.tone, summary.tally) == ("info", "1 accepted")


def test_other_findings_are_not_accepted(tmp_path: Path, project: Path) -> None:
    run = write_run(tmp_path / "run")
    for entry in (("no_gradient", "tail.*"), ("spike", "head.*"), ("no_gradient", "head")):
        project.write_text(ENTRY.format(*entry, "reason"))
        (finding,) = findings_of(run)
        assert finding.severity is Severity.WARNING
    new = Finding(
        severity=Severity.ERROR, title="new", detail="", subject=Subject(), evidence=(), fix="",
        refuted_if="", rule="non_finite",
    )  # fmt: skip
    assert mark_accepted([new]) == [new]
    project.write_text(ENTRY.format("non_finite", "*", "reason"))
    assert [each.accepted for each in mark_accepted([new])] == ["reason"]  # about the whole run


def test_finding_reported_before_it_was_accepted_is_not_withdrawn(tmp_path: Path, project: Path) -> None:
    payload = {"rule": "no_gradient", "severity": "warning", "title": "t", "names": [], "refuted_if": "r"}
    run = write_run(tmp_path / "run", events=[(3, REPORTED, payload)])
    project.write_text(ENTRY.format("no_gradient", "*", "reason"))
    assert withdrawn(run, findings_of(run)) == []


def test_annotations_pass(tmp_path: Path, project: Path) -> None:
    run = write_run(tmp_path / "run")
    project.write_text(ENTRY.format("no_gradient", "head.*", "trained later"))
    listed, failing = findings_of(run), parse_fail_on("no_gradient")
    (result,) = json.loads(render_annotations("sarif", run, listed, failing))["runs"][0]["results"]
    assert result["level"] == "note"
    assert result["suppressions"] == [{"kind": "external", "justification": "trained later"}]
    suite = ET.fromstring(render_annotations("junit", run, listed, failing))[0]
    assert suite.get("failures") == "0"
    assert "Accepted (warning): trained later" in "".join(suite.itertext())
    assert render_annotations("github", run, listed, failing).startswith("::notice ")


def test_findings_accepts_and_fails_on_new_ones_only(command: Command, tmp_path: Path, project: Path) -> None:
    run = write_run(tmp_path / "run").path
    project.write_text("[project]\nname = 'mine'  # stays\n")
    assert command("findings", run, "--fail-on", "warning")[0] == 1
    code, out, _ = command(
        "findings", run, "--accept", "no_gradient", "head.*", "--reason", 'trained "later"'
    )
    assert (code, out) == (0, f"{project}: accepts 1 finding\n")
    assert project.read_text().startswith("[project]\nname = 'mine'  # stays\n\n[[tool.backlight.accept]]\n")
    code, out, _ = command("findings", run, "--fail-on", "warning")
    assert code == 0
    assert 'Accepted (warning): trained "later". ' in " ".join(out.split())
    assert "No findings" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--accept", "no_gradient", "heat.*", "--reason", "r"), "no finding of no_gradient is about 'heat"),
        (("--accept", "spike", "*", "--reason", "r"), "no finding of spike .* there are: no_gradient head"),
        (("--accept", "no_gradient", "*", "--reason", " "), "--accept: the reason is empty"),
        (("--accept", "no_gradient", "*"), "--accept and --reason belong together"),
        (("--reason", "r"), "--accept and --reason belong together"),
    ],
)
def test_refuses(
    command: Command, tmp_path: Path, project: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, errors = command("findings", write_run(tmp_path / "run").path, *arguments)
    assert code == 2
    assert errors.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(errors)
    assert not project.exists()


def test_list_that_is_written_inline_is_extended_by_hand(
    command: Command, tmp_path: Path, project: Path
) -> None:
    text = '[tool.backlight]\naccept = [{rule = "spike", subject = "*", reason = "warm-up"}]\n'
    project.write_text(text)
    run = write_run(tmp_path / "run").path
    code, _, errors = command("findings", run, "--accept", "no_gradient", "*", "--reason", "r")
    assert code == 2
    assert 'add it by hand: {rule = "no_gradient", subject = "*", reason = "r"}' in errors
    assert project.read_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool", r"p.toml: no TOML: "),
        ("[tool.backlight]\naccepts = []", r"p.toml: \[tool.backlight\]: expected accept alone, got accepts"),
        ("[tool.backlight]\naccept = 3", "accept: expected a list of tables, got 3"),
        ("[tool]\nbacklight = 3", "expected accept alone, got 3"),
        ('[tool.backlight]\naccept = [{rule = "a"}]', "entry 1: expected texts rule, subject, reason, got"),
        (ENTRY.format("a", "b", " "), "entry 1: the reason is empty"),
    ],
)
def test_refuses_files(text: str, message: str) -> None:
    with pytest.raises(AcceptanceError, match=message):
        parsed(text, "p.toml")


def test_run_goes_on_with_a_warning_and_a_command_refuses(
    command: Command, tmp_path: Path, project: Path
) -> None:
    run = write_run(tmp_path / "run")
    project.write_text("[tool.backlight]\naccept = 3")
    with pytest.warns(AcceptanceWarning, match="got 3; no finding is accepted"):
        assert [each.severity for each in findings_of(run)] == [Severity.WARNING]
    code, _, errors = command("findings", run.path)
    assert code == 2
    assert "expected a list of tables, got 3" in errors


def test_file_is_read_again_when_it_changes(project: Path) -> None:
    assert acceptances() == ()
    project.write_text("[project]\n")
    assert acceptances() == ()
    project.write_text(ENTRY.format("spike", "*", "warm-up") * 2)
    assert [each.reason for each in acceptances()] == ["warm-up"] * 2
