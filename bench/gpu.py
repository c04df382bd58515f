"""What needs a device, unattended: the marked tests and the device half of the bench, in 9 minutes.

``make test-gpu``, or ``python bench/gpu.py``. It writes ``docs/gpu.md`` with the device, driver, torch, date
and figures. Without a device it prints one line, and the page stays as it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu.md"
LIMIT_S = 520.0
"""Seconds for everything; a step that does not fit any more is reported as not run."""

MAX_LINES = 40
"""Last lines of the output of a step that the page shows."""

NOT_RUN = "Not yet run on a GPU."

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
class Step:
    """One command: its title, and its limit in seconds."""

    title: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True)
class Done:
    """Outcome of a step in words, the seconds that it took, and its last lines."""

    step: Step
    outcome: str
    seconds: float
    output: str


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


def steps(kind: str, results: Path) -> list[Step]:
    """Return what runs on devices of this kind; the tests write ``results``."""
    python = sys.executable
    pytest = (
        python,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "--junit-xml",
        str(results),
    )
    bench = ("bench/overhead.py", "--device", kind, "--pairs", "40", "--threads", "1")
    measure = ("bench/measure.py", "--device", kind, "--threads", "1", "--repeats", "10")
    return [
        Step("Tests that need a device", (*pytest, "tests"), 240.0),
        Step("Overhead of a watched step", (python, *bench), 150.0),
        Step("All statistics of the gradients in one pass", (python, *measure), 120.0),
    ]


def run(todo: Sequence[Step], limit_s: float = LIMIT_S) -> list[Done]:
    """Run steps one after the other; each ends at its own limit, and at that of all."""
    done = []
    begin = time.monotonic()
    for step in todo:
        left = min(step.limit_s, limit_s - (time.monotonic() - begin))
        if left <= 0:
            done.append(Done(step, "not run: no time was left", 0.0, ""))
            continue
        started = time.monotonic()
        try:
            ended = subprocess.run(
                step.command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=left,
                check=False,
            )
            outcome = "ended" if not ended.returncode else f"failed with exit code {ended.returncode}"
            output = ended.stdout
        except subprocess.TimeoutExpired as error:
            outcome, output = f"ended at its limit of {left:.0f} s", error.stdout or b""
        lines = output.decode("utf-8", "replace").splitlines()[-MAX_LINES:]
        done.append(Done(step, outcome, time.monotonic() - started, "\n".join(lines)))
    return done


def count_tests(results: Path) -> str:
    """Return how many tests passed, failed and were skipped, by the file that pytest has written."""
    if not results.exists():
        return "no results were written"
    suite = next(ET.parse(results).getroot().iter("testsuite"))  # pytest has just written it
    total, failed, skipped = (int(suite.get(name, "0")) for name in ("tests", "failures", "skipped"))
    failed += int(suite.get("errors", "0"))
    return f"{total - failed - skipped} passed, {failed} failed, {skipped} skipped"


def page(device: dict[str, object], done: Sequence[Done], tests: str, date: str) -> str:
    """Return the page that states what ran where."""
    facts = ", ".join(
        f"{name} {device[key]}"
        for name, key in (("driver", "driver"), ("runtime", "runtime"), ("torch", "torch"))
        if device.get(key)
    )
    parts = [
        "# On a GPU",
        "",
        f"{date}: {device['count']} x {device['device']}, {facts}. Written by `make test-gpu`.",
        "",
        f"Tests that need a device: {tests}.",
    ]
    for one in done:
        shown = one.output.replace("```", "'''")
        parts += ["", f"## {one.step.title}", "", f"{one.outcome.capitalize()} after {one.seconds:.0f} s."]
        parts += ["", "```text", shown, "```"] if shown else []
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--page", type=Path, default=PAGE, help="page that is written")
    options = parser.parse_args(arguments)
    device = describe_device()
    if "type" not in device:
        print(
            f"test-gpu: torch {device['torch']} finds no GPU; nothing was run, and {options.page.name} stays"
        )
        return 0
    results = options.page.with_suffix(".xml")
    results.unlink(missing_ok=True)
    done = run(steps(str(device["type"]), results))
    tests = count_tests(results)
    results.unlink(missing_ok=True)
    options.page.write_text(page(device, done, tests, time.strftime("%Y-%m-%d")), encoding="utf-8")
    for one in done:
        print(f"{one.step.title}: {one.outcome}, {one.seconds:.0f} s")
    print(f"tests: {tests}; written: {options.page}")
    return int(any(one.outcome != "ended" for one in done))


if __name__ == "__main__":
    raise SystemExit(main())
