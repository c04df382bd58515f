"""Run a whole matrix: check everything, then run case by case, and resume where an earlier call stopped."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from backlight.diagnose.matrix import report as reports
from backlight.diagnose.matrix.case_run import run_case
from backlight.diagnose.matrix.cases import Case, cases_of
from backlight.diagnose.matrix.decision_tree import check_tree, walk
from backlight.diagnose.matrix.evaluation import Finished, compare, evaluate
from backlight.diagnose.matrix.inputs import Interpreters, check_cases
from backlight.diagnose.matrix.plan import Plan, PlanError, read_plan
from backlight.diagnose.matrix.report import REPORTS, MatrixReport
from backlight.diagnose.matrix.results import REPORT, locked, new_attempt, stored, write_whole
from backlight.processes import available_cores, available_memory
from backlight.records import DiagnosisKind
from backlight.text import did_you_mean, size

MAX_WINDOW_S = 10.0
_RELEVANT = re.compile(
    r"TORCH|PYTORCH|NCCL|GLOO|CUDA|OMP|MKL|KMP|PYTHON|BACKLIGHT|SLURM_N|TOKENIZERS|HF_HUB_OFFLINE"
)


@dataclass(frozen=True)
class Prepared:
    """A plan whose every case can start; ``order`` is that of the nodes of its tree."""

    plan: Plan
    path: Path
    cases: tuple[Case, ...]
    order: tuple[str, ...]
    interpreters: Interpreters


def prepare(path: Path) -> Prepared:
    """Read and check a plan; nothing is written.

    Raises
    ------
    PlanError
        At the first thing that is wrong with it.
    """
    plan = read_plan(path)
    cases = cases_of(plan, path)
    order = check_tree(plan, {case.name: case.control for case in cases}, path)
    for case in cases:
        if plan.window is not None and plan.window >= case.launch.time_limit:
            raise PlanError(
                f"{path}: window = {plan.window:g} s is not below the time_limit of case {case.name!r}, "
                f"{case.launch.time_limit:g} s"
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
    on_end: Callable[[Finished], None] = lambda _: None,
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
    finished: dict[str, Finished] = {}

    def store() -> MatrixReport:
        report = _report(prepared, {n: finished[n] for n in names if n in finished}, environment, rerun)
        write_whole(root / REPORT, REPORTS.dump_json(report, indent=2))
        return report

    with locked(root, prepared.path), _interruptible():
        for case in prepared.cases:
            found = stored(root, case)
            if found is not None and case.name not in again:
                finished[case.name] = Finished(case, *found, evaluate(found[1]))
        report = store()
        for case in prepared.cases:
            if case.name in finished or (only and case.name not in only):
                continue
            on_start(case)
            attempt = new_attempt(root, case)
            window = plan.window or min(MAX_WINDOW_S, case.launch.time_limit / 3)
            observation = run_case(case, attempt, window=window, grace=plan.grace)
            attempt.finish(case, observation)
            finished[case.name] = Finished(case, attempt, observation, evaluate(observation))
            report = store()
            on_end(finished[case.name])
    return report


def _report(
    prepared: Prepared, finished: dict[str, Finished], environment: dict[str, str], rerun: str
) -> MatrixReport:
    plan, cases = prepared.plan, prepared.cases
    pairs = {c.name: c.control for c in cases if c.name in finished and c.control in finished}
    comparisons = {name: compare(finished[name], finished[control]) for name, control in pairs.items()}
    branches = walk(plan, prepared.order, {n: f.evaluation for n, f in finished.items()}, comparisons)
    failed = [name for name, one in finished.items() if one.evaluation.verdict is not DiagnosisKind.PASS]
    return MatrixReport(
        name=plan.name or prepared.path.stem,
        plan=str(prepared.path),
        created=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        environment=environment,
        cases=tuple(reports.case_report(one) for one in finished.values()),
        comparisons=tuple(comparisons.values()),
        branches=branches,
        open=tuple(reports.open_questions(finished, branches, comparisons)),
        actions=tuple(reports.next_actions(plan, finished, branches, comparisons, rerun)),
        verify=tuple(f"{rerun} --again {shlex.quote(name)}" for name in failed),
        not_run=tuple(case.name for case in cases if case.name not in finished),
    )


def _environment(prepared: Prepared) -> dict[str, str]:
    """Return what is needed to repeat the matrix, as label and text, without secrets."""
    directory = prepared.path.parent.absolute()
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    variables = reports.hide_secrets({k: v for k, v in sorted(os.environ.items()) if _RELEVANT.match(k)})
    found = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": f"{available_cores()} usable of {os.cpu_count()}",
        "memory": f"{size(available_memory())} available",
        "backlight": importlib.metadata.version("backlight"),
        "py-spy": shutil.which("py-spy") or "not on the path",
        "ptrace_scope": scope.read_text(encoding="ascii").strip() if scope.exists() else "not restricted",
        "code": _commit(directory),
        "variables": ", ".join(f"{k}={v}" for k, v in variables.items()) or "none that matter",
    }
    for path, versions in prepared.interpreters.items():
        found[f"interpreter {path}"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return found


def _commit(directory: Path) -> str:
    git = ["git", "-C", str(directory)]
    command = [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return f"{directory}, not under git"
    return f"{directory}, commit {done.stdout.strip()}"


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Turn SIGTERM and a lost terminal into KeyboardInterrupt, so that the running case is ended first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
