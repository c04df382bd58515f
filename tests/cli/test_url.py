"""Commands that read a run take its URL as well; those that change one refuse it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

fsspec: Any = pytest.importorskip("fsspec")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def url(run_with_nan: Path) -> str:
    """Put the run into the memory of fsspec, which all tests share, and return its URL."""
    files = fsspec.filesystem("memory")
    if files.exists("/bucket/runs"):
        files.rm("/bucket/runs", recursive=True)
    files.put(str(run_with_nan), "/bucket/runs/first", recursive=True)
    return "memory://bucket/runs/first"


def test_a_url_is_answered_as_the_directory(url: str, run_with_nan: Path, command: Command) -> None:
    queries = [("findings", "--json")]
    if importlib.util.find_spec("duckdb") is not None:
        queries.append(("query", "select step, norm from gradient", "--csv"))
    for name, *rest in queries:
        here, there = command(name, run_with_nan, *rest), command(name, url, *rest)
        assert here[:2] == there[:2]
        assert here[1]


def test_report_export_and_compare_take_a_url(
    url: str, run_with_nan: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("report", url)[0] == 0
    assert "non_finite" in (tmp_path / "report.html").read_text()
    assert command("export", url, tmp_path / "out.csv")[0] == 0
    assert "last.weight" in (tmp_path / "out.csv").read_text()
    code, out, _ = command("compare", run_with_nan, url, "--json")
    assert code == 0
    assert url in out


def test_ls_copies_only_what_a_list_needs(
    url: str, run_with_nan: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory: Any = fsspec.get_filesystem_class("memory")
    files = fsspec.filesystem("memory")
    files.pipe("/bucket/runs/first/attempt-000/arrays/rank-00000-000000.h5", b"large")
    copied, get = [], memory.get_file
    monkeypatch.setattr(memory, "get_file", lambda self, *a, **b: copied.append(a[0]) or get(self, *a, **b))
    code, out, _ = command("ls", url.removesuffix("/first"), "--json")
    (listed,) = json.loads(out)
    assert (code, Path(listed["path"]).name, listed["steps"]) == (0, "first", 5)
    assert {Path(name).suffix for name in copied} == {".json", ".db"}


def test_what_changes_a_run_refuses_a_url(url: str, refused: Callable[..., str]) -> None:
    assert f"{url}: only a run on this machine can be changed" in refused("compact", url)
    assert f"{url}: only a run on this machine can be changed" in refused("join", "runs/first", url)


def test_errors_name_the_url(url: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").pipe("/bucket/runs/bad/manifest.json", b"{")
    assert "memory://bucket/runs/bad/manifest.json: is not valid JSON" in refused(
        "findings", "memory://bucket/runs/bad"
    )
    assert "nosuch://x: cannot be read: ValueError: Protocol not known" in refused("report", "nosuch://x")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    line = refused("findings", "http://127.0.0.1:9/run")
    assert "http://127.0.0.1:9/run: cannot be read: ImportError: HTTPFileSystem requires" in line
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert "needs fsspec, which is not installed: pip install 'backlight[remote]'" in refused("findings", url)
