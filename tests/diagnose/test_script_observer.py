"""Recorders of every operation are paused in forked children, and continue in the parent."""

from __future__ import annotations

import os

import pytest
import torch

from backlight.capture.calls import ModuleCalls
from backlight.diagnose.missing_gradients.tape import Tape
from backlight.diagnose.nan.value_tracker import ValueTracker


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("kind", [Tape, ValueTracker])
def test_forked_child_is_not_recorded(kind: type[Tape] | type[ValueTracker]) -> None:
    recorder = kind(ModuleCalls(), fail)

    def count() -> int:
        return recorder.operations if isinstance(recorder, ValueTracker) else len(recorder.operations)

    with recorder:
        torch.ones(2).add(1)
        before = count()
        child = os.fork()
        if not child:
            torch.ones(2).add(1)
            os._exit(int(count() != before))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        torch.ones(2).add(1)
        assert count() > before > 0
