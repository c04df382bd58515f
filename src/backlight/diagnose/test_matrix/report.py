"""The report of a test matrix: what ``test-matrix.json`` holds, and the answer that is printed of it."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path

from backlight import codec
from backlight.answer import Answer, Column, Table, indexed, word
from backlight.diagnose.test_matrix.case_run import EVIDENCE, OUTPUTS
from backlight.diagnose.test_matrix.evaluation import Branch, CaseComparison, CaseResult, Status
from backlight.diagnose.test_matrix.plan import FORMAT, UNDECIDED
from backlight.processes import available_cores
from backlight.records import DiagnosisKind
from backlight.report.overlay import write_answer
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


def answer(report: MatrixReport, *, full: bool = True) -> Answer:
    """Return the answer of a test matrix; not ``full`` leaves out the evidence of each case."""
    evidence = [stated for result in report.cases for stated in _evidence(result)]
    tables = (
        Table(
            (
                word("case", lambda row: row.case.name),
                word("verdict", lambda row: row.evaluation.verdict.value),
                Column("seconds", lambda row: row.observation.seconds, lambda seconds: f"{seconds:.1f}"),
                Column("of", lambda row: row.case.time_limit, lambda seconds: f"{seconds:g}"),
                word("control", lambda row: row.case.control), word("factor", lambda row: row.case.factor),
                word("claim", _claim, "text"),
            ),
            report.cases, title="Cases", brief=60,
        ),
        Table(
            (
                word("case", "case"), word("control", "control"), word("claim", "claim", "text"),
                word("effect", lambda row: row.effect.value),
                word("differs", lambda row: "; ".join(row.differences) or "nothing", "text"),
                word("compared", lambda row: "; ".join(row.compared) or "nothing", "text"),
            ),
            report.comparisons, title="Cases against their controls", brief=60, wide=2,
        ),
        Table(
            (
                word("branch", lambda row: row.status.name.lower()), word("", "text", "text"),
                word("because", "why", "text"),
            ),
            report.branches, title="Decision tree", brief=60,
        ),
        Table(
            indexed(("do", "at", "because", "verify"), "text"), list(_actions(report)),
            title="What to do, in this order", brief=60, listed=True,
        ),
        Table(
            (word("evidence of", itemgetter(0)), word("", itemgetter(1)), word("", itemgetter(2), "text")),
            evidence if full else (), title="Evidence",
        ),
    )  # fmt: skip
    machine = f"backlight {version('backlight')}, {platform.platform()}, {available_cores()} cores"
    rows = tuple(table for table in tables if table.rows)
    return Answer(report.headline, report, (f"run again: {report.rerun}",), rows, (f"written by {machine}",))


def _claim(result: CaseResult) -> str:
    evaluation = result.evaluation
    return f"{evaluation.claim} [{evaluation.line}]" if evaluation.line else evaluation.claim


def _actions(report: MatrixReport) -> Iterator[tuple[str, ...]]:
    """Yield what to do, where, why, and the command that shows whether it helped.

    Actions of supported conclusions come first, then the lines found, then what would decide more.
    """
    for branch in report.branches:
        for action in branch.node.actions if branch.status is Status.SUPPORTED else ():
            yield action.do, action.at, branch.node.conclusion, action.verify or report.rerun
    for result in report.cases:
        evaluation, again = result.evaluation, f"{report.rerun} --again {shlex.quote(result.case.name)}"
        if evaluation.verdict in UNDECIDED:
            yield "raise time_limit, or declare progress", "", f"{result.case.name} is undecided", again
        elif evaluation.line:
            fix = _FIXES.get(evaluation.verdict, "look at this line")
            yield fix, evaluation.line, f"{result.case.name}: {evaluation.claim}", again


def _evidence(result: CaseResult) -> Iterator[tuple[str, str, str]]:
    """Yield the case, what it is, and the text of each line of its evidence."""
    case, observed, evaluation = result.case, result.observation, result.evaluation
    variables = (f"{name}={value}" for name, value in case.environment.items())
    names = (*OUTPUTS, *([EVIDENCE] if observed.exit_code is None else []))
    texts = {
        "command": (f"{shlex.join((*variables, *case.argv))} in {case.directory}",),
        "files": (", ".join(f"{result.attempt}/{name}" for name in names),),
        "claim": (f"{evaluation.claim} (confidence: {evaluation.confidence})",),
        "refuted if": (evaluation.refuted_if,),
        "alternative": evaluation.alternatives,
        "not observable": [f"{each.pid}: {reason}" for each in observed.processes for reason in each.unseen],
        "ended by": observed.ended_by,
    }
    yield from ((case.name, label, text) for label, each in texts.items() for text in each if text)


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


def write_report(root: Path, target: Path) -> Path:
    """Write the report of the test matrix in ``root``, a page or Markdown by the suffix; return it."""
    report = read_report(root)
    return write_answer(answer(report), report.name, target)


def write_bundle(root: Path, target: Path) -> Path:
    """Pack the directory of a test matrix into ``target``, whole or not at all; links are left out."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()]
    kept = (path for path in files if path not in {target.absolute(), root / ".lock"})
    return write_archive(target, ((path.relative_to(root).as_posix(), path) for path in kept))
