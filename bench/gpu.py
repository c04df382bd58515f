"""What needs a device, unattended, in 9 minutes: ``bench/gpu_checks`` and the tests marked ``gpu``.

``make test-gpu``, or ``python bench/gpu.py``; nothing has to be installed but :data:`WHEELS`. The most
valuable checks run first, each in a process group of its own. Each prints its result as it ends, and
``docs/gpu.md`` is written anew, so that a cut leaves what has run. Without a device it prints one line, and
the page stays as it is. ``--device sim --small`` runs the checks on the simulated accelerator of the tests.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu.md"
CHECKS = ROOT / "bench" / "gpu_checks"
LIMIT_S = 520.0
"""Seconds for everything; a check that does not fit any more is reported as not run."""

MAX_LINES = 40
"""Last lines of the output of a check that the page shows."""

SKIPPED = 77
"""Exit code of a check that the device cannot run; its last line is ``skipped: reason``."""

NOT_RUN = "Not yet run on a GPU."

BY_HAND = "## On the simulated device"
"""From this heading on the page is written by hand, and kept."""

WHEELS = (
    "torch", "numpy", "pytest", "filelock", "h5py", "markdown-it-py", "msgspec", "psutil",
    "rich", "scipy", "click",
)  # fmt: skip
"""What has to be installed; backlight itself is found on PYTHONPATH."""

MARKED = (
    "tests/measure/test_accelerator.py",
    "tests/session/test_no_waiting.py",
    "tests/diagnose/profile/test_device_phases.py",
    "tests/measure/spectra/test_measurement.py",
    "tests/monitors/spectra/instrument/test_step_measurement.py",
)
"""Files with tests that are marked ``gpu``: pytest collects no other, which would import more packages."""

PYTEST = (
    "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--import-mode=importlib",
    # Without pytest-timeout its option is unknown, which is an error under `--strict-config`.
    "-o", "addopts=-ra --strict-markers", "-W", "ignore:Unknown config option",
)  # fmt: skip

_DESCRIBE = """
import json, torch
found = torch.accelerator.current_accelerator()
if found is None or not torch.accelerator.is_available():
    print(json.dumps({"torch": torch.__version__}))
else:
    module = torch.get_device_module(found.type)
    name = getattr(module, "get_device_name", lambda: found.type)()
    version = torch.version.cuda or torch.version.hip or ""
    print(json.dumps({"torch": torch.__version__, "type": found.type, "device": name, "runtime": version,
                      "count": torch.accelerator.device_count()}))
"""


@dataclass(frozen=True)
class Check:
    """One command: what it checks, what is expected, and its limit in seconds."""

    title: str
    expected: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True)
class Done:
    """Outcome of a check in words, the seconds that it took, and its last lines."""

    check: Check
    outcome: str
    seconds: float
    output: str

    @property
    def is_failure(self) -> bool:
        """Whether it ended otherwise than expected."""
        return not self.outcome.startswith(("holds", "skipped"))


SUBJECTS: tuple[tuple[str, float], ...] = (
    ("graph_capture.py", 90.0),
    ("device_of_threads.py", 60.0),
    ("step_cost.py", 60.0),
    ("compiled_statistics.py", 40.0),
    ("nearly_full_memory.py", 60.0),
    ("forked_children.py", 60.0),
    ("logged_tensor.py", 40.0),
    ("collectives.py", 75.0),
    ("spectra_memory.py", 60.0),
    ("memory_prediction.py", 75.0),
    ("no_synchronization.py", 40.0),
    ("profile_split.py", 100.0),
    ("overlap.py", 90.0),
    ("peers.py", 75.0),
)
"""Files of ``bench/gpu_checks`` with their limits in seconds, the most valuable first."""

SHARED = frozenset({"check.py", "language_model.py", "memory_recipe.py"})
"""Files there that checks share."""

FIRST = 2
"""Checks that come before the tests."""


def checks(kind: str, *, is_small: bool = False) -> list[Check]:
    """Return what runs on devices of this kind, in order."""
    python = sys.executable
    options = ("--device", kind, *(["--small"] if is_small else []))
    found = []
    for name, limit_s in SUBJECTS:
        title, expected = describe(CHECKS / name)
        found.append(Check(title, expected, (python, f"bench/gpu_checks/{name}", *options), limit_s))
    tests = [Check(f"Tests of `{file}`", "all pass", (python, *PYTEST, file), 60.0) for file in MARKED]
    return found[:FIRST] + tests + found[FIRST:]


def describe(file: Path) -> tuple[str, str]:
    """Return the subject of a check and what it expects, without running it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (expected,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXPECTED"
    )
    return str(ast.get_docstring(tree)).partition("\n")[0].rstrip("."), str(expected)


def describe_device(python: str = sys.executable) -> dict[str, object]:
    """Return torch's version and, where there is one, the device; found in a process of its own."""
    done = subprocess.run([python, "-c", _DESCRIBE], capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    if "type" in found:
        found["driver"] = driver()
    return found


def driver() -> str:
    """Return the version of NVIDIA's driver, empty where there is none."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def environment() -> dict[str, str]:
    """Return the environment of a check: backlight and the modules of its tests need not be installed."""
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(todo: Sequence[Check], limit_s: float = LIMIT_S) -> Iterator[Done]:
    """Run checks one after the other; each ends at its own limit, and at that of all."""
    begin = time.monotonic()
    for check in todo:
        left = min(check.limit_s, limit_s - (time.monotonic() - begin))
        if left <= 0:
            yield Done(check, "not run: no time was left", 0.0, "")
            continue
        started = time.monotonic()
        # A file, not a pipe: what was printed before a limit stays, and no process left over keeps it open.
        with tempfile.TemporaryFile() as file:
            process = subprocess.Popen(
                check.command,
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(left)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            file.seek(0)
            lines = file.read().decode("utf-8", "replace").splitlines()
        yield Done(
            check, _outcome(code, lines, left), time.monotonic() - started, "\n".join(lines[-MAX_LINES:])
        )


def _outcome(code: int | None, lines: list[str], left: float) -> str:
    last = lines[-1] if lines else ""
    match code:
        case None:
            return f"ended at its limit of {left:.0f} s"
        case 0 if "skipped" in last and "passed" not in last:  # of pytest, which exits with 0
            return f"skipped: {last}"
        case 0:
            missing = sum(": not run: " in line for line in lines)
            return "holds" + (f"; {missing} part{'s' if missing > 1 else ''} not run" if missing else "")
        case 1:
            return "does not hold"
        case _ if code == SKIPPED:
            return last if last.startswith("skipped: ") else "skipped"
        case _:
            return f"failed with exit code {code}"


def page(
    device: dict[str, object] | None, todo: Sequence[Check], done: Sequence[Done], date: str, kept: str
) -> str:
    """Return the page: what ran where, of all that is to run, and the part that is written by hand."""
    *all_but_one, last = WHEELS
    first = f"{NOT_RUN} Without a GPU `make test-gpu` prints one line."
    if device is not None:
        facts = ", ".join(f"{key} {device[key]}" for key in ("driver", "runtime", "torch") if device.get(key))
        first = f"{date}: {device['count']} x {device['device']}, {facts}."
    parts = [
        "# On a GPU",
        "",
        first,
        "",
        "`make test-gpu` runs this list within 9 minutes, unattended, and writes this page after each check. "
        f"It needs {', '.join(all_but_one)} and {last}; backlight itself need not be installed.",
        "",
        "| check | expected | result |",
        "|---|---|---|",
    ]
    results = {one.check: f"{one.outcome}, {one.seconds:.0f} s" for one in done}
    for check in todo:
        cells = (check.title, check.expected, results.get(check, "not run"))
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    for one in done:
        if one.output:
            shown = one.output.replace("```", "'''")
            parts += ["", f"## {one.check.title}", "", "```text", shown, "```"]
    return "\n".join(parts) + "\n\n" + kept


def by_hand(text: str) -> str:
    """Return the part of a page that is written by hand."""
    _, heading, after = text.partition(BY_HAND)
    return heading + after


def write(file: Path, text: str) -> None:
    """Replace a page at once, so that a cut leaves a whole one."""
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--page", type=Path, default=PAGE, help="page that is written")
    parser.add_argument("--device", default="", help="type of device, instead of the one that torch finds")
    parser.add_argument("--small", action="store_true", help="small sizes, which show the logic only")
    parser.add_argument("--only", default="", help="text that the titles or commands of checks contain")
    parser.add_argument("--list", action="store_true", help="write the list of checks without results")
    options = parser.parse_args(arguments)
    kept = by_hand(options.page.read_text(encoding="utf-8")) if options.page.exists() else ""
    if options.list:
        write(options.page, page(None, checks("cuda"), [], "", kept))
        return 0
    device = describe_device()
    if options.device:
        device = {"count": 1, "device": options.device, **device, "type": options.device}
    if "type" not in device:
        print(
            f"test-gpu: torch {device['torch']} finds no GPU; nothing was run, and {options.page.name} stays"
        )
        return 0
    todo = [
        check
        for check in checks(str(device["type"]), is_small=options.small)
        if options.only in check.title or options.only in " ".join(check.command)
    ]
    done: list[Done] = []
    for one in run(todo):
        done.append(one)
        print(f"{one.check.title}: {one.outcome}, {one.seconds:.0f} s", flush=True)
        if one.is_failure:
            print(one.output, flush=True)
        write(options.page, page(device, todo, done, time.strftime("%Y-%m-%d"), kept))
    print(f"written: {options.page}")
    return int(any(one.is_failure for one in done))


if __name__ == "__main__":
    raise SystemExit(main())
