"""Privacy of a run: its directory belongs to its owner, and no file of it holds a secret of the script."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mcp
import pytest

from backlight.analysis.mcp_server import build_server
from fake_secrets import catalogue
from processes import run_captured

pytestmark = pytest.mark.slow

TRAIN = """
import sys, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if "--fail" in sys.argv:
    raise ValueError("bad token=sesame-four")
"""


def backlight(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_captured([sys.executable, "-m", "backlight", *map(str, arguments)], cwd=cwd)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("privacy")
    (folder / "train.py").write_text(TRAIN)
    arguments = ["--api-key=sesame-one", "--hub-token", "sesame-two", "--door", "sesame-three", "--lr", "0.5"]
    done = backlight("run", "--out", "r", "--set", "redact=door", "train.py", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "sesame" not in done.stderr
    return folder


def test_no_file_of_a_run_holds_a_secret(folder: Path) -> None:
    for kind, file in (("html", "page.html"), ("md", "page.md")):
        assert backlight("report", "r", "--format", kind, "--out", file, cwd=folder).returncode == 0
        text = (folder / file).read_text()
        assert "sesame" not in text
        assert "--hub-token" in text
        assert "redacted" in text
    assert backlight("report", "r", "--bundle", "all.zip", cwd=folder).returncode == 0
    unpacked = subprocess.run(["unzip", "-p", "all.zip"], cwd=folder, capture_output=True, check=False)
    content = b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "train.py")
    for data in (content, unpacked.stdout):
        assert b"sesame" not in data
        assert b"0.5" in data


def test_no_secret_of_the_catalogue_can_be_read_anywhere(folder: Path, tmp_path: Path) -> None:
    fakes = catalogue()
    arguments = [argument for fake in fakes for argument in fake.arguments]
    text = TRAIN + "\nraise ValueError(f'HTTP 401: {sys.argv[-6:]}')\n"
    (tmp_path / "train.py").write_text(text)
    runs = tmp_path / "runs"
    done = backlight("run", "--out", "runs/s", "train.py", *arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "HTTP 401" in done.stderr
    for made in ("page.html", "page.md"):
        kind = made.rpartition(".")[2]
        assert (
            backlight("report", "runs/s", "--format", kind, "-o", f"runs/{made}", cwd=tmp_path).returncode
            == 0
        )
    assert backlight("report", "runs/s", "--bundle", "all.zip", cwd=tmp_path).returncode == 0
    subprocess.run(["unzip", "-q", "all.zip", "-d", runs], cwd=tmp_path, check=True)
    done = backlight("export", "runs/s", "--tracker", "tensorboard=runs/tb", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = [p.read_bytes() for p in runs.rglob("*") if p.is_file()]
    for tool, given in (("list_runs", {}), ("run_summary", {"run": "s"}), ("findings", {"run": "s"})):
        answer = asyncio.run(answered(runs, tool, given))
        shown.append(answer.encode())
    content = b"\n".join(shown)
    assert b"HTTP 401" in content
    assert content.count(b"<redacted>") > len(fakes)
    assert [fake for fake in fakes if fake.secret.encode() in content] == []


async def answered(runs: Path, tool: str, arguments: dict[str, Any]) -> str:
    async with mcp.Client(build_server(runs)) as client:
        return str(await client.call_tool(tool, arguments))


def test_run_directory_is_for_its_owner_unless_shared(folder: Path) -> None:
    assert (folder / "r").stat().st_mode & 0o777 == 0o700
    done = backlight("run", "--set", "share=true", "--out", "below/shared", "train.py", "--fail", cwd=folder)
    assert done.returncode == 1
    before = os.umask(0)
    os.umask(before)
    for path in (folder / "below", folder / "below" / "shared"):
        assert path.stat().st_mode & 0o777 == 0o777 & ~before
    assert b"sesame" not in (folder / "below/shared/attempt-000/rank-00000.db").read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")
def test_another_user_cannot_read_a_run(folder: Path) -> None:
    code = "import os, sys; os.setgid(65534); os.setuid(65534); os.listdir(sys.argv[1])"
    done = run_captured([sys.executable, "-c", code, str(folder / "r")])
    assert "PermissionError" in done.stderr


def test_refused_pattern(folder: Path) -> None:
    done = backlight("run", "--set", "redact=(", "train.py", cwd=folder)
    assert done.returncode == 2
    assert "--set redact: '(' is no regular expression" in done.stderr
