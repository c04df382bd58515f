"""Run a test matrix: check everything, run case by case, and resume an interrupted one."""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import filelock

from backlight import atomic_files, codec
from backlight.diagnose.test_matrix.case_run import run_case
from backlight.diagnose.test_matrix.evaluation import CaseResult, check_tree, compare, evaluate, walk
from backlight.diagnose.test_matrix.plan import Case, MatrixPlan, PlanError, cases_of, read_plan
from backlight.diagnose.test_matrix.report import REPORT, MatrixDirectoryError, MatrixReport
from backlight.launch.subprocess import end_marked
from backlight.redaction import Redaction
from backlight.text import did_you_mean
from backlight.untrusted_files import read


@dataclass(frozen=True)
class Prepared:
    """A plan whose every case can start; ``order`` is that of the nodes of its tree."""

    plan: MatrixPlan
    path: Path
    cases: tuple[Case, ...]
    order: tuple[str, ...]


def prepare(path: Path) -> Prepared:
    """Read and check a plan, write nothing; a PlanError names the first thing that is wrong with it."""
    try:
        plan = read_plan(path)
        cases = cases_of(plan, path.parent)
        order = check_tree(plan, {case.name: case.control for case in cases})
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    return Prepared(plan, path, cases, order)


def execute(
    prepared: Prepared,
    out: Path,
    *,
    again: Collection[str] = (),
    on_start: Callable[[Case], None] = lambda _: None,
    on_end: Callable[[CaseResult], None] = lambda _: None,
) -> MatrixReport:
    """Run what has no result yet, and the cases named in ``again``, and return the report.

    ``out`` is the directory of the test matrix; each result is stored there as soon as it exists.
    ``on_start`` and ``on_end`` are called before and after each case that runs.

    Raises
    ------
    PlanError
        If ``again`` names no case.
    """
    names = [case.name for case in prepared.cases]
    for name in again:
        if name not in names:
            raise PlanError(f"{prepared.path}: no case is called {name!r}{did_you_mean(name, names)}")
    root = out.resolve()
    with _locked(root, prepared.path), _interruptible():
        by_name = {case.name: _stored(root, case) for case in prepared.cases if case.name not in again}
        stored = {name: result for name, result in by_name.items() if result is not None}
        report = _store(prepared, root, out, stored)
        for case in prepared.cases:
            if case.name not in stored:
                on_start(case)
                stored[case.name] = _run(root, case)
                report = _store(prepared, root, out, stored)
                on_end(stored[case.name])
    return report


def _run(root: Path, case: Case) -> CaseResult:
    attempt = root / "cases" / case.name / f"{len(_attempts(root, case)):03d}"
    attempt.mkdir(parents=True)
    observed = run_case(case, attempt)
    redaction = Redaction()
    shown = replace(
        case, environment=redaction.variables(case.environment), argv=redaction.arguments(case.argv)
    )
    relative = attempt.relative_to(root).as_posix()
    result = CaseResult(shown, case.digest, relative, observed, evaluate(observed))
    # From here on the case counts as done.
    atomic_files.write(attempt / "result.json", codec.encode(result, indent=2).encode())
    return result


def _attempts(root: Path, case: Case) -> list[Path]:
    return sorted((root / "cases" / case.name).glob("[0-9]*"))


def _stored(root: Path, case: Case) -> CaseResult | None:
    """Return the last result of exactly this case, None without one."""
    for attempt in reversed(_attempts(root, case)):
        with contextlib.suppress(OSError, ValueError):
            result = codec.convert(codec.decode(read(attempt / "result.json").decode()), CaseResult)
            if result.digest == case.digest:
                return result
    return None


def _store(prepared: Prepared, root: Path, out: Path, results: Mapping[str, CaseResult]) -> MatrixReport:
    """Write and return the report on the cases that have a result."""
    done = {case.name: results[case.name] for case in prepared.cases if case.name in results}
    pairs = {name: done[result.case.control] for name, result in done.items() if result.case.control in done}
    comparisons = {name: compare(done[name], control, root) for name, control in pairs.items()}
    evaluations = {name: result.evaluation for name, result in done.items()}
    branches = walk(prepared.plan, prepared.order, evaluations, comparisons)
    rerun = shlex.join(["backlight", "test-matrix", str(prepared.path), "--out", str(out)])
    name = prepared.plan.name or prepared.path.stem
    report = MatrixReport(name, rerun, tuple(done.values()), tuple(comparisons.values()), branches)
    atomic_files.write(root / REPORT, codec.encode(report, indent=2).encode())
    return report


@contextlib.contextmanager
def _locked(root: Path, plan: Path) -> Iterator[None]:
    """Make the directory of a test matrix and lock it; end what an interrupted test matrix left running."""
    if not (root / "plan.toml").is_file() and root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise MatrixDirectoryError(f"{root}: holds something that is no test matrix; choose another --out")
    (root / "cases").mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(root / ".lock", timeout=0):
            atomic_files.write(root / "plan.toml", read(plan, links=True))
            starts = root.glob("cases/*/*/start.json")
            unfinished = [start for start in starts if not (start.parent / "result.json").exists()]
            end_marked(codec.decode(read(start).decode())["mark"] for start in unfinished)
            yield
    except filelock.Timeout:
        problem = "another test matrix is running in it; wait, or choose another --out"
        raise MatrixDirectoryError(f"{root}: {problem}") from None


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Turn SIGTERM and a lost terminal into KeyboardInterrupt, so that the running case is ended first."""
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if main else ()
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
