"""A run in a notebook cell: content, no scripts, escaped names."""

from __future__ import annotations

import pickle
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from synthetic import Plan, write_run

import backlight
from backlight.findings.evaluate import Findings
from backlight.records import Finding, Severity, Subject
from backlight.report.notebook import MOST, findings_html, run_html
from backlight.store.read.run import open_run
from run_builder import build_run


def text_finding(text: str, subject: Subject, severity: Severity) -> Finding:
    texts = dict.fromkeys(("rule", "title", "detail", "fix", "refuted_if"), text)
    return Finding(severity=severity, subject=subject, evidence=(), **texts)


def test_run_shows_verdict_figures_and_findings(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", Plan(steps=120, nan_step=90)).path)
    shown = run._repr_html_()
    assert "total norm" in shown
    findings = backlight.findings_of(run)
    assert findings
    for rule in {finding.rule for finding in findings[:MOST]}:
        assert f"<code>{rule}</code>" in shown
    assert "non_finite" in findings._repr_html_()
    assert findings.to_pandas()["rule"].tolist() == [finding.rule for finding in findings]
    assert findings.to_polars()["rule"].to_list() == [finding.rule for finding in findings]
    ET.fromstring(shown.replace("<br>", "<br/>"))


def test_html_has_no_scripts_or_requests(tmp_path: Path) -> None:
    shown = open_run(write_run(tmp_path / "run", Plan(steps=30)).path)._repr_html_()
    assert "<script" not in shown
    assert re.findall(r"\bon\w+=|javascript:|url\(|@import|<link|<img", shown) == []
    assert not re.findall(r"https?://", shown)


def test_names_are_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>&\"'"
    finding = text_finding(hostile, Subject(parameter=hostile, step=1), Severity.ERROR)
    alone = finding._repr_html_()
    assert "<script" not in alone
    assert alone.count("&lt;script&gt;") == 6  # rule, title, detail, where, fix, refuted if
    ET.fromstring(alone)
    run = write_run(tmp_path / "run", Plan(steps=5))
    shown = findings_html(run, [finding])
    assert "<script" not in shown
    assert "&lt;script&gt;alert(1)" in shown


def test_many_findings_are_counted(tmp_path: Path) -> None:
    one = text_finding("text", Subject(), Severity.WARNING)
    run = write_run(tmp_path / "run", Plan(steps=5))
    assert "and 5 more findings" in findings_html(run, [one] * (MOST + 5))


@pytest.mark.parametrize(("gradients", "text"), [(True, "No findings."), (False, "Nothing was measured.")])
def test_no_findings_are_shown_with_what_was_measured(gradients: bool, text: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=5, gradients=gradients, updates=gradients))
    findings = Findings([], run)
    assert findings == []
    assert f">{text}</strong>" in findings._repr_html_()
    assert text in str(findings)


@pytest.mark.slow
def test_copied_findings_are_a_plain_list(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", Plan(steps=120, nan_step=90)).path)
    findings = backlight.findings_of(run)
    copied = pickle.loads(pickle.dumps(findings))
    assert (type(copied), copied) == (list, list(findings))


def test_empty_run_is_shown(tmp_path: Path) -> None:
    shown = run_html(build_run(tmp_path / "run"), [])
    assert "backlight report" in shown


@pytest.mark.slow
def test_ipython_displays_a_run(tmp_path: Path) -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    run = open_run(write_run(tmp_path / "run", Plan(steps=30)).path)
    shown, _ = formatters.DisplayFormatter().format(run)
    assert shown["text/html"].startswith("<div")
    assert shown["text/plain"] == f"Run({str(tmp_path / 'run')!r}, finished, last step 29)"
