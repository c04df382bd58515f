"""Findings as annotations of a continuous integration: GitHub, JUnit and SARIF. No torch.

Each format takes the run, its findings and ``failing``, the findings that fail the job. What was not measured
is listed, and never reads as passed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

from backlight import __version__, codec
from backlight.findings.pages import page_blocks
from backlight.records import Finding, Severity
from backlight.registry import RULES
from backlight.report.source import Source
from backlight.report.verdict import outcome, where
from backlight.store.format.names import MANIFEST
from backlight.store.read.run import Run
from backlight.text import visible
from backlight.user_code import is_user_code

Failing = Callable[[Finding], bool]

_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_GITHUB_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
_SARIF_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_LINE = re.compile(r"(?P<file>.+):(?P<line>[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A source file, relative to the working directory where it lies below it, and a line or None."""

    file: str
    line: int | None


def render_annotations(kind: str, run: Run, findings: Sequence[Finding], failing: Failing) -> str:
    """Return the findings for ``github``, ``junit`` or ``sarif``."""
    source = Source(run, tuple(findings))
    source.findings = [*source.findings, *filter(failing, source.hints)]
    if kind == "github":
        return _github(source, failing)
    return _junit(source, failing) if kind == "junit" else _sarif(source, failing)


def _location(finding: Finding, run: Run) -> SourceLocation | None:
    """Return the line that a finding names, else the script of the run, else None."""
    if finding.subject.line and (match := _LINE.fullmatch(finding.subject.line)):
        return SourceLocation(_relative(match["file"]), int(match["line"]))
    fingerprint = run.fingerprint()
    script = Path("" if fingerprint is None else fingerprint.script)
    if script.suffix != ".py" or not is_user_code(str(script)):  # as of python -m pytest
        return None
    return SourceLocation(_relative(str(script)), None)


def _relative(file: str) -> str:
    path, here = Path(visible(file)), Path.cwd()
    return (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()


def _text(finding: Finding) -> str:
    """Return detail, place, fix and refutation of a finding, one a line."""
    place = "; ".join(f"{label} {what}" for label, what in where(finding))
    lines = [visible(finding.detail), place and f"where: {place}", f"fix: {visible(finding.fix)}"]
    return "\n".join([*filter(None, lines), f"refuted if: {visible(finding.refuted_if)}"])


def _unmeasured(source: Source) -> list[str]:
    summary = outcome(source)
    return [
        *(f"lost: {visible(loss)}" for loss in summary.losses),
        *(item.text for item in summary.withdrawn),
    ] + [f"not measured: {visible(item.what)}: {visible(item.reason)}" for item in summary.unmeasured]


def _github(source: Source, failing: Failing) -> str:
    """Return workflow commands, which GitHub shows at the lines of the changed files."""
    lines = []
    for finding in source.findings:
        level = "error" if failing(finding) else _GITHUB_LEVELS[finding.severity]
        place = _location(finding, source.run)
        values = {"title": f"{finding.rule}: {visible(finding.title)}"}
        if place is not None:
            values = {"file": place.file, **({"line": str(place.line)} if place.line else {}), **values}
        properties = ",".join(f"{name}={_property(value)}" for name, value in values.items())
        lines.append(f"::{level} {properties}::{_data(_text(finding))}")
    summary = outcome(source)
    lines.append(f"::notice title=backlight::{_data(f'{visible(summary.tally)}. {visible(summary.detail)}')}")
    lines += [f"::notice title=backlight::{_data(text)}" for text in _unmeasured(source)]
    return "\n".join(lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _junit(source: Source, failing: Failing) -> str:
    """Return one test case per rule of the run's monitors: failed, passed, or skipped as not measured."""
    run = source.run
    suite = ET.Element("testsuite", name=f"backlight {visible(run.name or str(run.path))}")
    by_rule: dict[str, list[Finding]] = {}
    for finding in source.findings:
        by_rule.setdefault(finding.rule, []).append(finding)
    unmeasured = _unmeasured(source)
    summary = outcome(source)
    measured = summary.tone != "unmeasured" and not summary.lacks
    skipped = summary.lacks or "not measured in this run"
    rules = {name: rule for name, rule in RULES.items() if rule.monitor in (run.monitors or {rule.monitor})}
    counts = dict.fromkeys(("tests", "failures", "skipped"), 0)
    for name in sorted({*rules, *by_rule}):
        of_rule = by_rule.get(name, [])
        monitor = rules[name].monitor if name in rules else of_rule[0].monitor
        case = ET.SubElement(suite, "testcase", classname=f"backlight.{visible(monitor)}", name=visible(name))
        counts["tests"] += 1
        failed = [finding for finding in of_rule if failing(finding)]
        if failed:
            counts["failures"] += 1
            failure = ET.SubElement(case, "failure", message=_xml(visible(failed[0].title)), type="finding")
            failure.text = _xml("\n\n".join(f"{visible(f.title)}\n{_text(f)}" for f in failed))
        elif not of_rule and (not measured or (name in rules and not all(map(run.has, rules[name].needs)))):
            counts["skipped"] += 1
            ET.SubElement(case, "skipped", message=_xml(skipped))
        if others := [finding for finding in of_rule if finding not in failed]:
            output = ET.SubElement(case, "system-out")
            output.text = _xml(
                "\n\n".join(f"{f.severity.value}: {visible(f.title)}\n{_text(f)}" for f in others)
            )
    for name, amount in counts.items():
        suite.set(name, str(amount))
    if unmeasured:
        ET.SubElement(suite, "system-out").text = _xml("\n".join(unmeasured))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True)


_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _xml(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def _sarif(source: Source, failing: Failing) -> str:
    """Return SARIF 2.1.0, which code scanning of GitHub and editors read."""
    results: list[dict[str, Any]] = []
    for finding in source.findings:
        # Code scanning refuses the whole file for one result without a file and a line.
        place = _location(finding, source.run) or SourceLocation(
            _relative(f"{source.run.path}/{MANIFEST}"), None
        )
        artifact = {"uri": quote(place.file)}
        if not place.file.startswith("/"):
            artifact["uriBaseId"] = "%SRCROOT%"
        region = {"startLine": place.line or 1}
        result: dict[str, Any] = {
            "ruleId": visible(finding.rule),
            "level": "error" if failing(finding) else _SARIF_LEVELS[finding.severity],
            "message": {"text": f"{visible(finding.title)}\n{_text(finding)}"},
            "partialFingerprints": {"subject/v1": _identity(finding)},
            "locations": [{"physicalLocation": {"artifactLocation": artifact, "region": region}}],
        }
        if finding.accepted:
            result["suppressions"] = [{"kind": "external", "justification": visible(finding.accepted)}]
        results.append(result)
    pages = {
        name: "\n\n".join(page_blocks(name)) or name
        for name in sorted({visible(finding.rule) for finding in source.findings})
    }
    rules = [
        {
            "id": name,
            "shortDescription": {"text": name.replace("_", " ")},
            "help": {"text": page, "markdown": page},
        }
        for name, page in pages.items()
    ]
    notes = [{"level": "note", "message": {"text": text}} for text in _unmeasured(source)]
    invocation = {"executionSuccessful": not outcome(source).lacks, "toolExecutionNotifications": notes}
    driver = {"name": "backlight", "semanticVersion": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "results": results, "invocations": [invocation]}
    return codec.encode({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _identity(finding: Finding) -> str:
    """Return what stays the same of a finding from run to run: its rule, parameter and module."""
    subject = finding.subject
    return "/".join(visible(part) for part in (finding.rule, subject.parameter, subject.module) if part)
