"""Answer of ``memory``: what takes the memory of a step, the facts behind it, and the tables."""

from __future__ import annotations

from dataclasses import replace

from backlight import codec
from backlight.answer import Answer, ended
from backlight.diagnose.memory.result import Fit, MeasuredMemory, PredictedMemory, Saving, as_document
from backlight.monitors.steptime.model.step_tables import checkpointed, memory_tables
from backlight.text import count, listed, percent, scaled, size

SHOWN = 3
"""Modules, tensors and operations that a line names."""


def answer(result: MeasuredMemory | PredictedMemory, *, with_checkpointing: bool = False) -> Answer:
    """Return the answer of a step; ``with_checkpointing`` is whether its effect was requested."""
    document = as_document(result)
    tables = memory_tables(document)
    beyond = [f"not included: {text}" for text in result.not_seen]
    if result.logits is not None:
        beyond.append(f"logits: elements x (bytes + 4) is {size(result.logits.formula)}")
    if isinstance(result, MeasuredMemory):
        if result.allocator is None:
            beyond.append("fragmentation: not measured, the memory is not that of a caching allocator")
        steps = count(result.steps, "step")
        beyond.append(f"{steps} recorded after {result.warmup}, uncompiled: a compiled step may need less")
        notes = [*result.trouble, *ended(result.exit_code)]
    else:
        beyond.append(
            f"on a GPU also: {_range(result.context_bytes)} context; with NCCL "
            f"{_range(result.communication_bytes)}; with DDP up to {size(result.ddp_bucket_bytes[1])} "
            "buckets (0 as views of gradients)"
        )
        notes = [f"assumed of {result.device}: {'; '.join(result.assumed)}"] if result.assumed else []
        notes += [f"lower bound: {text}" for text in result.too_low]
        if with_checkpointing and not result.checkpointing:
            notes.append("checkpointing: this model has no sibling blocks of one structure")
        if result.built == "real":
            notes.append(
                "the model had to be built with all its memory: its constructor works on no other device"
            )
    tables["kinds"] = replace(tables["kinds"], notes=tuple(beyond))
    outside = "not included: context, compiled code and memory outside of torch's tensors"
    return Answer(
        _verdict(result), document, tuple(_facts(result)), tuple(tables.values()), (*notes, outside)
    )


def _verdict(result: MeasuredMemory | PredictedMemory) -> str:
    """Return the peak and what most of it is, in one line."""
    kind, nbytes = max(result.kinds.items(), key=lambda item: item[1])
    share = percent(nbytes / result.peak) if result.peak else "-"
    most = f"mostly {_words(kind)} ({share})"
    line = f"peak {size(result.peak)} in {result.phase_at_peak}, {most}"
    if isinstance(result, MeasuredMemory):
        where = "" if result.device == "cpu" else f", on {result.device}"
        grows = _growth(result)
        return f"memory grows: {grows}. {line}{where}" if grows else f"{line}{where}"
    return f"predicted{', a lower bound' if result.too_low else ''}: {line}"


def _facts(result: MeasuredMemory | PredictedMemory) -> list[str]:
    """Return the lines behind the verdict."""
    kinds = sorted(((kind, n) for kind, n in result.kinds.items() if n), key=lambda item: -item[1])
    phases = sorted(result.phases.items(), key=lambda item: -item[1])[:SHOWN]
    modules = sorted((m for m in result.modules if m.exclusive and m.name), key=lambda m: -m.exclusive)
    tensors = [
        f"{tensor.count} x " * (tensor.count > 1)
        + f"{list(tensor.shape)} {tensor.dtype} {size(tensor.bytes)}"
        + f" ({' '.join(filter(None, (tensor.module, _words(tensor.kind))))})"
        for tensor in result.largest[:2]
    ]
    lines = {
        "at the peak": ", ".join(f"{_words(kind)} {size(n)}" for kind, n in kinds[:4]),
        "between steps": f"{size(result.between_steps)}; {_parameters(result.parameters)}",
        "highest": ", ".join(f"{phase} {size(n)}" for phase, n in phases),
        "modules (self)": listed([f"{m.name} {size(m.exclusive)}" for m in modules], SHOWN),
        "largest tensors": ", ".join(tensors),
        "logits": _logits(result),
    }
    if isinstance(result, MeasuredMemory):
        lines["allocator"] = _allocator(result)
    else:
        lines["operations"] = _operations(result)
        lines["checkpointing"] = "; ".join(_saving(saving) for saving in result.checkpointing[-1:])
        lines["largest batch"] = "" if result.fit is None else _fit(result.fit)
    if result.workspaces:
        calls = listed([f"{n} x {name}" for name, n in result.workspaces.items()], SHOWN)
        lines["workspaces of kernels on top"] = f"not predictable, {calls}"
    return [f"{name}: {text}" for name, text in lines.items() if text]


def _growth(result: MeasuredMemory) -> str:
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


def _logits(result: MeasuredMemory | PredictedMemory) -> str:
    """Return what the logits take, empty without any."""
    logits = result.logits
    if logits is None:
        return ""
    most = f"with {count(logits.copies, 'copy', 'copies')} at most {size(logits.live_at_most)}"
    return f"{list(logits.shape)} {logits.dtype} take {size(logits.bytes)}, {most}"


def _allocator(result: MeasuredMemory) -> str:
    """Return the state of a caching allocator, empty without one."""
    allocator = result.allocator
    if allocator is None:
        return ""
    return (
        f"{size(allocator.reserved_peak)} reserved at most, {size(allocator.allocated_peak)} in use "
        f"({percent(allocator.fragmentation)} fragmented), {count(allocator.retries, 'retry', 'retries')}"
    )


def _operations(result: PredictedMemory) -> str:
    """Return the operations of a step, empty where none were counted."""
    flops = result.flops
    recomputed = f", of which {scaled(flops.recomputed, 'FLOP')} recomputed" if flops.recomputed else ""
    both = f"{scaled(flops.forward, 'FLOP')} forward, {scaled(flops.backward, 'FLOP')} backward{recomputed}"
    return both if flops.step else ""


def _saving(saving: Saving) -> str:
    """Return the effect of checkpointing."""
    costs = f"for {percent(saving.share_of_step)} more operations"
    return f"{checkpointed(codec.plain(saving))} saves {size(saving.saved)} of the peak {costs}"


def _fit(fit: Fit) -> str:
    """Return the largest batch within a budget."""
    end = (
        f"{fit.setting}={fit.above} takes {size(fit.peak_above)}"
        if fit.above is not None and fit.peak_above is not None
        else "the search ended there"
    )
    return f"{fit.setting}={fit.batch} takes {size(fit.peak)} of {size(fit.budget)}; {end}"


def _parameters(amount: int) -> str:
    """Return a number of parameters in words."""
    for unit, factor in ((" B", 1e9), (" M", 1e6), ("k", 1e3)):
        if amount >= factor:
            return f"{amount / factor:.3g}{unit} parameters"
    return f"{amount} parameters"


def _words(kind: str) -> str:
    return str(kind).replace("_", " ")


def _range(pair: tuple[int, int]) -> str:
    return f"{size(pair[0])} to {size(pair[1])}"
