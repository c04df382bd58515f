"""A function in a forked process: its answer, its failures, and that the script has no child by it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from backlight.capture.forked_child import ChildError, ForkedChild, in_child

pytestmark = pytest.mark.slow


def test_answer_is_what_json_carries() -> None:
    held = [1, 2]
    assert in_child(lambda: {"sum": sum(held), "text": "x" * 200_000}, 60.0) == {
        "sum": 3,
        "text": "x" * 200_000,
    }


def test_failure_is_raised_with_its_reason() -> None:
    def fail() -> None:
        raise KeyError("name")

    with pytest.raises(ChildError, match="failed: KeyError: 'name'"):
        in_child(fail, 60.0)
    with pytest.raises(ChildError, match="ended early"):
        in_child(lambda: os._exit(3), 60.0)


def test_script_has_no_child_while_it_computes() -> None:
    inlet, outlet = os.pipe()
    child = ForkedChild(lambda: len(os.read(inlet, 1)))  # until the parent writes
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert child.answer(60.0, wait=False) is None
    os.write(outlet, b"x")
    assert child.answer(60.0) == 1
    os.close(inlet)
    os.close(outlet)


def test_child_that_takes_too_long_is_ended() -> None:
    inlet, outlet = os.pipe()

    def report_and_wait() -> None:
        os.write(outlet, f"{os.getpid()}\n".encode())
        time.sleep(600)

    child = ForkedChild(report_and_wait)
    pid = int(os.read(inlet, 20))
    os.kill(pid, 0)
    with pytest.raises(ChildError, match="took longer than"):
        child.answer(child.age_s)
    with suppress(ProcessLookupError, FileNotFoundError):  # once its new parent has reaped it
        while "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            time.sleep(0.05)
    os.close(inlet)
    os.close(outlet)
