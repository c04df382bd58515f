"""What takes the memory of a step, in one line, and the facts behind it in at most ten."""

from __future__ import annotations

from backlight.diagnose.memory.result import Fit, MeasuredMemory, PredictedMemory, Saving
from backlight.text import count, listed, percent, scaled, size

SHOWN = 3
"""Modules, tensors and operations that a line names."""


def verdict(result: MeasuredMemory | PredictedMemory) -> str:
    """Return the peak and what most of it is, in one line."""
    kind, nbytes = max(result.kinds.items(), key=lambda item: item[1])
    most = f"mostly {_words(kind)} ({_share(result, nbytes)})"
    line = f"peak {size(result.peak)} in {result.phase_at_peak}, {most}"
    if isinstance(result, MeasuredMemory):
        where = "" if result.device == "cpu" else f", on {result.device}"
        grows = growth(result)
        return f"memory grows: {grows}. {line}{where}" if grows else f"{line}{where}"
    return f"predicted{', a lower bound' if result.too_low else ''}: {line}"


def facts(result: MeasuredMemory | PredictedMemory) -> list[str]:
    """Return the lines behind the verdict."""
    kinds = sorted(((kind, n) for kind, n in result.kinds.items() if n), key=lambda item: -item[1])
    phases = sorted(result.phases.items(), key=lambda item: -item[1])[:SHOWN]
    modules = sorted((m for m in result.modules if m.own and m.name), key=lambda m: -m.own)
    tensors = [
        f"{tensor.count} x " * (tensor.count > 1)
        + f"{list(tensor.shape)} {tensor.dtype} {size(tensor.bytes)}"
        + f" ({' '.join(filter(None, (tensor.module, _words(tensor.kind))))})"
        for tensor in result.largest[:2]
    ]
    lines = {
        "at the peak": ", ".join(f"{_words(kind)} {size(n)}" for kind, n in kinds[:4]),
        "between steps": f"{size(result.between_steps)}; {parameters(result.parameters)}",
        "highest": ", ".join(f"{phase} {size(n)}" for phase, n in phases),
        "modules (self)": listed([f"{m.name} {size(m.own)}" for m in modules], SHOWN),
        "largest tensors": ", ".join(tensors),
        "logits": logits(result),
    }
    if isinstance(result, MeasuredMemory):
        lines["allocator"] = allocator(result)
    else:
        lines["operations"] = operations(result)
        lines["checkpointing"] = "; ".join(saving(one) for one in result.checkpointing[-1:])
        lines["largest batch"] = "" if result.fit is None else fit(result.fit)
    if result.workspaces:
        calls = listed([f"{n} x {name}" for name, n in result.workspaces.items()], SHOWN)
        lines["workspaces of kernels on top"] = f"not predictable, {calls}"
    return [f"{name}: {text}" for name, text in lines.items() if text]


def growth(result: MeasuredMemory) -> str:
    """Return what keeps graphs or tensors of earlier steps, and the line; empty without any."""
    kept = result.kept_graphs or result.kept_data
    if kept is None:
        return ""
    holder = kept["holder"] or {}
    name = f"`{holder['name']}`" if holder else "the script"
    line = f" ({holder['line']})" if holder.get("line") else ""
    if kept is result.kept_data:
        return f"{name} gathers {size(kept['bytes_per_step'])} a step{line}"
    return f"{name} keeps the graphs of {count(kept['until'] - kept['since'] + 1, 'step')}{line}"


def logits(result: MeasuredMemory | PredictedMemory) -> str:
    """Return what the logits take, empty without any."""
    found = result.logits
    if found is None:
        return ""
    most = f"with {count(found.copies, 'copy', 'copies')} at most {size(found.live_at_most)}"
    return f"{list(found.shape)} {found.dtype} take {size(found.bytes)}, {most}"


def allocator(result: MeasuredMemory) -> str:
    """Return the state of a caching allocator, empty without one."""
    found = result.allocator
    if found is None:
        return ""
    return (
        f"{size(found.reserved_peak)} reserved at most, {size(found.allocated_peak)} in use "
        f"({percent(found.fragmentation)} fragmented), {count(found.retries, 'retry', 'retries')}"
    )


def operations(result: PredictedMemory) -> str:
    """Return the operations of a step, empty where none were counted."""
    flops = result.flops
    recomputed = f", of which {flop(flops.recomputed)} recomputed" if flops.recomputed else ""
    both = f"{flop(flops.forward)} forward, {flop(flops.backward)} backward{recomputed}"
    return both if flops.step else ""


def saving(one: Saving) -> str:
    """Return the effect of checkpointing."""
    costs = f"for {percent(one.share_of_step)} more operations"
    return f"{wrapped(one)} saves {size(one.saved)} of the peak {costs}"


def wrapped(one: Saving) -> str:
    """Return the modules that are checkpointed."""
    amount = len(one.wrapped)
    return one.wrapped[0] if amount == 1 else f"all {amount} {one.type} of {one.parent or 'the model'}"


def fit(found: Fit) -> str:
    """Return the largest batch within a budget."""
    end = (
        f"{found.setting}={found.above} takes {size(found.peak_above)}"
        if found.above is not None and found.peak_above is not None
        else "the search ended there"
    )
    return f"{found.setting}={found.batch} takes {size(found.peak)} of {size(found.budget)}; {end}"


def parameters(amount: int) -> str:
    """Return a number of parameters in words."""
    for unit, factor in ((" B", 1e9), (" M", 1e6), ("k", 1e3)):
        if amount >= factor:
            return f"{amount / factor:.3g}{unit} parameters"
    return f"{amount} parameters"


def flop(amount: float) -> str:
    """Return a number of operations with its unit."""
    return scaled(amount, "FLOP")


def _words(kind: str) -> str:
    return str(kind).replace("_", " ")


def _share(result: MeasuredMemory | PredictedMemory, nbytes: int) -> str:
    return percent(nbytes / result.peak) if result.peak else "-"
