"""Optimizations that a run already uses, from its live objects and its trace.

Advice must not repeat what is in use. What neither shows is not measured.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, dataloader

from backlight import devices
from backlight.capture.modules import is_compiled, live_objects
from backlight.diagnose.profile.ranges import has_compiled
from backlight.distributed import world
from backlight.processes import available_cores
from backlight.records import Phase
from backlight.text import listed
from backlight.trace.module_times import Attribution
from backlight.trace.step_operators import Operations

ON, OFF, UNKNOWN = "on", "off", "not measured"

_ATTENTION = re.compile(
    r"_scaled_dot_product_(?!attention$)\w+|flash_attn|flash_attention|_efficient_attention"
)
_CHUNKED = re.compile(r"liger.*cross_?entropy|linear_?cross_?entropy|cut_?cross_?entropy", re.IGNORECASE)
_LOSS = re.compile(r"^aten::(cross_entropy_loss|nll_loss_nd)$")


@dataclass(frozen=True)
class Optimization:
    """One optimization: ``state`` is ``on``, ``off`` or ``not measured``, ``detail`` what was observed."""

    name: str
    state: str
    detail: str


@dataclass
class LiveObjects:
    """State of the live objects of a run; the script's frames are gone when its trace is read.

    ``optimizers`` are types, and whether a group sets ``fused`` and ``foreach``; ``types`` are elements of
    the parameters by type; ``autocast`` are its types when a module was called; ``loaders`` are workers and a
    description of each DataLoader; ``matmul`` is the precision of float32 products.
    """

    optimizers: list[tuple[str, bool, bool]] = field(default_factory=list)
    compiled: tuple[str, ...] = ()
    types: dict[str, int] = field(default_factory=dict)
    autocast: set[str] = field(default_factory=set)
    loaders: list[tuple[int, str]] = field(default_factory=list)
    matmul: str = ""
    threads: int = 1
    cores: int = 1


def read_live_objects(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> LiveObjects:
    """Return the state of the live objects."""
    types: Counter[str] = Counter()
    for parameter in {id(p): p for model in models for p in model.parameters()}.values():
        types[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    regions = [
        name or "(model)" for model in models for name, module in model.named_modules() if is_compiled(module)
    ]
    return LiveObjects(
        optimizers=[(type(o).__name__, _is_set(o, "fused"), _is_set(o, "foreach")) for o in optimizers],
        compiled=tuple(regions) or (("a function",) if has_compiled() else ()),
        types=dict(types.most_common()),
        loaders=_loaders(),
        matmul=devices.matmul_precision(),
        threads=torch.get_num_threads(),
        cores=available_cores(),
    )


def find_optimizations(
    live: LiveObjects, operations: Operations | None, modules: Attribution | None
) -> tuple[Optimization, ...]:
    """Return the state of each optimization, from the live objects and the trace, where there is one."""
    names: dict[str, float] | None = None
    updates: set[str] | None = None
    if operations is not None:
        names = defaultdict(float)
        for row in operations.operators:
            names[row.name] += row.calls
        updates = {row.name for row in operations.operators if row.phase == Phase.OPTIMIZER}
    return (
        _optimizer(live, updates),
        Optimization(
            "compiled regions", ON if live.compiled else OFF, listed(live.compiled) or "nothing was compiled"
        ),
        _checkpointing(modules),
        _precision(live),
        Optimization(
            "fast float32 products", OFF if live.matmul == "highest" else ON, f"precision {live.matmul}"
        ),
        _attention(names),
        _chunked_loss(names),
        _workers(live),
        _threads(live),
    )


def _is_set(optimizer: torch.optim.Optimizer, option: str) -> bool:
    return any(bool(group.get(option)) for group in optimizer.param_groups)


def _optimizer(live: LiveObjects, names: set[str] | None) -> Optimization:
    parts, states = [], []
    for kind, fused, foreach in live.optimizers:
        if fused or any(name.startswith("aten::_fused_") for name in names or ()):
            how, state = "fused", ON
        elif foreach or any(name.startswith("aten::_foreach_") for name in names or ()):
            how, state = "foreach", ON
        elif names is None:
            how, state = "its default, which depends on the device", UNKNOWN
        else:
            how, state = "a loop over parameters", OFF
        parts.append(f"{kind}: {how}")
        states.append(state)
    if not parts:
        return Optimization("fused optimizer", UNKNOWN, "no optimizer was alive")
    return Optimization(
        "fused optimizer", OFF if OFF in states else states[0], listed(list(dict.fromkeys(parts)))
    )


def _checkpointing(modules: Attribution | None) -> Optimization:
    if modules is None:
        return Optimization("checkpointing", UNKNOWN, "no trace")
    recomputed = [module.name or "(model)" for module in modules.modules if module.recomputed_ms]
    if not recomputed:
        return Optimization("checkpointing", OFF, "no module was called in backward")
    return Optimization("checkpointing", ON, f"recomputed: {listed(recomputed)}")


def _precision(live: LiveObjects) -> Optimization:
    types = ", ".join(f"{name} {count:,}" for name, count in live.types.items())
    if live.autocast:
        return Optimization(
            "low precision", ON, f"autocast to {listed(sorted(live.autocast))}; parameters: {types}"
        )
    low = any(name in {"bfloat16", "float16"} or name.startswith("float8") for name in live.types)
    return Optimization("low precision", ON if low else OFF, f"no autocast; parameters: {types}")


def _attention(names: dict[str, float] | None) -> Optimization:
    if names is None:
        return Optimization("fused attention", UNKNOWN, "no trace")
    kernels = sorted(name for name in names if _ATTENTION.search(name) and "backward" not in name)
    if kernels and all(name.endswith("_math") for name in kernels):
        return Optimization("fused attention", OFF, ", ".join(kernels))
    if kernels:
        return Optimization("fused attention", ON, ", ".join(kernels))
    return Optimization("fused attention", OFF, "no call of scaled_dot_product_attention in the trace")


def _chunked_loss(names: dict[str, float] | None) -> Optimization:
    if names is None:
        return Optimization("chunked loss", UNKNOWN, "no trace")
    chunked = sorted(name for name in names if _CHUNKED.search(name))
    if chunked:
        return Optimization("chunked loss", ON, ", ".join(chunked))
    calls = max((count for name, count in names.items() if _LOSS.search(name)), default=0)
    if not calls:
        return Optimization("chunked loss", OFF, "no cross entropy in the trace")
    return Optimization(
        "chunked loss", OFF, f"cross entropy is called {calls:g} times a step, on whole logits"
    )


def _loaders() -> list[tuple[int, str]]:
    # A loop over a loader that it has just created keeps only the iterator alive.
    iterators = getattr(dataloader, "_BaseDataLoaderIter", None)
    kinds = tuple(kind for kind in (DataLoader, iterators) if kind is not None)
    return [_loader(loader) for loader in live_objects(*kinds)]


def _loader(loader: Any) -> tuple[int, str]:
    def get(name: str) -> Any:
        return getattr(loader, name, getattr(loader, f"_{name}", None))

    workers = int(get("num_workers") or 0)
    words = [f"{workers} workers"]
    if workers:
        words.append(f"prefetch {get('prefetch_factor')}")
        words += ["persistent"] if get("persistent_workers") else []
    words += ["pinned memory"] if get("pin_memory") else []
    return workers, ", ".join(words)


def _workers(live: LiveObjects) -> Optimization:
    if not live.loaders:
        return Optimization("data-loader workers", UNKNOWN, "no DataLoader of torch")
    state = ON if any(workers for workers, _ in live.loaders) else OFF
    return Optimization(
        "data-loader workers", state, "; ".join(dict.fromkeys(text for _, text in live.loaders))
    )


def _threads(live: LiveObjects) -> Optimization:
    local = world().local_size
    detail = f"{live.threads} on {live.cores} cores" + (f", {local} ranks" if local > 1 else "")
    return Optimization("threads within operations", ON if live.threads > 1 else OFF, detail)
