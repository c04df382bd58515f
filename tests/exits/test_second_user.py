"""Users without root rights: one records a run, which another one can neither read nor change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

OWNER, OTHER = 64_001, 64_002
"""Numbers of two users; they need no names."""

SCRIPT = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("trained")
"""

Command = Callable[..., subprocess.CompletedProcess[str]]


def unreachable(path: Path) -> Path | None:
    """Return the first directory above ``path`` that only its owner may enter."""
    above = [one for one in reversed(path.parents) if not one.stat().st_mode & 0o001]
    return above[0] if above else None


def opening(folder: Path) -> list[str]:
    """Return commands that make interpreter and package reachable for all, in a mount namespace."""
    lines = []
    needed = {
        Path(sys.base_prefix).resolve(),
        Path(sys.prefix).resolve(),
        Path(__file__).resolve().parents[2],
    }
    closed = {path: closed for path in sorted(needed) if (closed := unreachable(path)) is not None}
    for number, path in enumerate(closed):
        lines += [f"mkdir {folder}/{number}", f"mount --bind {path} {folder}/{number}"]
    lines += [f"mount -t tmpfs -o mode=755 tmpfs {above}" for above in sorted(set(closed.values()))]
    for number, path in enumerate(closed):
        lines += [f"mkdir -p {path}", f"mount --bind {folder}/{number} {path}"]
    return lines


@pytest.fixture(scope="module")
def command() -> Iterator[tuple[Path, Command]]:
    """Yield a directory that all users can enter, and what runs the console script as one of them."""
    probe = ["unshare", "-m", "true"]
    is_possible = not os.geteuid() and shutil.which("unshare") is not None
    if not is_possible or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs root, to become other users, and a mount namespace")
    folder = Path(tempfile.mkdtemp(prefix="backlight-users-"))
    folder.chmod(0o755)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "mounts").mkdir()
    for name, user in (("owner", OWNER), ("other", OTHER)):
        (folder / name).mkdir()
        os.chown(folder / name, user, user)
    become = (
        "import os, sys; user = int(sys.argv[1]); os.setgroups([]); os.setgid(user); os.setuid(user); "
        "os.execv(sys.argv[2], sys.argv[2:])"
    )

    def run(user: int, *arguments: object) -> subprocess.CompletedProcess[str]:
        words = [Path(sys.executable).with_name("backlight"), *arguments]
        lines = ["set -e", *opening(folder / "mounts"), 'exec "$@"']
        start = [
            "unshare",
            "-m",
            "bash",
            "-c",
            "\n".join(lines),
            "bash",
            sys.executable,
            "-I",
            "-S",
            "-c",
            become,
        ]
        done = subprocess.run(
            [*start, str(user), *map(str, words)],
            cwd=folder / ("owner" if user == OWNER else "other"), capture_output=True, text=True, check=False,
            timeout=120, env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        for mounted in (folder / "mounts").iterdir():
            mounted.rmdir()
        return done

    yield folder, run
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def private(command: tuple[Path, Command]) -> Path:
    folder, run = command
    done = run(OWNER, "run", "--out", "run", folder / "train.py")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "✓ No findings" in done.stderr
    return folder / "owner" / "run"


def contents(run: Path) -> dict[str, bytes]:
    return {str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "arguments",
    [
        ("findings",),
        ("report", "-o", "page.html"),
        ("compact",),
        ("export", "steps.csv"),
        ("open", "--no-browser"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_another_user_can_neither_read_nor_change_a_run(
    command: tuple[Path, Command], private: Path, arguments: tuple[str, ...]
) -> None:
    _, run = command
    before = contents(private)
    done = run(OTHER, arguments[0], private, *arguments[1:])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "Permission denied" in done.stderr
    assert contents(private) == before


def test_a_list_names_the_run_that_another_user_cannot_read(
    command: tuple[Path, Command], private: Path
) -> None:
    _, run = command
    done = run(OTHER, "ls", private.parent)
    assert done.returncode == 0
    assert f"{private}: Permission denied" in done.stdout.replace("\n", "")


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_a_script_trains_where_its_run_cannot_be_written(
    command: tuple[Path, Command], private: Path, resume: tuple[str, ...]
) -> None:
    folder, run = command
    before = contents(private)
    done = run(
        OTHER, "run", *resume, "--out", private if resume else private.parent / "new", folder / "train.py"
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "this training is not watched" in done.stderr
    assert "Permission denied" in done.stderr
    assert contents(private) == before
