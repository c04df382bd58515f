"""Findings as annotations: GitHub's workflow commands, JUnit, SARIF."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from xml.etree import ElementTree as ET

import pytest

from backlight.findings.evaluate import parse_fail_on
from backlight.records import Evidence, Finding, Fingerprint, Severity, Subject
from backlight.report.annotations import render_annotations
from backlight.store.format.manifest import read_document, write_document
from backlight.store.read.run import Run
from run_builder import build_health_run

HOSTILE = "a,b:c\r\n::error::%<&\x1b[31m"


def finding(rule: str, severity: Severity, *, line: str | None = None, title: str = "title") -> Finding:
    return Finding(
        severity=severity, title=title, detail="detail", fix="fix", refuted_if="never", rule=rule,
        subject=Subject(parameter="first.weight", line=line), evidence=(Evidence("scalars/loss", 1, 2.0),),
        monitor="health",
    )  # fmt: skip


FINDINGS = [
    finding("no_update", Severity.ERROR, line="models/my net.py:41"),
    finding("spike", Severity.WARNING),
    finding("vanishing", Severity.INFO, title=HOSTILE),
]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return build_health_run(tmp_path / "run", {"first.weight": [1.0, 1.0, 1.0]})


def render(kind: str, run: Run, findings: list[Finding] = FINDINGS, fail_on: str = "error") -> str:
    return render_annotations(kind, run, findings, parse_fail_on(fail_on))


def workflow_commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Parse as GitHub's runner does: properties between commas, data after the second ``::``."""
    found = []
    for line in text.split("\n"):
        command = re.fullmatch(r"::(\w+) (.*?)::(.*)", line)
        assert command, line
        pairs = dict(part.split("=", 1) for part in command[2].split(","))
        found.append((command[1], {k: unquote(v) for k, v in pairs.items()}, unquote(command[3])))
    return found


def test_github_names_file_and_line_and_escapes(run: Run) -> None:
    error, warning, *rest = workflow_commands(render("github", run))
    assert error[0] == "error"
    assert (error[1]["file"], error[1]["line"]) == ("models/my net.py", "41")
    assert "fix: fix" in error[2].splitlines()
    assert (warning[0], "line" in warning[1]) == ("warning", False)
    assert {kind for kind, _, _ in rest} == {"notice"}


def test_hint_is_annotated_only_where_it_fails_and_is_escaped(run: Run) -> None:
    assert "a,b:c" not in render("github", run)
    *_, hint, _ = workflow_commands(render("github", run, fail_on="info"))
    assert hint[0] == "error"  # the text of a run is data: it starts no command, and no escape sequence
    assert "a,b:c" in hint[1]["title"]
    assert "\x1b" not in render("github", run, fail_on="info")


@pytest.mark.parametrize(
    ("script", "file"),
    [("src/train.py", "src/train.py"), ("/usr/lib/python3/site-packages/pytest/__main__.py", None)],
)
def test_a_finding_without_a_line_is_at_the_script(script: str, file: str | None, tmp_path: Path) -> None:
    about = Fingerprint(script=script)
    run = build_health_run(tmp_path / "run", {"first.weight": [1.0]}, script=script, fingerprint=about)
    assert workflow_commands(render("github", run))[1][1].get("file") == file


def test_fail_on_makes_a_warning_a_failure(run: Run) -> None:
    assert [c[0] for c in workflow_commands(render("github", run, fail_on="spike"))][:2] == ["error", "error"]
    suite = ET.fromstring(render("junit", run, fail_on="spike")).find("testsuite")
    assert suite is not None
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["spike"]


def test_junit_has_a_case_per_rule_and_skips_what_was_not_measured(run: Run) -> None:
    suite = ET.fromstring(render("junit", run)).find("testsuite")
    assert suite is not None
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert suite.get("tests") == str(len(cases))
    assert suite.get("failures") == "1"
    assert "detail" in (cases["no_update"].findtext("failure") or "")
    assert "detail" in (cases["spike"].findtext("system-out") or "")
    assert cases["always_clipped"].find("skipped") is None
    assert cases["large_update"].find("skipped") is not None  # this run has no series of updates
    assert suite.get("skipped") == str(sum(case.find("skipped") is not None for case in suite))
    assert "stall" not in cases  # its monitor did not watch


def test_junit_of_a_run_without_measurements_passes_nothing(tmp_path: Path) -> None:
    empty = build_health_run(tmp_path / "empty", {})
    suite = ET.fromstring(render("junit", empty, [])).find("testsuite")
    assert suite is not None
    assert suite.get("skipped") == suite.get("tests") != "0"


def test_sarif_names_rules_places_and_levels(run: Run) -> None:
    log: dict[str, Any] = json.loads(render("sarif", run))
    assert log["version"] == "2.1.0"
    (only,) = log["runs"]
    assert [result["level"] for result in only["results"]] == ["error", "warning"]
    rules = {rule["id"]: rule for rule in only["tool"]["driver"]["rules"]}
    assert {result["ruleId"] for result in only["results"]} == set(rules)
    assert "Symptom" in rules["spike"]["help"]["text"]
    place = only["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "models/my%20net.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 41}
    # Neither a line nor a script is known, and code scanning refuses results without both.
    fallback = only["results"][1]["locations"][0]["physicalLocation"]
    assert fallback["artifactLocation"]["uri"] == quote(f"{run.path}/manifest.json")
    assert fallback["region"] == {"startLine": 1}
    identities = [result["partialFingerprints"]["subject/v1"] for result in only["results"]]
    assert identities[0] == "no_update/first.weight"
    assert len(set(identities)) == len(identities)


@pytest.mark.parametrize("kind", ["github", "junit", "sarif"])
def test_lost_data_is_named(kind: str, run: Run, tmp_path: Path) -> None:
    manifest = tmp_path / "run" / "manifest.json"
    stored = read_document(manifest)
    entry = {**stored["attempts"][0], "index": 1}  # a second attempt, whose files are gone
    (tmp_path / "run" / "attempt-001").mkdir()
    write_document(manifest, {**stored, "attempts": [*stored["attempts"], entry]})
    damaged = Run(tmp_path / "run")
    assert damaged.losses
    assert "lost: " in render(kind, damaged, [])
