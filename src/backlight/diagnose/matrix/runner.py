"""Run a whole matrix: check everything, then run case by case, and resume where an earlier call stopped.

::

    matrix.json              the report, rewritten after every case
    plan.toml                the plan as it was
    trees/COMMIT/            the files of a branch
    cases/NAME/000/          one attempt; a case that runs again gets the next number
        start.json  result.json  stdout.txt  stderr.txt  evidence/  run/  edited/
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import filelock
from pydantic import TypeAdapter, ValidationError

from backlight.diagnose.matrix import report as reports
from backlight.diagnose.matrix.case_files import Interpreters, check_cases
from backlight.diagnose.matrix.case_run import run_case
from backlight.diagnose.matrix.cases import Case, cases_of
from backlight.diagnose.matrix.comparison import CaseResult, compare
from backlight.diagnose.matrix.decision_tree import check_tree, walk
from backlight.diagnose.matrix.evaluation import evaluate
from backlight.diagnose.matrix.observation import Observation
from backlight.diagnose.matrix.plan import Plan, PlanError, read_plan
from backlight.diagnose.matrix.report import MatrixDirectoryError, MatrixReport
from backlight.launch.subprocess import end_marked, run_in_own_session
from backlight.processes import available_cores, available_memory
from backlight.records import DiagnosisKind
from backlight.store.platform.atomic_json import write_atomically
from backlight.text import did_you_mean, size

MAX_WINDOW_S = 10.0
GIT_TIMEOUT_S = 20.0
_RELEVANT = re.compile(
    r"TORCH|PYTORCH|NCCL|GLOO|CUDA|OMP|MKL|KMP|PYTHON|BACKLIGHT|SLURM_N|TOKENIZERS|HF_HUB_OFFLINE"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
_OBSERVATIONS = TypeAdapter(Observation)


@dataclass(frozen=True)
class Prepared:
    """A plan whose every case can start; ``order`` is that of the nodes of its tree."""

    plan: Plan
    path: Path
    cases: tuple[Case, ...]
    order: tuple[str, ...]
    interpreters: Interpreters


def prepare(path: Path) -> Prepared:
    """Read and check a plan; nothing is written. A PlanError names the first thing that is wrong with it."""
    plan = read_plan(path)
    cases = cases_of(plan, path)
    order = check_tree(plan, {case.name: case.control for case in cases}, path)
    for case in cases:
        if plan.window is not None and plan.window >= case.time_limit:
            raise PlanError(
                f"{path}: window = {plan.window:g} s is not below the time_limit of case {case.name!r}, "
                f"{case.time_limit:g} s"
            )
    checked, interpreters = check_cases(cases, path)
    return Prepared(plan, path, checked, order, interpreters)


def execute(
    prepared: Prepared,
    out: Path,
    *,
    again: Collection[str] = (),
    only: Collection[str] = (),
    on_start: Callable[[Case], None] = lambda _: None,
    on_end: Callable[[CaseResult], None] = lambda _: None,
) -> MatrixReport:
    """Run what has no result yet and return the report; each result is stored as soon as it exists.

    Parameters
    ----------
    prepared:
        From :func:`prepare`.
    out:
        Directory of the matrix, created where it does not exist.
    again:
        Cases that run although they have a result.
    only:
        If given, no other case runs; stored results of the others still count.
    on_start, on_end:
        Called before and after each case that runs.

    Raises
    ------
    PlanError
        If ``again`` or ``only`` names no case.
    MatrixDirectoryError
        If the directory is in use or holds something else.
    """
    plan, names = prepared.plan, [case.name for case in prepared.cases]
    for name in (*again, *only):
        if name not in names:
            raise PlanError(f"{prepared.path}: no case is called {name!r}{did_you_mean(name, names)}")
    rerun = f"backlight matrix {shlex.quote(str(prepared.path))} --out {shlex.quote(str(out))}"
    root, environment = out.resolve(), _environment(prepared)
    results: dict[str, CaseResult] = {}

    def store() -> MatrixReport:
        ordered = {name: results[name] for name in names if name in results}
        report = _report(prepared, ordered, environment, rerun, root)
        write_atomically(root / reports.REPORT, reports.REPORTS.dump_json(report, indent=2))
        return report

    with _locked(root, prepared.path), _interruptible():
        for case in prepared.cases:
            if case.name not in again and (found := _stored(root, case)) is not None:
                results[case.name] = found
        report = store()
        for case in prepared.cases:
            if case.name in results or (only and case.name not in only):
                continue
            on_start(case)
            last = max((int(path.name) for path in _attempts(root, case)), default=-1)
            attempt = root / "cases" / case.name / f"{last + 1:03d}"
            attempt.mkdir(parents=True)
            window = plan.window or min(MAX_WINDOW_S, case.time_limit / 3)
            observed = run_case(case, attempt, window=window, grace=plan.grace)
            # From here on the case counts as done.
            write_atomically(attempt / "result.json", _OBSERVATIONS.dump_json(observed, indent=2))
            results[case.name] = _result(root, case, attempt, observed)
            report = store()
            on_end(results[case.name])
    return report


def _attempts(root: Path, case: Case) -> list[Path]:
    return sorted((root / "cases" / case.name).glob("[0-9]*"))


def _stored(root: Path, case: Case) -> CaseResult | None:
    """Return the last result of exactly this case, None without one."""
    for attempt in reversed(_attempts(root, case)):
        with contextlib.suppress(OSError, ValidationError):
            observed = _OBSERVATIONS.validate_json((attempt / "result.json").read_bytes())
            if observed.digest == case.digest:
                return _result(root, case, attempt, observed)
    return None


def _result(root: Path, case: Case, attempt: Path, observed: Observation) -> CaseResult:
    hidden = replace(case, environment=hide_secrets(case.environment))
    return CaseResult(hidden, attempt.relative_to(root).as_posix(), observed, evaluate(observed))


@contextlib.contextmanager
def _locked(root: Path, plan: Path) -> Iterator[None]:
    """Make the directory of a matrix and lock it; end what an interrupted matrix left running."""
    if not (root / "plan.toml").is_file() and root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise MatrixDirectoryError(f"{root}: holds something that is no matrix; choose another --out")
    (root / "cases").mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(root / ".lock", timeout=0):
            write_atomically(root / "plan.toml", plan.read_bytes())
            marks = set()
            for start in root.glob("cases/*/*/start.json"):
                if not (start.parent / "result.json").exists():
                    with contextlib.suppress(OSError, ValueError, KeyError):
                        marks.add(json.loads(start.read_bytes())["mark"])
            end_marked(marks)
            yield
    except filelock.Timeout:
        raise MatrixDirectoryError(
            f"{root}: another matrix is running in it; wait, or choose another --out"
        ) from None


def _report(
    prepared: Prepared, results: Mapping[str, CaseResult], environment: dict[str, str], rerun: str, root: Path
) -> MatrixReport:
    plan, cases = prepared.plan, prepared.cases
    pairs = {c.name: c.control for c in cases if c.name in results and c.control in results}
    comparisons = {name: compare(results[name], results[control], root) for name, control in pairs.items()}
    branches = walk(plan, prepared.order, {n: one.evaluation for n, one in results.items()}, comparisons)
    failed = [name for name, one in results.items() if one.evaluation.verdict is not DiagnosisKind.PASS]
    return MatrixReport(
        name=plan.name or prepared.path.stem,
        plan=str(prepared.path),
        created=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        environment=environment,
        cases=tuple(results.values()),
        comparisons=tuple(comparisons.values()),
        branches=branches,
        open=tuple(reports.open_questions(results, branches, comparisons)),
        actions=tuple(reports.next_actions(plan, results, branches, comparisons, rerun)),
        verify=tuple(f"{rerun} --again {shlex.quote(name)}" for name in failed),
        not_run=tuple(case.name for case in cases if case.name not in results),
    )


def hide_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables without the values of those whose names look secret."""
    return {k: "(hidden)" if _SECRET.search(k) else v for k, v in variables.items()}


def _environment(prepared: Prepared) -> dict[str, str]:
    """Return what is needed to repeat the matrix, as label and text, without secrets."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    variables = hide_secrets({k: v for k, v in sorted(os.environ.items()) if _RELEVANT.match(k)})
    found = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": f"{available_cores()} usable of {os.cpu_count()}",
        "memory": f"{size(available_memory())} available",
        "backlight": importlib.metadata.version("backlight"),
        "py-spy": shutil.which("py-spy") or "not on the path",
        "ptrace_scope": scope.read_text(encoding="ascii").strip() if scope.exists() else "not restricted",
        "code": _commit(str(prepared.path.parent.absolute())),
        "variables": ", ".join(f"{k}={v}" for k, v in variables.items()) or "none that matter",
    }
    for path, versions in prepared.interpreters.items():
        found[f"interpreter {path}"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return found


def _commit(directory: str) -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    pipe = subprocess.PIPE
    try:
        done = run_in_own_session(command, limit=GIT_TIMEOUT_S, stdout=pipe, stderr=pipe, directory=directory)
    except (OSError, subprocess.TimeoutExpired):
        return f"{directory}, state of git not known"
    found = f"commit {done.stdout.strip()}" if not done.returncode else "not under git"
    return f"{directory}, {found}"


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Turn SIGTERM and a lost terminal into KeyboardInterrupt, so that the running case is ended first."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if main else ()
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
