"""What the programs of this folder train, and the state of their process, which they print at exit.

A program begins with ``from training import *``.
"""

import asyncio
import atexit
import builtins
import contextlib
import gc
import hashlib
import io
import logging
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 5

torch.manual_seed(0)
random.seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step() -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


def train(steps: int = STEPS) -> None:
    for _ in range(steps):
        step()


def save(path: str = "checkpoint.pt") -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def signal_self(number: int) -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), number)


def hashed(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def named(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def state() -> dict[str, Any]:
    """Return what a program can find out about its process."""
    umask = os.umask(0)
    os.umask(umask)
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "threads": [(t.name, t.daemon) for t in threading.enumerate()] + [threading.active_count()],
        "handlers": {s: named(h) if callable(h) else h for s in signal.valid_signals() if (h := signal.getsignal(s))},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "pending": sorted(signal.sigpending()),
        "timers": [signal.getitimer(n) for n in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)],
        "hooks": [named(hook) for hook in (
            sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, sys.gettrace(),
            sys.getprofile(), threading.gettrace(), threading.getprofile(), warnings.showwarning,
            builtins.open, builtins.print, builtins.__import__,
        )],
        "last exception": [repr(getattr(sys, f"last_{name}", None)) for name in ("type", "value")],
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), [named(one) for one in gc.callbacks]],
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval()]
        + [resource.getrlimit(getattr(resource, name)) for name in limits],
        "files": [os.path.relpath(Path.cwd(), folder) if Path.cwd().is_dir() else None, oct(umask)],
        "import": [sys.argv, sys.path, [named(f) for f in sys.meta_path], [named(h) for h in sys.path_hooks]],
        "environment": hashlib.sha256(repr(sorted(os.environ.items())).replace(folder, "").encode()).hexdigest()[:12],
        "warnings": [(one[0], one[1], one[2].__name__, one[3], one[4]) for one in warnings.filters],
        "logging": [logging.root.level, logging.root.handlers, logging.root.manager.disable],
        "main": sorted(vars(sys.modules["__main__"])),
        "children": len(multiprocessing.active_children()),
        "modes": [
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(),
            torch.get_default_device(), torch.get_num_threads(), torch.is_autocast_enabled("cpu"),
        ],
        "generators": [
            hashlib.sha256(repr(random.getstate()).encode()).hexdigest()[:12], hashed(torch.get_rng_state()),
        ],
        "weights": hashed(*model.parameters()),
        "hooks of the model": [
            sum(len(getattr(module, name)) for module in model.modules())
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
        ] + [sorted(vars(module)) for module in model.modules()] + [sorted(vars(optimizer))],
        "replaced": [
            named(one) for one in (
                torch.Tensor.backward, torch.autograd.backward, torch.save, torch.load, type(optimizer).step,
                nn.Module.__call__, nn.utils.clip_grad_norm_, nn.functional.dropout, torch.compile,
            )
        ],
    }  # fmt: skip


def show_state() -> None:
    if os.getpid() == pid and sys.stdout is not None and not sys.stdout.closed:
        for name, value in state().items():
            print(f"{name}: {value}")


pid = os.getpid()
folder = str(Path.cwd())
if multiprocessing.parent_process() is None:
    atexit.register(show_state)
