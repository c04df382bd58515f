"""What is found in a training loop does not depend on habits that have nothing to do with its error."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import clear_compilation_metrics, counters

from backlight.capture.loss_graph import SHOWS_HOOKS
from faults.silent import habits
from faults.silent_runs import HabitRun, expected_faults, habit_runs

TENTH = habit_runs(strength=2, share=0.1)
RUNS = [pytest.param(run, marks=[pytest.mark.full] if index % 4 else []) for index, run in enumerate(TENTH)]


@pytest.fixture(scope="module", autouse=True)
def frozen_objects() -> Iterator[None]:
    """A watch that begins visits every object of the process: those of other tests are left out."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch._dynamo.reset()  # what was compiled here does not count in other tests
    counters.clear()
    clear_compilation_metrics()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("one", RUNS, ids=lambda one: f"{one.name}-{one.kind}-{one.habits}")
def test_findings_do_not_depend_on_habits(one: HabitRun) -> None:
    is_uneven = one.kind == "error" and expected_faults()[one.name].expected["rule"] == "uneven_microbatches"
    if is_uneven and not SHOWS_HOOKS:
        pytest.skip("this torch does not show the hooks of saved tensors, so none of a loss is read")
    assert not one.problem()


def test_every_pair_of_habits_occurs() -> None:
    rows = habits.covering(2)
    for first, values in habits.VALUES.items():
        for second, others in habits.VALUES.items():
            seen = {(getattr(row, first), getattr(row, second)) for row in rows}
            assert first == second or seen == {(a, b) for a in values for b in others}
