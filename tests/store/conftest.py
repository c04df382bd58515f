"""Fixtures for small runs with reproducible numbers, killed writers and mounted file systems."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from backlight.records import ParameterRecord
from backlight.store.write.writer import RunWriter

PREAMBLE = """
import sys, time
import numpy as np
from pathlib import Path
from backlight.records import ParameterRecord
from backlight.store.write.writer import RunWriter
path = Path(sys.argv[1])
SIZES = [(f"layer{i}.weight", (i + 1, 2)) for i in range(4)]
TABLE = tuple(ParameterRecord(name, shape, "float32", "cpu", 2 * shape[0]) for name, shape in SIZES)
INTS = np.array([[1, p.numel, 0, 0, 0] for p in TABLE])
def floats_at(step):
    return (np.arange(12.0).reshape(4, 3) + 1) * np.sqrt(step + 2.0)
def record(writer, steps, start=0):
    table = writer.parameter_table(TABLE)
    for step in range(start, start + steps):
        writer.append("gradient", step, table, floats_at(step), INTS)
        writer.scalar(step, "loss", 1.0 / (step + 1))
def ready():
    print("ready", flush=True)
    time.sleep(600)
"""


def table_of(names: list[str] | int) -> tuple[ParameterRecord, ...]:
    names_of = [f"layer{i}.weight" for i in range(names)] if isinstance(names, int) else names
    return tuple(
        ParameterRecord(n, (i + 1, 2), "float32", "cpu", 2 * (i + 1)) for i, n in enumerate(names_of)
    )


def floats_at(step: int, P: int = 4) -> npt.NDArray[np.float64]:
    return (np.arange(3.0 * P).reshape(P, 3) + 1) * np.sqrt(step + 2.0)


def ints_of(table: tuple[ParameterRecord, ...]) -> npt.NDArray[np.int64]:
    return np.array([[1, p.numel, 0, 0, 0] for p in table], dtype=np.int64).reshape(-1, 5)


@pytest.fixture
def numbers() -> Callable[..., npt.NDArray[np.float64]]:
    return floats_at


@pytest.fixture
def record() -> Callable[..., tuple[ParameterRecord, ...]]:
    """Record ``steps`` steps of gradients and a loss that are functions of the step.

    Given a path instead of a writer, write a finished run.
    """

    def fill(
        to: RunWriter | Path, steps: int, *, start: int = 0, names: list[str] | int = 4
    ) -> tuple[ParameterRecord, ...]:
        writer = RunWriter.create(to, resume=True) if isinstance(to, Path) else to
        table = table_of(names)
        identifier = writer.parameter_table(table)
        for step in range(start, start + steps):
            writer.append("gradient", step, identifier, floats_at(step, len(table)), ints_of(table))
            writer.scalar(step, "loss", 1.0 / (step + 1))
        if isinstance(to, Path):
            writer.close()
        return table

    return fill


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that runs ``body`` with the preamble above; return it once it prints "ready"."""
    started: list[subprocess.Popen[str]] = []

    def start(path: Path, body: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        code = PREAMBLE + textwrap.dedent(body)
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def killed(start_process: Callable[..., subprocess.Popen[str]]) -> Callable[..., Path]:
    """Run ``body`` in another process, and kill it with SIGKILL where it calls ``ready()``."""

    def kill(path: Path, body: str) -> Path:
        process = start_process(path, body)
        process.kill()
        process.wait()
        return path

    return kill


def digest_of(path: Path) -> dict[str, str]:
    return {
        p.relative_to(path).as_posix(): hashlib.blake2b(p.read_bytes()).hexdigest() if p.is_file() else ""
        for p in sorted(path.rglob("*"))
    }


@pytest.fixture
def digest() -> Callable[[Path], dict[str, str]]:
    """Return a hash of every file below a directory."""
    return digest_of


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount a small tmpfs, or skip without the permission."""
    mounts: list[Path] = []

    def mount(options: str) -> Path:
        target = tmp_path / f"mounted-{len(mounts)}"
        target.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(target)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            pytest.skip(f"there is no mount command: {error}")
        if done.returncode:
            pytest.skip(f"this process may not mount a file system: {done.stderr.strip()}")
        mounts.append(target)
        return target

    yield mount
    for target in mounts:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


@pytest.fixture
def read_only(mounted: Callable[..., Path]) -> Callable[[Path], Path]:
    """Copy a directory to a file system that is then remounted read-only, for root as well."""

    def make(path: Path) -> Path:
        target = mounted("size=64m")
        shutil.copytree(path, target / path.name)
        subprocess.run(["mount", "-o", "remount,ro", str(target)], check=True)
        return target / path.name

    return make
