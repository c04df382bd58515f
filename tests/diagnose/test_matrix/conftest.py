"""Scripts without torch that end, hang, spin, crawl or fail on request."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import sys, threading, time

def wait():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def spin():
    while True: pass  # on one line, so that every sample shows the same

def crawl():
    for step in range(10**6):
        print(f"step {step}/1000", flush=True)
        time.sleep(0.02)

def fail():
    raise ValueError("injected")

mode = sys.argv[1] if len(sys.argv) > 1 else "end"
print("mode:", mode, flush=True)
{"end": lambda: None, "wait": wait, "spin": spin, "crawl": crawl, "fail": fail}[mode]()
print("finished")
"""

Writer = Callable[..., Path]


@pytest.fixture(scope="session")
def script() -> str:
    return SCRIPT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plan(folder: Path) -> Writer:
    """Write ``plan.toml``: the text goes behind a base that runs ``job.py`` unwatched."""

    def write(
        text: str, *, base: str = 'command = ["job.py"]\nwatch = false', top: str = "time_limit = 30"
    ) -> Path:
        path = folder / "plan.toml"
        path.write_text(f"{top}\n[base]\n{textwrap.dedent(base)}\n{textwrap.dedent(text)}")
        return path

    return write
