"""Where a matrix ran: what a reader must know to repeat it, without anything secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from backlight.diagnose.matrix.evidence import pyspy
from backlight.diagnose.matrix.validation import Interpreter

_TELLING = re.compile(
    r"^(TORCH|PYTORCH|NCCL|GLOO|CUDA|OMP|MKL|KMP|PYTHON|BACKLIGHT|SLURM_N|TOKENIZERS|HF_HUB_OFFLINE)"
)
_SECRET = re.compile(r"(TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|KEY)", re.IGNORECASE)


def describe(directory: Path, interpreters: Sequence[Interpreter]) -> dict[str, str]:
    """Return the environment of a matrix as label and text."""
    said = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": f"{_processors()} usable of {os.cpu_count()}",
        "memory": _memory(),
        "backlight": importlib.metadata.version("backlight"),
    }
    for number, interpreter in enumerate(interpreters):
        label = "interpreter" if len(interpreters) == 1 else f"interpreter {number + 1}"
        versions = ", ".join(f"{k} {v}" for k, v in interpreter.versions.items() if v and k != "executable")
        said[label] = f"{interpreter.path} ({versions})"
    said["code"] = _code(directory)
    said["py-spy"] = pyspy() or "not installed"
    said["tracing of processes"] = _tracing()
    variables = hidden({k: v for k, v in sorted(os.environ.items()) if _TELLING.match(k)})
    said["variables"] = ", ".join(f"{k}={v}" for k, v in variables.items()) or "none that matter"
    return {label: text for label, text in said.items() if text}


def hidden(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with the values of those that look secret by name taken out."""
    return {k: "(hidden)" if _SECRET.search(k) else v for k, v in variables.items()}


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB"
    except (OSError, ValueError):
        return ""


def _tracing() -> str:
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip()
    except OSError:
        return "not restricted by yama"
    meaning = {"0": "allowed", "1": "children only", "2": "administrators only", "3": "never"}
    return f"ptrace_scope {scope}: {meaning.get(scope, 'unknown')}"


def _code(directory: Path) -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return f"{directory}, not under git"
    return f"{directory}, commit {commit}{', with changes that are not committed' if changed else ''}"
