"""Findings and probes as annotations of a continuous integration: GitHub, JUnit and SARIF. No torch.

What was not measured is listed, and never reads as passed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What fails a check, or is worth a note: ``name`` is that of a rule or a probe, ``group`` what has it.

    ``identity`` stays the same from run to run. Without a ``place`` it is about the whole.
    """

    name: str
    group: str
    severity: Severity
    title: str
    text: str
    is_failure: bool
    place: SourceLocation | None
    identity: str
    accepted: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations:
    """Claims of a check in order. ``cases`` are the names of all that was checked.

    A case has its group, and the reason why it was skipped, empty where it was not. ``place`` is where claims
    without one are shown in a format that needs one, ``lacks`` what was not measured.
    """

    title: str
    verdict: str
    claims: Sequence[Claim]
    cases: Mapping[str, tuple[str, str]]
    notes: Sequence[str]
    place: SourceLocation
    lacks: str = ""


def render_annotations(kind: str, run: Run, findings: Sequence[Finding], failing: Failing) -> str:
    """Return the findings for ``github``, ``junit`` or ``sarif``."""
    return render(kind, run_annotations(run, findings, failing))


def render(kind: str, annotations: Annotations) -> str:
    """Return annotations for ``github``, ``junit`` or ``sarif``."""
    return {"github": _github, "junit": _junit, "sarif": _sarif}[kind](annotations)


def run_annotations(run: Run, findings: Sequence[Finding], failing: Failing) -> Annotations:
    """Return the annotations of a run: its findings, and its rules as cases."""
    source = Source(run, tuple(findings))
    source.findings = [*source.findings, *filter(failing, source.hints)]
    summary = outcome(source)
    measured = summary.tone != "unmeasured" and not summary.lacks
    skipped = summary.lacks or "not measured in this run"
    rules = {name: rule for name, rule in RULES.items() if rule.monitor in (run.monitors or {rule.monitor})}
    cases = {
        name: (rule.monitor, "" if measured and all(map(run.has, rule.needs)) else skipped)
        for name, rule in rules.items()
    }
    claims = [
        Claim(
            name=finding.rule, group=finding.monitor, severity=finding.severity, title=finding.title,
            text=_text(finding), is_failure=failing(finding), place=_location(finding, run),
            identity=_identity(finding), accepted=finding.accepted,
        )
        for finding in source.findings
    ]  # fmt: skip
    return Annotations(
        title=run.name or str(run.path), verdict=f"{summary.tally}. {summary.detail}", claims=claims,
        cases=cases, notes=_unmeasured(source), place=location(f"{run.path}/{MANIFEST}", None),
        lacks=summary.lacks,
    )  # fmt: skip


def _location(finding: Finding, run: Run) -> SourceLocation | None:
    """Return the line that a finding names, else the script of the run, else None."""
    if finding.subject.line and (match := _LINE.fullmatch(finding.subject.line)):
        return location(match["file"], int(match["line"]))
    fingerprint = run.fingerprint()
    script = Path("" if fingerprint is None else fingerprint.script)
    if script.suffix != ".py" or not is_user_code(str(script)):  # as of python -m pytest
        return None
    return location(str(script), None)


def location(file: str, line: int | None) -> SourceLocation:
    """Return a place, its file relative to the working directory where it lies below it."""
    path, here = Path(visible(file)), Path.cwd()
    return SourceLocation((path.relative_to(here) if path.is_relative_to(here) else path).as_posix(), line)


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


def _github(annotations: Annotations) -> str:
    """Return workflow commands, which GitHub shows at the lines of the changed files."""
    lines = []
    for claim in annotations.claims:
        level = "error" if claim.is_failure else _GITHUB_LEVELS[claim.severity]
        place = claim.place
        values = {"title": f"{claim.name}: {visible(claim.title)}"}
        if place is not None:
            values = {"file": place.file, **({"line": str(place.line)} if place.line else {}), **values}
        properties = ",".join(f"{name}={_property(value)}" for name, value in values.items())
        lines.append(f"::{level} {properties}::{_data(claim.text)}")
    lines.append(f"::notice title=backlight::{_data(visible(annotations.verdict))}")
    lines += [f"::notice title=backlight::{_data(text)}" for text in annotations.notes]
    return "\n".join(lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _junit(annotations: Annotations) -> str:
    """Return one test case per rule or probe: failed, passed, or skipped as not measured."""
    suite = ET.Element("testsuite", name=f"backlight {visible(annotations.title)}")
    by_name: dict[str, list[Claim]] = {}
    for claim in annotations.claims:
        by_name.setdefault(claim.name, []).append(claim)
    counts = dict.fromkeys(("tests", "failures", "skipped"), 0)
    for name in sorted({*annotations.cases, *by_name}):
        claims = by_name.get(name, [])
        group, skipped = annotations.cases.get(name) or (claims[0].group, "")
        case = ET.SubElement(suite, "testcase", classname=f"backlight.{visible(group)}", name=visible(name))
        counts["tests"] += 1
        failed = [claim for claim in claims if claim.is_failure]
        if failed:
            counts["failures"] += 1
            failure = ET.SubElement(case, "failure", message=_xml(visible(failed[0].title)), type="finding")
            failure.text = _xml("\n\n".join(f"{visible(each.title)}\n{each.text}" for each in failed))
        elif not claims and skipped:
            counts["skipped"] += 1
            ET.SubElement(case, "skipped", message=_xml(skipped))
        if others := [claim for claim in claims if claim not in failed]:
            output = ET.SubElement(case, "system-out")
            output.text = _xml(
                "\n\n".join(f"{each.severity.value}: {visible(each.title)}\n{each.text}" for each in others)
            )
    for name, amount in counts.items():
        suite.set(name, str(amount))
    if annotations.notes:
        ET.SubElement(suite, "system-out").text = _xml("\n".join(annotations.notes))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True)


_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _xml(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def _sarif(annotations: Annotations) -> str:
    """Return SARIF 2.1.0, which code scanning of GitHub and editors read."""
    results: list[dict[str, Any]] = []
    for claim in annotations.claims:
        # Code scanning refuses the whole file for one result without a file and a line.
        place = claim.place or annotations.place
        artifact = {"uri": quote(place.file)}
        if not place.file.startswith("/"):
            artifact["uriBaseId"] = "%SRCROOT%"
        region = {"startLine": place.line or 1}
        result: dict[str, Any] = {
            "ruleId": visible(claim.name),
            "level": "error" if claim.is_failure else _SARIF_LEVELS[claim.severity],
            "message": {"text": f"{visible(claim.title)}\n{claim.text}"},
            "partialFingerprints": {"subject/v1": claim.identity},
            "locations": [{"physicalLocation": {"artifactLocation": artifact, "region": region}}],
        }
        if claim.accepted:
            result["suppressions"] = [{"kind": "external", "justification": visible(claim.accepted)}]
        results.append(result)
    pages = {
        name: "\n\n".join(page_blocks(name)) or name
        for name in sorted({visible(claim.name) for claim in annotations.claims})
    }
    rules = [
        {
            "id": name,
            "shortDescription": {"text": name.replace("_", " ")},
            "help": {"text": page, "markdown": page},
        }
        for name, page in pages.items()
    ]
    notes = [{"level": "note", "message": {"text": text}} for text in annotations.notes]
    invocation = {"executionSuccessful": not annotations.lacks, "toolExecutionNotifications": notes}
    driver = {"name": "backlight", "semanticVersion": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "results": results, "invocations": [invocation]}
    return codec.encode({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _identity(finding: Finding) -> str:
    """Return what stays the same of a finding from run to run: its rule, parameter and module."""
    subject = finding.subject
    return "/".join(visible(part) for part in (finding.rule, subject.parameter, subject.module) if part)
