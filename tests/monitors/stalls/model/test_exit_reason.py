"""How a training is left by an exception: of the rank's own, or because of another rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backlight.monitors.stalls.model.exit_reason import ExitReason, describe, read


def raised(error: BaseException, file: str = "/home/me/train.py", name: str = "main") -> BaseException:
    """Return the error as if it came through a function of a file."""
    space: dict[str, Any] = {"error": error}
    exec(compile(f"def {name}():\n    raise error\n", file, "exec"), space)
    try:
        space[name]()
    except BaseException as caught:  # noqa: BLE001 - an interrupt as well
        return caught
    raise AssertionError


def exit_reason(error: BaseException, **where: str) -> ExitReason:
    found = read(describe(raised(error, **where)))
    assert found is not None
    return found


def test_an_error_of_its_own_with_its_line() -> None:
    found = exit_reason(ValueError("injected\nhere"))
    assert (found.error, found.line, found.function) == (
        "ValueError: injected here",
        "/home/me/train.py:2",
        "main",
    )
    assert (found.inside, found.asked, found.memory) == ("", False, False)


@pytest.mark.parametrize(
    ("error", "file", "inside"),
    [
        (
            RuntimeError("Connection closed by peer"),
            "/x/torch/distributed/distributed_c10d.py",
            "a collective",
        ),
        (RuntimeError("anything"), "/x/torch/distributed/distributed_c10d.py", "a collective"),
        (ValueError("bad argument"), "/x/torch/distributed/distributed_c10d.py", ""),
        (RuntimeError("[gloo/transport/tcp/pair.cc:1] Read error"), "/home/me/train.py", "a collective"),
        (RuntimeError("sizes do not match"), "/home/me/train.py", ""),
        (RuntimeError("Expected to have finished reduction"), "/x/torch/nn/parallel/distributed.py", ""),
    ],
)
def test_what_another_rank_is_at_fault_for(error: BaseException, file: str, inside: str) -> None:
    assert exit_reason(error, file=file).inside == inside


def test_in_backward() -> None:
    error = RuntimeError("Connection reset by peer")
    assert (
        exit_reason(error, file="/x/torch/autograd/graph.py", name="_engine_run_backward").inside
        == "backward"
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA out of memory"),
    ],
)
def test_no_memory_left(error: BaseException) -> None:
    assert exit_reason(error).memory


def test_an_interrupt_is_asked_for() -> None:
    assert exit_reason(KeyboardInterrupt()).asked


def test_what_is_no_document_says_nothing(tmp_path: Path) -> None:
    assert read(None) is None
    assert read({"nothing": 1}) is None
    assert read(vars(SimpleNamespace(error="E", at=1.0))) == ExitReason("E", 1.0)
