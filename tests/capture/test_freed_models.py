"""A model that is freed is reported while its parameters exist, in the thread that trains."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from backlight.capture.hub import HUB, Listener
from backlight.capture.left_gradients import STEPS_EACH, FreedModels
from backlight.capture.parameters import Scope


class Freed(Listener):
    """Keeps the parameters that exist as a model is freed; raises ``error`` where one is given."""

    def __init__(self) -> None:
        self.scope = Scope()
        self.models = FreedModels(self.scope)
        self.parameters: list[int] = []
        self.error: BaseException | None = None

    def model_freed(self) -> None:
        self.parameters.append(len(self.scope.table.tensors()))
        if self.error is not None:
            raise self.error


@pytest.fixture
def freed() -> Iterator[Freed]:
    listener = Freed()
    HUB.add(listener)
    yield listener
    listener.models.forget()
    HUB.remove(listener)


def trained(freed: Freed) -> list[nn.Module]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    freed.scope.refresh()
    return [model]


def test_parameters_exist_as_a_model_is_freed(freed: Freed) -> None:
    holder = trained(freed)
    assert freed.parameters == []
    holder.clear()
    assert freed.parameters == [4]


def test_nothing_is_reported_in_another_thread_or_after_the_end(freed: Freed) -> None:
    holder = trained(freed)
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    holder = trained(freed)
    freed.models.forget()
    holder.clear()
    assert freed.parameters == []


def wait_for_interrupt() -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.001)


def test_interrupt_meanwhile_reaches_the_script(freed: Freed) -> None:
    holder, freed.error = trained(freed), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught:
        holder.clear()
        wait_for_interrupt()
    assert caught.value is freed.error
    assert freed.parameters == [4]


def test_exception_of_a_signal_handler_meanwhile_reaches_the_script(
    freed: Freed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_alarm(number: int, frame: object) -> None:
        raise TimeoutError("too slow")

    holder = trained(freed)
    monkeypatch.setattr(Freed, "model_freed", lambda self: signal.raise_signal(signal.SIGALRM))
    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with pytest.raises(TimeoutError, match="too slow"):
            holder.clear()
            wait_for_interrupt()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert HUB.listeners == (freed,)


def test_interrupt_is_not_lost_in_a_callback_of_another_library(freed: Freed) -> None:
    def slow(_: object) -> None:
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            pass

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    # Python calls the callbacks of an object with the latest one first.
    other = weakref.ref(model, slow)
    freed.scope.refresh()
    holder, freed.error = [model], KeyboardInterrupt()
    del model
    with pytest.raises(KeyboardInterrupt) as caught:
        holder.clear()
        wait_for_interrupt()
    assert caught.value is freed.error
    assert other() is None


def test_one_model_in_so_many_steps() -> None:
    models = FreedModels(Scope())
    due = [models.is_due(step) for step in range(3 * STEPS_EACH)]
    assert [step for step, is_due in enumerate(due) if is_due] == [0, STEPS_EACH, 2 * STEPS_EACH]
