"""The report as Markdown, for a ticket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from backlight.diagnose.matrix.rendering.escape import code, markdown, visible
from backlight.diagnose.matrix.report import CaseReport, MatrixReport, read_report


def render_markdown(folder: Path) -> str:
    """Return the report of the matrix in ``folder``.

    Raises
    ------
    MatrixFolderError
        If the folder holds no report.
    """
    return "\n".join(_lines(read_report(folder))) + "\n"


def _lines(report: MatrixReport) -> Iterator[str]:
    yield f"# {markdown(report.name)}: {markdown(report.headline)}"
    yield f"\nPlan {code(report.plan)}, {markdown(report.made)}.\n"
    yield "## Environment\n"
    for label, text in report.environment.items():
        yield f"- {markdown(label)}: {markdown(text)}"
    yield "\n## Cases\n"
    yield "| case | verdict | seconds | control | factor | what |"
    yield "|---|---|---|---|---|---|"
    for case in report.cases:
        cells = (
            case.name,
            case.judgement.verdict.value,
            f"{case.seconds:.1f} of {case.limit:g}",
            case.control,
        )
        yield "| " + " | ".join(markdown(c) for c in (*cells, case.factor, case.judgement.claim)) + " |"
    if report.not_run:
        yield f"\nNot run: {', '.join(code(name) for name in report.not_run)}"
    if report.comparisons:
        yield "\n## Cases against their controls\n"
        for one in report.comparisons:
            yield f"- {code(one.case)} against {code(one.control)}: {markdown(one.claim)}"
            seen = "; ".join(markdown(s) for s in one.seen) or "nothing"
            compared = markdown(", ".join(one.compared)) or "nothing"
            yield f"  - effect of the knob: {one.effect.value}; moved: {seen}; compared: {compared}"
    if report.branches:
        yield "\n## Decision tree\n"
        for branch in report.branches:
            yield f"- **{branch.label}**: {markdown(branch.text)} ({markdown(branch.why)})"
    yield "\n## What to do, in this order\n"
    for number, action in enumerate(report.actions, 1):
        at = f" at {code(action.at)}" if action.at else ""
        yield f"{number}. {markdown(action.do)}{at}: {markdown(action.why)}. Verify: {code(action.verify)}"
    if not report.actions:
        yield "Nothing."
    yield "\n## Left open\n"
    yield from [f"- {markdown(text)}" for text in report.open] or ["Nothing."]
    yield "\n## Evidence that could not be collected\n"
    lacking = [(case.name, missing) for case in report.cases for missing in case.missing]
    yield from [f"- {code(name)}: {markdown(m.what)}: {markdown(m.why)}" for name, m in lacking] or ["None."]
    yield "\n## Evidence"
    for case in report.cases:
        yield from _evidence(case)
    if report.verify:
        yield "\n## Commands to verify\n"
        yield from [f"- {code(command)}" for command in report.verify]


def _evidence(case: CaseReport) -> Iterator[str]:
    judgement = case.judgement
    yield f"\n### {markdown(case.name)}: {judgement.verdict.value}\n"
    yield f"- command: {code(case.command)}"
    yield f"- directory: {code(case.directory)}" + (f", branch {code(case.branch)}" if case.branch else "")
    if case.environment:
        yield f"- environment: {code(' '.join(f'{k}={v}' for k, v in case.environment.items()))}"
    yield f"- claim: {markdown(judgement.claim)} (confidence: {markdown(judgement.confidence)})"
    if judgement.line:
        yield f"- line: {code(judgement.line)}"
    yield from (f"- because: {markdown(reason)}" for reason in judgement.because)
    yield f"- refuted if: {markdown(judgement.refuted_if)}"
    yield from (f"- ended by: {markdown(what)}" for what in case.ended_by)
    yield from (f"- file: {code(kept.path)}: {markdown(kept.what)}" for kept in case.files)
    if case.tail:
        yield "- end of its output:\n"
        yield from (f"      {visible(line)}" for line in case.tail)
