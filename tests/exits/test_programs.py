"""Unusual programs, plain and watched: exit code, output, files and state of the process are the same."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import backlight
from exits.programs import ANY, CONSOLE_SCRIPT, OWN_LINES, Program
from exits.programs.endings import ENDINGS
from exits.programs.interpreter import INTERPRETER
from exits.programs.signals import SIGNALS
from exits.programs.streams import STREAMS
from exits.programs.threads import PROCESSES, THREADS
from exits.programs.torch_features import TORCH

PROGRAMS = {**ENDINGS, **SIGNALS, **THREADS, **PROCESSES, **STREAMS, **INTERPRETER, **TORCH}
MODULE = Path(__file__).parent / "programs" / "training.py"
START = "from training import *\n"

OWN_FRAMES = re.compile(r'^  File "[^"]*/src/backlight/.*\n(?:    .*\n)*', flags=re.MULTILINE)
"""Frames of backlight between those of the script and those of PyTorch, which tracebacks show."""


@dataclass(frozen=True)
class Ended:
    """What a process left; ``files`` are names and contents below its working directory."""

    code: int
    output: str
    errors: str
    files: dict[str, bytes]


def start(program: Program, folder: Path, *command: str | Path) -> subprocess.Popen[str]:
    folder.mkdir()
    shutil.copy(MODULE, folder)
    (folder / "train.py").write_text(START + program.text + "\n")
    (folder / "input").write_text(program.input)
    environment = {**os.environ, **program.environment}
    return subprocess.Popen(
        ["/bin/bash", "-c", f'exec "$@" <input {program.shell}', "-", *command, *program.command],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, encoding="utf-8", errors="surrogateescape",
    )  # fmt: skip


def end(process: subprocess.Popen[str], folder: Path) -> Ended:
    output, errors = (
        re.sub("0x[0-9a-f]+", "0x", text.replace(str(folder), ""))
        for text in process.communicate(timeout=280)
    )
    files = {
        str(path.relative_to(folder)): path.read_bytes().replace(str(folder).encode(), b"")
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    return Ended(process.returncode, output, errors, files)


def differences(plain: str, watched: str) -> list[str]:
    """Return lines of one text alone, shortened to where they differ."""
    lines = [line for line in difflib.ndiff(plain.split("\n"), watched.split("\n")) if line[0] in "+-"]
    return [line if len(line) < 2000 else f"{line[:1000]}...{line[-1000:]}" for line in lines]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if p.usual else [pytest.mark.full]) for n, p in PROGRAMS.items()]
)
def test_program_is_that_of_plain_python(name: str, tmp_path: Path) -> None:
    program, run = PROGRAMS[name], tmp_path / "run"
    folders = tmp_path / "plain", tmp_path / "watched"
    starts = [sys.executable], [CONSOLE_SCRIPT, "run", "--out", str(run)]
    processes = [start(program, folder, *words) for folder, words in zip(folders, starts, strict=True)]
    plain, watched = (end(process, folder) for process, folder in zip(processes, folders, strict=True))
    assert plain.code == program.code, plain.errors
    assert re.search(program.errors or "^$", plain.errors), plain.errors
    assert not differences(plain.output, watched.output)
    errors = OWN_FRAMES.sub("", OWN_LINES.sub("", watched.errors))
    assert not differences(plain.errors, errors)
    assert watched.code == plain.code
    assert watched.files == plain.files
    assert run.exists() == (program.steps is not None)
    if program.steps not in {ANY, None}:
        recorded = backlight.open_run(run)
        assert (len(recorded.attempts), recorded.last_step() + 1) == (1, program.steps)
