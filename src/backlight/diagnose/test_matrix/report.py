"""The report of a test matrix: what ``test-matrix.json`` holds, and Markdown, from which HTML follows."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

from markdown_it import MarkdownIt

from backlight import atomic_files, codec
from backlight.diagnose.test_matrix.case_run import EVIDENCE, OUTPUTS
from backlight.diagnose.test_matrix.decision_tree import Branch, Status
from backlight.diagnose.test_matrix.evaluation import CaseComparison, CaseResult
from backlight.diagnose.test_matrix.plan import FORMAT, UNDECIDED
from backlight.processes import available_cores
from backlight.records import DiagnosisKind
from backlight.report.markdown import code, escape
from backlight.store.export import write_archive
from backlight.untrusted_files import read

REPORT = "test-matrix.json"

_FIXES = {
    DiagnosisKind.BLOCKED: "find out what should end this wait",
    DiagnosisKind.SPIN: "find out why this loop does not end",
    DiagnosisKind.LONG_OP: "measure this operation alone on its shapes",
    DiagnosisKind.CRASH: "read the error that comes from this line",
    DiagnosisKind.SLOW: "profile from this line",
}
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>backlight test-matrix</title><style>
body{color-scheme:light dark;font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto}
table{border-collapse:collapse}th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #8884}
</style></head><body>
"""


class MatrixDirectoryError(ValueError):
    """A directory that holds no test matrix, or one that cannot be used now."""


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """The whole report; ``rerun`` is the command that runs the test matrix again."""

    name: str
    rerun: str
    cases: tuple[CaseResult, ...]
    comparisons: tuple[CaseComparison, ...]
    branches: tuple[Branch, ...]
    format: int = FORMAT

    @property
    def headline(self) -> str:
        """The supported conclusions, or how many cases have which verdict."""
        conclusions = [b.node.conclusion for b in self.branches if b.status is Status.SUPPORTED]
        verdicts = [result.evaluation.verdict.value for result in self.cases]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts)) or "no case has run"
        return "; ".join(filter(None, conclusions)) or counts


def as_markdown(report: MatrixReport, *, full: bool = True) -> str:
    """Return the report as Markdown; not ``full`` leaves out the evidence of each case."""
    return "\n".join(_lines(report, full=full)) + "\n"


def _lines(report: MatrixReport, *, full: bool) -> Iterator[str]:
    yield f"# {escape(report.name)}: {escape(report.headline)}\n"
    yield f"Run again: {code(report.rerun)}\n\n## Cases\n"
    yield "| case | verdict | seconds | control | factor | claim |\n|---|---|---|---|---|---|"
    for result in report.cases:
        case, evaluation = result.case, result.evaluation
        times = f"{result.observation.seconds:.1f} of {case.time_limit:g}"
        claim = f"{evaluation.claim} [{evaluation.line}]" if evaluation.line else evaluation.claim
        cells = (case.name, evaluation.verdict.value, times, case.control, case.factor, claim)
        yield f"| {' | '.join(escape(cell) for cell in cells)} |"
    sections = {
        "Cases against their controls": [_comparison(each) for each in report.comparisons],
        "Decision tree": [
            f"**{b.status.name.lower()}**: {escape(f'{b.text} ({b.why})')}" for b in report.branches
        ],
        "What to do, in this order": list(_actions(report)),
    }
    for title, items in sections.items():
        yield f"\n## {title}\n"
        yield from [f"1. {item}" for item in items] or ["None."]
    for result in report.cases if full else ():
        yield from _evidence(result)
    machine = f"backlight {version('backlight')}, {platform.platform()}, {available_cores()} cores"
    yield f"\nWritten by {escape(machine)}."


def _comparison(each: CaseComparison) -> str:
    differences, compared = ("; ".join(texts) or "nothing" for texts in (each.differences, each.compared))
    return (
        f"{code(each.case)} against {code(each.control)}: {escape(each.claim)}; effect of the factor: "
        f"{each.effect.value}; differs: {escape(differences)}; compared: {escape(compared)}"
    )


def _actions(report: MatrixReport) -> Iterator[str]:
    """Yield actions of supported conclusions, then the lines found, then what would decide more."""
    for branch in report.branches:
        for action in branch.node.actions if branch.status is Status.SUPPORTED else ():
            yield _action(action.do, action.at, branch.node.conclusion, action.verify or report.rerun)
    for result in report.cases:
        evaluation, again = result.evaluation, f"{report.rerun} --again {shlex.quote(result.case.name)}"
        if evaluation.verdict in UNDECIDED:
            yield _action(
                "raise time_limit, or declare progress", "", f"{result.case.name} is undecided", again
            )
        elif evaluation.line:
            fix = _FIXES.get(evaluation.verdict, "look at this line")
            yield _action(fix, evaluation.line, f"{result.case.name}: {evaluation.claim}", again)


def _action(do: str, at: str, why: str, verify: str) -> str:
    return f"{escape(do)}{f' at {code(at)}' if at else ''}: {escape(why)}. Verify: {code(verify)}"


def _evidence(result: CaseResult) -> Iterator[str]:
    case, observed, evaluation = result.case, result.observation, result.evaluation
    yield f"\n## Evidence of {escape(case.name)}: {evaluation.verdict.value}\n"
    variables = (f"{name}={value}" for name, value in case.environment.items())
    yield f"- command: {code(shlex.join((*variables, *case.argv)))} in {code(case.directory)}"
    names = (*OUTPUTS, *([EVIDENCE] if observed.exit_code is None else []))
    links = (f"[{escape(name)}](<{quote(f'{result.attempt}/{name}')}>)" for name in names)
    yield f"- files: {', '.join(links)}"
    texts = {
        "claim": (f"{evaluation.claim} (confidence: {evaluation.confidence})",),
        "refuted if": (evaluation.refuted_if,),
        "alternative": evaluation.alternatives,
        "not observable": [f"{each.pid}: {reason}" for each in observed.processes for reason in each.unseen],
        "ended by": observed.ended_by,
    }
    yield from (f"- {label}: {escape(text)}" for label, each in texts.items() for text in each if text)


def page(report: MatrixReport) -> str:
    """Return the report as one page that works offline: no script, no external resource."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    return f"{_HEAD}{markdown.render(as_markdown(report))}</body></html>\n"


def is_matrix(path: Path) -> bool:
    """Return whether ``path`` is the directory of a test matrix that has a report."""
    return (path / REPORT).is_file() and (path / "plan.toml").is_file()


def read_report(root: Path) -> MatrixReport:
    """Return the report in the directory of a test matrix; a MatrixDirectoryError if it is damaged."""
    path = root / REPORT
    try:
        return codec.convert(codec.decode(read(path).decode()), MatrixReport)
    except ValueError:
        problem = "is damaged, or of another release; run the test matrix again"
        raise MatrixDirectoryError(f"{path}: {problem}") from None


def write_report(root: Path, target: Path, *, as_html: bool) -> Path:
    """Write the report of the test matrix in ``root`` to ``target`` and return it."""
    text = (page if as_html else as_markdown)(read_report(root))
    atomic_files.write(target, text.encode(errors="backslashreplace"))
    return target


def write_bundle(root: Path, target: Path) -> Path:
    """Pack the directory of a test matrix into ``target``, whole or not at all; links are left out."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()]
    kept = (path for path in files if path not in {target.absolute(), root / ".lock"})
    return write_archive(target, ((path.relative_to(root).as_posix(), path) for path in kept))
