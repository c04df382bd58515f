"""Steps between two recorded ones: what they cost, and that nothing is lost by counting them only."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import backlight
from backlight.capture.hub import EVALUATION_STEPS, HUB
from backlight.capture.unrecorded import FORWARDS, STEPS

pytestmark = pytest.mark.slow

MAX_CALLS = 9
"""Python functions of backlight in an unrecorded step: around the forward, the backward and the update, and
those that take loss and learning rates and end the step."""

MAX_CALLS_RECORDED = 400
"""Python functions of backlight that run on the training thread in a recorded step of four parameters."""

OWN = str(Path(backlight.__file__).parent)


@pytest.fixture(autouse=True)
def _no_garbage_is_collected() -> Iterator[None]:
    """Keep collections out of what is counted: a pause is a call at its end, and an event of its step."""
    gc.disable()
    yield
    gc.enable()


class Training:
    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x, self.y = torch.randn(5, 4), torch.randint(0, 3, (5,))

    def step(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()


def counted(watch: backlight.Watch, training: Training, most: int = 200) -> None:
    """Train until steps are counted only."""
    for _ in range(most):
        training.step()
        if HUB.unrecorded is not None and HUB.unrecorded.steps > 16:
            return
    raise AssertionError("no step was counted")


def calls_of(function: Callable[[], object]) -> list[str]:
    """Return the functions of backlight that run in ``function``."""
    found = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def test_unrecorded_step_runs_few_functions(tmp_path: Path) -> None:
    training = Training()
    with backlight.watch(training.model, training.optimizer, run=tmp_path / "run", every=100) as watch:
        counted(watch, training)
        calls = calls_of(training.step)
        forward = calls_of(lambda: training.model(training.x))
    assert 0 < len(calls) <= MAX_CALLS, calls
    assert len(forward) == 1, forward


def test_recorded_step_runs_a_bounded_number_of_functions(tmp_path: Path) -> None:
    training = Training()
    with backlight.watch(training.model, training.optimizer, run=tmp_path / "run", every=1):
        for _ in range(60):  # the first steps are compared with each other, and so are a few later ones
            training.step()
        calls = [len(calls_of(training.step)) for _ in range(8)]  # updates are measured in every fourth
    assert sum(calls) / len(calls) <= MAX_CALLS_RECORDED, calls


def test_counted_steps_have_numbers_and_backwards(tmp_path: Path) -> None:
    one = Training()
    with backlight.watch(one.model, one.optimizer, run=tmp_path / "counted", every=10) as watch:
        seen = []
        for _ in range(205):
            one.step()
            seen.append(HUB.unrecorded is not None)
            assert watch.step == len(seen)
    other = Training()
    with backlight.watch(other.model, other.optimizer, run=tmp_path / "all", every=1):
        for _ in range(205):
            other.step()
    assert sum(seen) > 100
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    few, every = (backlight.open_run(tmp_path / name) for name in ("counted", "all"))
    steps = list(few.series_steps("gradient"))
    assert {*range(0, 205, 10)} <= {int(step) for step in steps}
    assert few.last_step() in {200, 204}
    for name in ("loss", "backwards_seen", "backwards"):
        kept = few.scalar(name)
        whole = dict(zip(every.scalar(name).steps, every.scalar(name).values, strict=True))
        assert len(kept.steps) >= 20
        assert all(whole[step] == value for step, value in zip(kept.steps, kept.values, strict=True))
    phases = few.scalar("phase/backward")
    assert (phases.values > 0).all()


def with_closure(training: Training) -> None:
    def closure() -> torch.Tensor:
        loss = cross_entropy(training.model(training.x), training.y)
        loss.backward()
        return loss

    training.optimizer.step(closure)


def with_scaler(training: Training) -> None:
    torch.amp.GradScaler("cpu").scale(cross_entropy(training.model(training.x), training.y)).backward()


def with_second_optimizer(training: Training) -> None:
    torch.optim.SGD(training.model.parameters(), lr=0.1)


def with_loaded_state(training: Training) -> None:
    training.model.load_state_dict(training.model.state_dict())


def with_epoch(training: Training) -> None:
    next(iter(DataLoader(TensorDataset(training.x))))


@pytest.mark.parametrize(
    "event", [with_closure, with_scaler, with_second_optimizer, with_loaded_state, with_epoch]
)
def test_what_is_no_plain_step_is_reported(event: Callable[[Training], None], tmp_path: Path) -> None:
    training = Training()
    with backlight.watch(training.model, training.optimizer, run=tmp_path / "run", every=100) as watch:
        counted(watch, training)
        event(training)
        assert HUB.unrecorded is None
        training.step()
    assert HUB.unrecorded is None
    assert not backlight.open_run(tmp_path / "run").events("unmeasured")


def test_evaluation_is_reported_but_not_in_every_step(tmp_path: Path) -> None:
    training = Training()
    ended = 0
    with backlight.watch(training.model, training.optimizer, run=tmp_path / "run", every=1000) as watch:
        counted(watch, training)
        for _ in range(2 * EVALUATION_STEPS + 20):
            training.step()
            was_counting = HUB.unrecorded is not None
            with torch.no_grad():
                training.model(training.x)
            ended += was_counting and HUB.unrecorded is None
    assert 1 <= ended <= 3


def test_recording_in_detail_ends_the_count_after_the_step(tmp_path: Path) -> None:
    training = Training()
    with backlight.watch(training.model, training.optimizer, run=tmp_path / "run", every=1000) as watch:
        counted(watch, training)
        step = watch.step
        watch._attached.alarm(step, "spike")
        training.step()
        assert HUB.unrecorded is None
        training.step()
    assert step + 1 in set(backlight.open_run(tmp_path / "run").series_steps("gradient"))


def test_board_is_that_of_the_watchdog(tmp_path: Path) -> None:
    training = Training()
    with backlight.watch(training.model, training.optimizer, run=tmp_path / "run", every=1000) as watch:
        counted(watch, training)
        before = HUB.board[STEPS], HUB.board[FORWARDS]
        assert type(HUB.board) is memoryview
        assert before[0] == watch.step
        training.step()
        assert (HUB.board[STEPS], HUB.board[FORWARDS]) == (before[0] + 1, before[1] + 1)


def test_optimizers_that_are_made_one_by_one_in_the_first_step(tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizers: list[torch.optim.Optimizer] = []
    with backlight.watch(run=tmp_path / "run", every=1) as watch:
        for step in range(4):
            sum(p.square().sum() for p in parameters).backward()
            for number, parameter in enumerate(parameters):
                if not step:
                    optimizers.append(torch.optim.SGD([parameter], lr=0.1))
                optimizers[number].step()
                optimizers[number].zero_grad()
        assert watch.step == 4
    assert backlight.open_run(tmp_path / "run").last_step() == 3


HANGING = """
import pathlib, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def is_located():
    # With too few samples, on a busy machine, an inconclusive report comes first.
    found = pathlib.Path("run").rglob("watchdog-*.db*")
    return any(b"Waiting.backward" in path.read_bytes() for path in found)
class Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x
    @staticmethod
    def backward(ctx, gradient):
        end = time.monotonic() + 60
        while step == 60 and time.monotonic() < end and not is_located():
            time.sleep(0.1)
        return gradient
for step in range(64):
    Waiting.apply(model(torch.ones(8, 4))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_hang_in_a_counted_step_is_located(
    tmp_path: Path, console_script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "train.py").write_text(HANGING)
    done = console_script(tmp_path, "run", "--out", "run", "--every", "1000", "--stall", "1", "train.py")
    assert done.returncode == 0, done.stderr
    stalls = backlight.open_run(tmp_path / "run").events("stall")
    assert {event.step for event in stalls} == {60}
    assert "Waiting.backward" in done.stderr


def small(training: Training) -> None:
    training.x.mul_(1.0)


def not_a_number(training: Training) -> None:
    training.x[0, 0] = float("nan")


def large(training: Training) -> None:
    training.x.mul_(1e4)


@pytest.mark.parametrize("batch", [small, not_a_number, large])
def test_bad_batch_in_an_unrecorded_step_is_followed_by_detail_at_once(
    batch: Callable[[Training], None], tmp_path: Path
) -> None:
    """Whatever the writer thread does meanwhile, which raises the alarm: it may run after all steps."""
    training = Training()
    settings: dict[str, Any] = {"every": 50, "detail": 5, "flush_interval": 600.0, "monitors": ("health",)}
    with backlight.watch(training.model, training.optimizer, run=tmp_path / "run", **settings):
        for step in range(120):
            if step == 77:
                whole = training.x.clone()
                batch(training)
            training.step()
            if step == 77:
                training.x.copy_(whole)
    run = backlight.open_run(tmp_path / "run")
    recorded = [int(step) for step in run.series_steps("gradient")]
    causes = {(event.step, event.payload["cause"]) for event in run.events("detail")}
    if batch is small:
        assert recorded == [0, 50, 100, 119]
        assert not causes
        return
    assert [*range(78, 83)] == [step for step in recorded if 50 < step < 83]
    assert min(causes) == (77, "non_finite" if batch is not_a_number else "spike")
    assert {*range(78, 83)} <= {int(step) for step in run.series_steps("histogram")}


def test_losses_that_leap_all_the_time_are_followed_by_detail_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, details = Training(), list[int]()
    with backlight.watch(training.model, training.optimizer, run=tmp_path / "run", detail=2) as watch:
        monkeypatch.setattr(watch._attached.sampling, "detail", lambda step, _: details.append(step))
        for step in range(100):
            watch._attached._attend(step)
    assert details == [0, 3, 8, 17, 34, 67]
