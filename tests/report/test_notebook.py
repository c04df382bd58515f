"""A run in the cell of a notebook: what it says, that nothing in it runs, and that names stay text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from synthetic import Plan, write_run

import backlight
from backlight.records import Finding, Severity, Subject
from backlight.report.curve import POINTS, curve
from backlight.report.notebook import MOST, findings_html, run_html
from backlight.store.read.run import open_run


def test_a_run_shows_verdict_curves_and_findings(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", Plan(steps=120, nan_step=90)).path)
    shown = run._repr_html_()
    assert "total norm" in shown
    assert shown.count("<svg") == 2
    findings = backlight.findings_of(run)
    assert findings
    for rule in {finding.rule for finding in findings[:MOST]}:
        assert f"<code>{rule}</code>" in shown
    assert "non_finite" in findings._repr_html_()
    assert findings.to_pandas()["rule"].tolist() == [finding.rule for finding in findings]
    assert findings.to_polars()["rule"].to_list() == [finding.rule for finding in findings]
    ET.fromstring(shown.replace("<br>", "<br/>"))


def test_nothing_in_it_runs_or_is_fetched(tmp_path: Path) -> None:
    shown = open_run(write_run(tmp_path / "run", Plan(steps=30)).path)._repr_html_()
    assert "<script" not in shown
    assert re.findall(r"\bon\w+=|javascript:|url\(|@import|<link|<img", shown) == []
    assert set(re.findall(r"https?://[^\s\"]+", shown)) <= {"http://www.w3.org/2000/svg"}


def test_names_stay_text() -> None:
    evil = "<script>alert(1)</script>&\"'"
    finding = Finding(
        rule=evil,
        severity=Severity.ERROR,
        title=evil,
        detail=evil,
        subject=Subject(parameter=evil, step=1),
        evidence=(),
        fix=evil,
        refuted_if=evil,
    )
    alone = finding._repr_html_()
    assert "<script" not in alone
    assert alone.count("&lt;script&gt;") == 6  # rule, title, detail, where, fix, refuted if
    ET.fromstring(alone)
    shown = findings_html([finding])
    assert "<script" not in shown
    assert "&lt;script&gt;alert(1)" in shown
    assert "<script" not in curve(evil, np.arange(2), np.ones(2), unit=evil)


def test_many_findings_are_counted() -> None:
    one = Finding(
        rule="rule",
        severity=Severity.INFO,
        title="title",
        detail="detail",
        subject=Subject(),
        evidence=(),
        fix="look",
        refuted_if="not",
    )
    assert "and 5 more findings" in findings_html([one] * (MOST + 5))
    assert findings_html([]) == "<div>No findings.</div>"


def test_a_run_without_anything(tmp_path: Path) -> None:
    from backlight.store.write.writer import RunWriter

    RunWriter.create(tmp_path / "run").close()
    run = open_run(tmp_path / "run")
    shown = run_html(run, [])
    assert "<svg" not in shown
    assert "backlight report" in shown


def points(svg: str) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.split())]
        for line in re.findall(r'points="([^"]+)"', svg)
    ]


def test_a_curve_is_true_to_its_numbers() -> None:
    ((first, middle, last),) = points(curve("loss", np.array([0, 5, 10]), np.array([0.0, 1.0, 0.5])))
    assert first[1] > last[1] > middle[1]  # down the page is lower
    assert middle[0] - first[0] == pytest.approx(last[0] - middle[0], abs=0.2)
    assert last[1] == pytest.approx((first[1] + middle[1]) / 2, abs=0.2)
    ((low, mid, high),) = points(curve("norm", np.arange(3), np.array([1e-4, 1e-2, 1.0]), log=True))
    assert mid[1] == pytest.approx((low[1] + high[1]) / 2, abs=0.2)
    assert ", log" not in curve("norm", np.arange(2), np.array([0.0, 1.0]), log=True)


def test_gaps_and_lone_points() -> None:
    svg = curve("loss", np.arange(6), np.array([1.0, 2.0, np.nan, 3.0, np.inf, 4.0]))
    assert len(points(svg)) == 1
    assert svg.count("<circle") == 2
    assert "2 not finite" in svg
    assert "no finite value" in curve("loss", np.arange(2), np.full(2, np.nan))
    assert "<circle" in curve("loss", np.array([3]), np.array([1.0]))


def test_a_long_curve_keeps_its_peaks() -> None:
    values = np.zeros(100_000)
    values[77_777] = 9.0
    (line,) = points(curve("loss", np.arange(100_000), values))
    assert len(line) <= POINTS + 2
    assert min(y for _, y in line) == pytest.approx(20.0)


def test_ipython_shows_it(tmp_path: Path) -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    run = open_run(write_run(tmp_path / "run", Plan(steps=30)).path)
    shown, _ = formatters.DisplayFormatter().format(run)
    assert shown["text/html"].startswith("<div")
    assert shown["text/plain"] == f"Run({str(tmp_path / 'run')!r}, finished, last step 29)"
