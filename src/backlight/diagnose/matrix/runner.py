"""Run a whole matrix: check everything, then case by case, going on after failures and where it stopped."""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from backlight.diagnose.matrix.case_runner import run_case
from backlight.diagnose.matrix.cases import Case, cases_of
from backlight.diagnose.matrix.comparison import Seen
from backlight.diagnose.matrix.directory import REPORT, MatrixFolder, write_json
from backlight.diagnose.matrix.environment import describe
from backlight.diagnose.matrix.evaluation import judge
from backlight.diagnose.matrix.plan import Plan, read_plan
from backlight.diagnose.matrix.plan_errors import PlanError, near
from backlight.diagnose.matrix.report import MatrixReport
from backlight.diagnose.matrix.report_builder import assemble
from backlight.diagnose.matrix.tree import check_tree
from backlight.diagnose.matrix.validation import Interpreter, check_cases

LONGEST_WINDOW = 10.0
"""Seconds of window that suffice where the plan names none."""


@dataclass(frozen=True)
class Prepared:
    """A plan whose every case can start."""

    plan: Plan
    path: Path
    cases: tuple[Case, ...]
    root: str
    interpreters: tuple[Interpreter, ...]


def prepare(path: Path) -> Prepared:
    """Read and check a plan; nothing is written.

    Raises
    ------
    PlanError
        At the first thing that is wrong with it.
    """
    plan = read_plan(path)
    cases = cases_of(plan, path)
    root = check_tree(plan, {case.name: case.control for case in cases}, path)
    if plan.window is not None:
        for case in cases:
            if plan.window >= case.launch.time_limit:
                raise PlanError(
                    f"{path}: window = {plan.window:g} s is not below the time_limit of case {case.name!r}, "
                    f"{case.launch.time_limit:g} s"
                )
    pinned, interpreters = check_cases(cases, path)
    return Prepared(plan, path, pinned, root, interpreters)


def window_of(plan: Plan, case: Case) -> float:
    """Return the seconds before the limit over which a case is judged: the last third, at most 10 s."""
    return plan.window if plan.window is not None else min(LONGEST_WINDOW, case.launch.time_limit / 3)


def execute(
    prepared: Prepared,
    out: Path,
    *,
    again: Collection[str] = (),
    only: Collection[str] = (),
    on_start: Callable[[Case], None] = lambda _: None,
    on_end: Callable[[Seen], None] = lambda _: None,
) -> MatrixReport:
    """Run what has no result yet and return the report; each result is stored the moment it is made.

    Parameters
    ----------
    prepared:
        From :func:`prepare`.
    out:
        Folder of the matrix, made where it is not there.
    again:
        Cases that run although they have a result.
    only:
        Where given, no other case runs; stored results of the others still count.
    on_start, on_end:
        Called before and after each case that runs.

    Raises
    ------
    PlanError
        If ``again`` or ``only`` names no case.
    MatrixFolderError
        If the folder is in use or holds something else.
    """
    names = [case.name for case in prepared.cases]
    for name in (*again, *only):
        if name not in names:
            raise PlanError(f"{prepared.path}: no case is called {name!r}{near(name, names)}")
    rerun = f"backlight matrix {shlex.quote(str(prepared.path))} --out {shlex.quote(str(out))}"
    out = out.resolve()
    folder = MatrixFolder(out)
    environment = describe(prepared.path.parent.absolute(), prepared.interpreters)
    seen: dict[str, Seen] = {}

    def store() -> MatrixReport:
        ordered = {case.name: seen[case.name] for case in prepared.cases if case.name in seen}
        report = assemble(
            prepared.plan, prepared.path, prepared.root, prepared.cases, ordered, environment, rerun
        )
        write_json(out / REPORT, report)
        return report

    with folder.held(prepared.path), _interruptible():
        for case in prepared.cases:
            stored = folder.done(case)
            if stored is not None and case.name not in again:
                seen[case.name] = Seen(case, stored[0], stored[1], judge(stored[1]))
        report = store()
        for case in prepared.cases:
            if case.name in seen or (only and case.name not in only):
                continue
            on_start(case)
            attempt = folder.new_attempt(case)
            observation = run_case(
                case, attempt, window=window_of(prepared.plan, case), grace=prepared.plan.grace
            )
            attempt.finish(case, observation)
            seen[case.name] = Seen(case, attempt, observation, judge(observation))
            report = store()
            on_end(seen[case.name])
    return report


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let a SIGTERM or a lost terminal end the running case first, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
