"""Checkpoints of an experiment: plain values and tensors, loaded with ``weights_only``: no code is executed.

A file is complete before it gets its name, so a kill leaves the previous checkpoint intact.
"""

from __future__ import annotations

import io
import pickle
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from backlight import atomic_files, devices

if TYPE_CHECKING:
    from backlight.experiments.task import Task

DIRECTORY = "checkpoints"
_NAME = re.compile(r"step-(\d{9})\.pt")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or belongs to another experiment."""


def save(directory: Path, step: int, state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write the state before ``step``, and remove all but the newest ``keep`` checkpoints."""
    directory.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(_plain(state), buffer)
    path = directory / f"step-{step:09d}.pt"
    atomic_files.write(path, buffer.getvalue())
    for old in _saved(directory)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def newest(directory: Path) -> tuple[int, dict[str, Any]] | None:
    """Return step and state of the newest readable checkpoint; None if there is no checkpoint."""
    problems = []
    for path in reversed(_saved(directory)):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, ValueError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:
            problems.append(f"{path}: {' '.join(str(error).split())[:200]}")
        else:
            return int(path.stem.removeprefix("step-")), state
    if problems:
        raise CheckpointError(
            f"no checkpoint can be read: {'; '.join(problems)}; start again with another --out"
        )
    return None


def training_state(task: Task) -> dict[str, Any]:
    """Return all that training changes: model, optimizer, scheduler, what the task adds, random states."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "model": dict(task.model.state_dict()),
        "optimizer": task.optimizer.state_dict(),
        "scheduler": None if task.scheduler is None else task.scheduler.state_dict(),
        "extra": dict(task.extra_state()),
        "random": {
            "torch": torch.get_rng_state(),
            "cuda": devices.accelerator_random_states(),
            "python": random.getstate(),
            "numpy": (name, np.asarray(keys).tolist(), position, has_gauss, cached),
        },
    }


def restore(task: Task, state: Mapping[str, Any]) -> None:
    """Load what :func:`training_state` returned."""
    try:
        task.load_extra_state(state["extra"])
        task.model.load_state_dict(state["model"])
        task.optimizer.load_state_dict(state["optimizer"])
        if task.scheduler is not None:
            task.scheduler.load_state_dict(state["scheduler"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint does not fit this experiment: {error}") from error
    saved = state["random"]
    torch.set_rng_state(saved["torch"])
    devices.set_accelerator_random_states(saved["cuda"])
    random.setstate(saved["python"])
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def _saved(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if _NAME.fullmatch(p.name)) if directory.is_dir() else []


def _plain(value: Any) -> Any:
    """Return ``value`` with tensors on the CPU; refuse what ``weights_only`` would not load again."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        # A view would be saved with the whole storage behind it.
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
    if isinstance(value, Mapping):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a checkpoint holds tensors and plain values, got {type(value).__name__}")
