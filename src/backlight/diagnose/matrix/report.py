"""The report of a matrix: what ``matrix.json`` holds, and Markdown, from which HTML and terminal follow."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from markdown_it import MarkdownIt
from pydantic import TypeAdapter, ValidationError

from backlight.diagnose.matrix.cases import FORMAT
from backlight.diagnose.matrix.comparison import CaseResult, Comparison, Effect
from backlight.diagnose.matrix.decision_tree import Branch, Status
from backlight.diagnose.matrix.plan import UNDECIDED, Plan
from backlight.records import DiagnosisKind
from backlight.report.markdown import code, escape
from backlight.store.export.archive import check_archive, write_archive
from backlight.store.platform.atomic_json import write_atomically
from backlight.text import visible

REPORT = "matrix.json"

_FIXES = {
    DiagnosisKind.BLOCKED: "find out what should end this wait",
    DiagnosisKind.SPIN: "find out why this loop does not end",
    DiagnosisKind.LONG_OP: "measure this operation alone on its shapes",
    DiagnosisKind.CRASH: "read the error that comes from this line",
    DiagnosisKind.SLOW: "profile from this line",
}
_BREAK = "&#8203;"
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem;border-bottom:1px solid #8886}h3{font-size:1rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;padding:.3rem .6rem;
border-bottom:1px solid #8884}code{font:13px/1.4 ui-monospace,monospace;overflow-wrap:break-word}
"""


class MatrixDirectoryError(ValueError):
    """A directory that holds no matrix, or one that cannot be used now."""


@dataclass(frozen=True, slots=True)
class Todo:
    """One thing to do next: where, why, and the command that shows whether it helped."""

    do: str
    at: str
    why: str
    verify: str


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """The whole report. ``not_run`` names cases without a result, ``open`` what is not decided."""

    name: str
    plan: str
    created: str
    environment: Mapping[str, str]
    cases: tuple[CaseResult, ...]
    comparisons: tuple[Comparison, ...]
    branches: tuple[Branch, ...]
    open: tuple[str, ...]
    actions: tuple[Todo, ...]
    verify: tuple[str, ...]
    not_run: tuple[str, ...] = ()
    format: int = FORMAT

    @property
    def headline(self) -> str:
        """The supported conclusions, or how many cases have which verdict."""
        supported = [b.conclusion for b in self.branches if b.conclusion and b.status is Status.SUPPORTED]
        verdicts = [case.evaluation.verdict.value for case in self.cases]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts)) or "no case has run"
        tail = "; no conclusion of the plan's tree is supported" if self.branches else ""
        return "; ".join(supported) or counts + tail


REPORTS = TypeAdapter(MatrixReport)


def is_matrix(path: Path) -> bool:
    """Return whether ``path`` is the directory of a matrix that has a report."""
    return (path / REPORT).is_file() and (path / "plan.toml").is_file()


def read_report(root: Path) -> MatrixReport:
    """Return the report in the directory of a matrix.

    Raises
    ------
    MatrixDirectoryError
        If there is none, or it cannot be read.
    """
    path = root / REPORT
    try:
        return REPORTS.validate_json(path.read_bytes())
    except OSError as error:
        raise MatrixDirectoryError(
            f"{path}: cannot be read: {error.strerror}; is {root} the directory of a matrix?"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        raise MatrixDirectoryError(
            f"{path}: is damaged, or of another release (this one reads format {FORMAT}): "
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None


def open_questions(
    results: Mapping[str, CaseResult], branches: tuple[Branch, ...], comparisons: Mapping[str, Comparison]
) -> Iterator[str]:
    """Return what the evidence does not decide."""
    for branch in branches:
        if branch.status is Status.OPEN and branch.conclusion:
            yield f"{branch.conclusion} ({branch.why})"
        elif branch.status is Status.SUPPORTED and branch.answer and not branch.leads:
            yield f"{branch.ask or branch.name}: the answer, {branch.answer}, leads nowhere in the tree"
    for each in comparisons.values():
        if not each.outcome:
            yield f"{each.case} against {each.control}: {each.why}"
    for name, one in results.items():
        yield from (f"{name}: {alternative}" for alternative in one.evaluation.alternatives)


def next_actions(
    plan: Plan, results: Mapping[str, CaseResult], branches: tuple[Branch, ...],
    comparisons: Mapping[str, Comparison], rerun: str,
) -> Iterator[Todo]:  # fmt: skip
    """Return actions of supported conclusions, then the lines found, then what would decide more."""
    for branch in branches:
        for action in plan.tree[branch.name].actions if branch.status is Status.SUPPORTED else ():
            yield Todo(action.do, action.at, branch.conclusion, action.verify or rerun)
    again = {name: f"{rerun} --again {shlex.quote(name)}" for name in results}
    lines: dict[str, list[str]] = {}
    for name, one in results.items():
        if one.evaluation.line and one.evaluation.verdict not in {*UNDECIDED, DiagnosisKind.PASS}:
            lines.setdefault(one.evaluation.line, []).append(name)
    for line, names in lines.items():
        found = results[names[0]].evaluation
        fix = _FIXES.get(found.verdict, "look at this line")
        yield Todo(fix, line, f"{', '.join(names)}: {found.claim}", again[names[0]])
    for each in comparisons.values():
        if each.effect in {Effect.NONE, Effect.UNKNOWN} and not each.outcome:
            do = f"make sure that {each.factor} reaches the training script, and declare its output (shows)"
            yield Todo(do, "", f"{each.case}: {each.why}", again[each.case])
    for name, one in results.items():
        if one.evaluation.verdict in UNDECIDED:
            more = f"raise time_limit above {one.observation.limit:g} s, or declare its output (progress)"
            do = more if one.observation.window_s else "read its output"
            yield Todo(do, "", f"{name}: {one.evaluation.claim}", again[name])


def as_markdown(report: MatrixReport, *, full: bool = True) -> str:
    """Return the report as Markdown; not ``full`` leaves out the evidence of each case."""
    return "\n".join(_lines(report, full=full)) + "\n"


def _lines(report: MatrixReport, *, full: bool) -> Iterator[str]:
    yield f"# {escape(report.name)}: {escape(report.headline)}\n"
    yield f"Plan {code(report.plan)}, {escape(report.created)}.\n\n## Cases\n"
    yield "| case | verdict | seconds | control | factor | claim |\n|---|---|---|---|---|---|"
    for one in report.cases:
        case, found = one.case, one.evaluation
        times = f"{one.observation.seconds:.1f} of {case.time_limit:g}"
        claim = f"{found.claim} [{found.line}]" if found.line else found.claim
        cells = (case.name, found.verdict.value, times, case.control, case.factor, claim)
        yield f"| {' | '.join(escape(cell) for cell in cells)} |"
    sections = {
        "Not run": [code(name) for name in report.not_run],
        "Cases against their controls": [_comparison(each) for each in report.comparisons],
        "Decision tree": [f"**{b.label}**: {escape(b.text)} ({escape(b.why)})" for b in report.branches],
        "What to do, in this order": [
            f"{escape(todo.do)}{f' at {code(todo.at)}' if todo.at else ''}: {escape(todo.why)}. "
            f"Verify: {code(todo.verify)}"
            for todo in report.actions
        ],
        "Left open": [escape(text) for text in report.open],
        "Evidence that could not be collected": [
            f"{code(one.case.name)}: {escape(what)}"
            for one in report.cases
            for what in one.observation.missing
        ],
    }
    if full:
        sections["Commands to verify"] = [code(command) for command in report.verify]
        sections["Environment"] = [f"{escape(k)}: {escape(v)}" for k, v in report.environment.items()]
    for title, items in sections.items():
        if items or full:
            yield f"\n## {title}\n"
            mark = "1." if title.startswith("What to do") else "-"
            yield from [f"{mark} {item}" for item in items] or ["None."]
    for one in report.cases if full else ():
        yield from _evidence(one)


def _comparison(each: Comparison) -> str:
    differences = "; ".join(escape(text) for text in each.differences) or "nothing"
    compared = escape(", ".join(each.compared)) or "nothing"
    against = f"{code(each.case)} against {code(each.control)}: {escape(each.claim)}"
    effect = f"effect of the factor: {each.effect.value}"
    return f"{against}\n  - {effect}; differs: {differences}; compared: {compared}"


def _evidence(one: CaseResult) -> Iterator[str]:
    case, observed, found = one.case, one.observation, one.evaluation
    yield f"\n## Evidence of {escape(case.name)}: {found.verdict.value}\n"
    yield f"- command: {code(shlex.join(observed.argv))}"
    yield f"- directory: {code(case.directory)}" + (f", branch {code(case.branch)}" * bool(case.branch))
    if variables := [
        *(f"{k}={v}" for k, v in case.environment.items()),
        *(f"{n}=(unset)" for n in case.unset),
    ]:
        yield f"- environment: {code(' '.join(variables))}"
    yield f"- claim: {escape(found.claim)} (confidence: {escape(found.confidence)})"
    yield from (f"- because: {escape(reason)}" for reason in found.because)
    yield f"- refuted if: {escape(found.refuted_if)}"
    yield from (f"- ended by: {escape(text)}" for text in observed.ended_by)
    for name, what in observed.files.items():
        path = f"{one.attempt}/{name}"
        yield f"- file: [{escape(path)}](<{quote(path)}>): {escape(what)}"
    if observed.tail:
        yield "- end of its output:\n"
        yield from (f"      {visible(line)}" for line in observed.tail)


def page(report: MatrixReport) -> str:
    """Return the report as one page that works offline: no script, no external resource."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = markdown.render(as_markdown(report).replace(_BREAK, ""))
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>backlight matrix</title><style>{_STYLE}</style></head><body>\n{body}</body></html>\n"
    )


def as_terminal(report: MatrixReport) -> str:
    """Return the short report as Markdown for rich; nothing of a case or a plan acts on the terminal."""
    return as_markdown(report, full=False).replace(_BREAK, "")


def write_report(root: Path, target: Path, *, as_html: bool) -> Path:
    """Write the report of the matrix in ``root`` to ``target`` and return it."""
    report = read_report(root)
    text = page(report) if as_html else as_markdown(report)
    write_atomically(target, text.encode(errors="backslashreplace"))
    return target


def write_reports(root: Path) -> tuple[Path, Path]:
    """Write ``report.md`` and ``report.html`` into the directory of a matrix and return their paths."""
    text = write_report(root, root / "report.md", as_html=False)
    return text, write_report(root, root / "report.html", as_html=True)


def write_bundle(root: Path, target: Path) -> Path:
    """Pack the directory of a matrix into ``target``, whole or not at all; links are left out."""
    check_archive(target)
    write_reports(root)
    files = (p for p in sorted(root.rglob("*")) if p.is_file() and not p.is_symlink())
    kept = (p for p in files if p not in {target.absolute(), root / ".lock"} and p.suffix != ".tmp")
    return write_archive(target, ((path.relative_to(root).as_posix(), path) for path in kept))
