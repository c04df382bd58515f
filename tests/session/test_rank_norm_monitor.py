"""Warnings when the norm over all ranks can no longer be joined."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from backlight.monitor import StoredStep
from backlight.session.rank_norm_monitor import RankNormMonitor
from backlight.session.settings import Settings


@pytest.mark.parametrize(
    ("up", "words"), [(False, "the process group was destroyed before step 4 was joined"), (True, "injected")]
)
def test_destroyed_group_is_reported(monkeypatch: pytest.MonkeyPatch, up: bool, words: str) -> None:
    messages: list[str] = []
    notifier: Any = SimpleNamespace(trouble=lambda error, what: messages.append(f"{what}: {error}"))
    reducing = RankNormMonitor.from_settings(Settings.of({"reduce": True, "every": 2}))
    assert reducing is not None
    reducing.attach(SimpleNamespace(notifier=notifier))

    def gather(*args: object, **more: object) -> None:
        raise ValueError("injected")

    monkeypatch.setattr(dist, "gather_object", gather)
    monkeypatch.setattr(dist, "is_initialized", lambda: up)
    reducing._size, reducing._rank, reducing._group = 2, 0, object()
    blobs = {("gradient", 0): (np.zeros((1, 8)), np.zeros((1, 8)))}
    reducing.on_step_stored(StoredStep(3, (), {"backwards_seen": 1.0}, blobs))  # no rank joins an odd step
    reducing.on_step_stored(StoredStep(4, (), {"backwards_seen": 1.0}, blobs))
    reducing._work()
    (message,) = messages
    assert message.startswith("the norm over all ranks while the training runs: ")
    assert words in message
