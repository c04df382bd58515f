"""Checkpoints of a training as plain numbers and JSON: nothing is pickled, opening one executes nothing.

A checkpoint is one ``.npz`` file: the tensors, and a skeleton that says where each stands in the nested
state. It is complete before it has its name, so that a kill leaves the one before.
"""

from __future__ import annotations

import io
import json
import random
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from backlight.store.platform import atomic_json

if TYPE_CHECKING:
    from backlight.experiments.experiment import Task

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{9})\.npz")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not belong to this training."""


def save(folder: Path, step: int, state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write the state before ``step``, and remove all but the newest ``keep``; an OSError passes through."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    skeleton = json.dumps(_taken_apart(state, arrays))
    buffer = io.BytesIO()
    np.savez(buffer, skeleton=np.frombuffer(skeleton.encode(), dtype=np.uint8), **arrays)  # type: ignore[arg-type]  # arrays by name
    path = folder / f"step-{step:09d}.npz"
    atomic_json.write_atomically(path, buffer.getvalue())
    for old in _found(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def newest(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """Return step and state of the newest checkpoint that can be read; None where there is none.

    Raises
    ------
    CheckpointError
        If there are checkpoints, and none can be read.
    """
    problems = []
    for path in reversed(_found(folder)):
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                skeleton = json.loads(bytes(file["skeleton"]))
                state = _put_together(skeleton, file)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            problems.append(f"{path}: {error}")
            continue
        match = _NAME.fullmatch(path.name)
        return int(match[1]) if match else 0, state
    if problems:
        raise CheckpointError(
            f"no checkpoint can be read: {'; '.join(problems)}; start anew with another --out"
        )
    return None


def training_state(task: Task) -> dict[str, Any]:
    """Return all that training changes: model, optimizer, scheduler, what the task adds, random states."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "model": dict(task.model.state_dict()),
        "optimizer": task.optimizer.state_dict(),
        "scheduler": None if task.scheduler is None else task.scheduler.state_dict(),
        "extra": dict(task.extra_state()),
        "random": {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "python": [version, list(numbers), gauss],
            "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        },
    }


def restore(task: Task, state: Mapping[str, Any]) -> None:
    """Take back what :func:`training_state` gave.

    Raises
    ------
    CheckpointError
        If it belongs to another model or optimizer.
    """
    try:
        task.load_extra_state(state["extra"])
        task.model.load_state_dict(state["model"])
        task.optimizer.load_state_dict(state["optimizer"])
        if task.scheduler is not None:
            task.scheduler.load_state_dict(state["scheduler"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint does not fit this training: {error}") from error
    kept = state["random"]
    torch.set_rng_state(kept["torch"])
    if kept["cuda"] and torch.cuda.device_count() == len(kept["cuda"]):
        torch.cuda.set_rng_state_all(kept["cuda"])
    version, numbers, gauss = kept["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = kept["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))


def _found(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name)) if folder.is_dir() else []


def _taken_apart(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return ``value`` as JSON, with its tensors in ``arrays``.

    Raises
    ------
    TypeError
        If something is neither a tensor, a plain value, nor a list, tuple or mapping of such.
    """
    if isinstance(value, torch.Tensor):
        key = f"t{len(arrays)}"
        tensor = value.detach().cpu().contiguous()
        narrow = tensor.dtype is torch.bfloat16
        arrays[key] = (tensor.view(torch.uint16) if narrow else tensor).numpy()
        return {"tensor": key, "bf16": narrow}
    if isinstance(value, Mapping):
        return {"map": [[_taken_apart(k, arrays), _taken_apart(v, arrays)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_taken_apart(v, arrays) for v in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a checkpoint holds tensors and plain values, got {type(value).__name__}")


def _put_together(value: Any, file: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        tensor = torch.from_numpy(np.array(file[value["tensor"]]))
        return tensor.view(torch.bfloat16) if value["bf16"] else tensor
    if "map" in value:
        return {_put_together(k, file): _put_together(v, file) for k, v in value["map"]}
    if "list" in value:
        return [_put_together(v, file) for v in value["list"]]
    return tuple(_put_together(v, file) for v in value["tuple"])
