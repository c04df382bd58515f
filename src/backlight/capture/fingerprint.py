"""The fingerprint of a live run: what must agree before two runs are compared."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import backlight
from backlight import devices
from backlight.capture.modules import kind_of, walk
from backlight.distributed import rank_and_size
from backlight.notebook import notebook_name, notebook_shell
from backlight.records import Fingerprint
from backlight.user_code import process_script

if TYPE_CHECKING:
    from backlight.capture.parameters import Scope

_NO_OPTIONS = frozenset({"params", "param_names", "lr", "initial_lr", "name"})
_PACKAGES = ("numpy", "transformers", "lightning", "accelerate", "datasets", "triton")


def take_fingerprint(scope: Scope, arguments: tuple[str, ...]) -> Fingerprint:
    """Describe the models and optimizers in ``scope`` as they are now."""
    records = scope.table.records
    roots = scope.roots({id(t) for t in scope.table.tensors()})
    modules = tuple((name, kind_of(module)) for root in roots for name, module in walk(root))
    shape = repr([modules, [(r.name, r.shape) for r in records]])
    dtypes = Counter[str]()
    for record in (record.unsharded() for record in records):  # a shard is not less of a model
        dtypes[record.dtype] += record.numel
    in_notebook = notebook_shell() is not None  # its script is that of the kernel
    script = f"{notebook_name()}.ipynb" if in_notebook else process_script()
    return Fingerprint(
        script=script,
        script_hash="" if in_notebook else _script_hash(script),
        arguments=arguments if script in sys.argv[:1] else (),
        versions=_versions(),
        device=_device({record.device for record in records}),
        host=platform.node(),
        module_hash=hashlib.sha256(shape.encode(errors="replace")).hexdigest()[:16],
        modules=modules,
        parameter_count=sum(dtypes.values()),
        dtypes=dict(dtypes),
        optimizers=tuple(type(o).__name__ for o in scope.optimizers()),
        hyperparameters=_hyperparameters(scope.optimizers()),
        flags=_flags(),
        world_size=rank_and_size()[1],
    )


def _script_hash(script: str) -> str:
    """Return the start of the SHA-256 of the script; empty where there is no file, as in a notebook."""
    try:
        return hashlib.sha256(Path(script).read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def _hyperparameters(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """Return the options by optimizer and name; different ones of its groups are listed."""
    options: dict[str, dict[str, None]] = {}
    for place, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__ + (f" {place}" if len(optimizers) > 1 else "")
        for group in optimizer.param_groups:
            for option, value in group.items():
                if option not in _NO_OPTIONS and isinstance(value, (bool, int, float, str, tuple)):
                    options.setdefault(f"{name}.{option}", {})[str(value)] = None
    return {option: ", ".join(values) for option, values in options.items()}


def _versions() -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backlight": backlight.__version__,
        "cuda": str(torch.version.cuda or ""),
    }
    for package in _PACKAGES:
        if package in sys.modules:
            versions[package] = importlib.metadata.version(package)
    return versions


def _device(used: set[str]) -> str:
    names = []
    for device in sorted(used):
        if devices.is_accelerator(device):
            names.append(f"{device}: {devices.name_of(device)}")
        else:
            names.append(f"{device}: {platform.machine()}")
    return ", ".join(names)


def _flags() -> dict[str, str]:
    return {
        "threads": str(torch.get_num_threads()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul_precision": devices.matmul_precision(),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "anomaly": str(torch.is_anomaly_enabled()),
    }
