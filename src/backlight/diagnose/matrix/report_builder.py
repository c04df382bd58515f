"""From the cases that have run to the report: comparisons, the walked tree, what to do, what stays open."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from backlight.diagnose.matrix.cases import Case
from backlight.diagnose.matrix.comparison import Comparison, Effect, Seen, compare
from backlight.diagnose.matrix.environment import hidden
from backlight.diagnose.matrix.observations import Ended
from backlight.diagnose.matrix.plan import UNDECIDED, Plan
from backlight.diagnose.matrix.report import CaseReport, MatrixReport, Todo
from backlight.diagnose.matrix.tree import Branch, Standing, walk
from backlight.records import DiagnosisKind


def assemble(
    plan: Plan,
    path: Path,
    root: str,
    cases: Sequence[Case],
    seen: Mapping[str, Seen],
    environment: Mapping[str, str],
    rerun: str,
) -> MatrixReport:
    """Return the report on all cases that have run so far.

    Parameters
    ----------
    plan, path, root:
        The plan, its file, and the root of its tree.
    cases:
        All cases of the plan in their order.
    seen:
        What is known of those that have run, by name.
    environment:
        Where it ran, from :func:`backlight.diagnose.matrix.environment.describe`.
    rerun:
        The command that goes on with this matrix.
    """
    compared = {
        case.name: compare(seen[case.name], seen[case.control])
        for case in cases
        if case.control and case.name in seen and case.control in seen
    }
    branches = walk(plan, root, {name: s.judgement for name, s in seen.items()}, compared)
    return MatrixReport(
        name=plan.name or path.stem,
        plan=str(path),
        made=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        environment=environment,
        cases=tuple(_case(seen[case.name]) for case in cases if case.name in seen),
        comparisons=tuple(compared.values()),
        branches=branches,
        open=tuple(_open(seen, branches, compared)),
        actions=tuple(_actions(plan, seen, branches, compared, rerun)),
        verify=tuple(f"{rerun} --again {shlex.quote(name)}" for name, s in seen.items() if not _passed(s)),
        not_run=tuple(case.name for case in cases if case.name not in seen),
    )


def _passed(seen: Seen) -> bool:
    return seen.judgement.verdict is DiagnosisKind.PASS


def _case(seen: Seen) -> CaseReport:
    launch = seen.case.launch
    return CaseReport(
        name=seen.case.name,
        control=seen.case.control,
        factor=seen.case.factor,
        command=shlex.join(launch.filled(seen.attempt.run, seen.attempt.path)),
        directory=launch.directory,
        environment=hidden(launch.environment) | dict.fromkeys(launch.unset, "(unset)"),
        branch=launch.branch,
        seconds=seen.observation.seconds,
        limit=launch.time_limit,
        attempt=seen.attempt.path.relative_to(seen.attempt.root).as_posix(),
        judgement=seen.judgement,
        files=seen.observation.files,
        missing=seen.observation.missing,
        tail=seen.observation.tail,
        ended_by=seen.observation.ended_by,
    )


def _open(
    seen: Mapping[str, Seen], branches: Sequence[Branch], compared: Mapping[str, Comparison]
) -> Iterator[str]:
    for branch in branches:
        if branch.standing is Standing.OPEN and branch.conclusion:
            yield f"{branch.conclusion} ({branch.why})"
        elif branch.standing is Standing.SUPPORTED and branch.answer and not branch.leads:
            yield f"{branch.ask or branch.name}: the answer, {branch.answer}, leads nowhere in the tree"
    for comparison in compared.values():
        if not comparison.outcome:
            yield f"{comparison.case} against {comparison.control}: {comparison.why}"
    for name, one in seen.items():
        for alternative in one.judgement.alternatives:
            yield f"{name}: {alternative}"


def _actions(
    plan: Plan,
    seen: Mapping[str, Seen],
    branches: Sequence[Branch],
    compared: Mapping[str, Comparison],
    rerun: str,
) -> Iterator[Todo]:
    """What the supported conclusions say comes first, then the lines found, then what would decide more."""
    for branch in branches:
        if branch.standing is Standing.SUPPORTED:
            for action in plan.tree[branch.name].actions:
                yield Todo(action.do, action.at, branch.conclusion, action.verify or rerun)
    told: dict[str, list[str]] = {}
    for name, one in seen.items():
        if one.judgement.line and one.judgement.verdict not in {*UNDECIDED, DiagnosisKind.PASS}:
            told.setdefault(one.judgement.line, []).append(name)
    for line, names in told.items():
        judgement = seen[names[0]].judgement
        yield Todo(
            _WHAT.get(judgement.verdict, "look at this line"), line,
            f"{', '.join(names)}: {judgement.claim}", f"{rerun} --again {shlex.quote(names[0])}",
        )  # fmt: skip
    for comparison in compared.values():
        if comparison.effect in {Effect.NONE, Effect.NOT_OBSERVED} and not comparison.outcome:
            do = f"make sure that {comparison.factor} reaches the training, and say how it shows (shows)"
            again = f"{rerun} --again {shlex.quote(comparison.case)}"
            yield Todo(do, "", f"{comparison.case}: {comparison.why}", again)
    for name, one in seen.items():
        if one.judgement.verdict in UNDECIDED:
            limit = f"{one.case.launch.time_limit:g} s"
            more = f"raise time_limit above {limit}, or say how progress shows (progress)"
            do = more if one.observation.ended is Ended.OVER else "read its output"
            yield Todo(do, "", f"{name}: {one.judgement.claim}", f"{rerun} --again {shlex.quote(name)}")


_WHAT = {
    DiagnosisKind.BLOCKED: "find out who should end this wait",
    DiagnosisKind.SPIN: "find out why this loop does not end",
    DiagnosisKind.LONG_OP: "measure this operation alone on its shapes",
    DiagnosisKind.CRASH: "look at the error that comes from here",
    DiagnosisKind.SLOW: "profile from this line",
}
