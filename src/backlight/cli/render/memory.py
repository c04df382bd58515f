"""Memory in print: what takes it and the facts behind it, tables by kind, module and tensor, or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backlight.cli.console import Page, make_table, print_json
from backlight.diagnose.memory.verdict import (
    allocator,
    facts,
    fit,
    flop,
    logits,
    operations,
    verdict,
    wrapped,
)
from backlight.terminal import make_console
from backlight.text import size

if TYPE_CHECKING:
    from backlight.diagnose.memory.result import (
        MeasuredMemory,
        PredictedMemory,
        Saving,
        StepMemory,
    )

MAX_MODULES, MAX_TENSORS = 10, 8
"""Rows that are printed; --json has more."""

COLUMNS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer_state": "state",
    "activations": "activ.",
}
"""Kinds that have a column in the table of modules."""


def print_measured(result: MeasuredMemory, *, as_json: bool, full: bool = False) -> None:
    """Print a measurement: what takes the memory, then at most ten lines or all tables."""
    if as_json:
        from backlight.diagnose.memory.result import as_document

        print_json(as_document(result))
        return
    page = Page()
    page.summary(verdict(result), () if full else facts(result))
    if full:
        _tables(page, result)
        kept = allocator(result) or "not measured, the memory is not that of a caching allocator"
        page.note(kept, "fragmentation")
        steps = "1 step" if result.steps == 1 else f"{result.steps} steps"
        page.note(f"{steps} recorded after {result.warmup}, uncompiled: a compiled step may need less")
    for text in result.trouble:
        page.note(text)
    _end(page, result, full=full)
    if result.exit_code:
        page.note(f"the script ended with exit code {result.exit_code}")


def print_predicted(result: PredictedMemory, *, wanted: bool, as_json: bool, full: bool = False) -> None:
    """Print a prediction; ``wanted``: the effect of checkpointing was requested."""
    if as_json:
        from backlight.diagnose.memory.result import as_document

        print_json(as_document(result))
        return
    page = Page()
    page.summary(verdict(result), () if full else facts(result))
    if result.assumed:
        page.note("; ".join(result.assumed), f"assumed of {result.device}")
    for text in result.too_low:
        page.note(text, "lower bound")
    if full:
        _tables(page, result)
        if flops := operations(result):
            page.note(flops, "operations")
        if result.checkpointing:
            _savings(result.checkpointing)
        if result.fit is not None:
            page.note(f"{fit(result.fit)}; both predicted", "largest batch")
        page.note(
            f"on a GPU also: {_range(result.context_bytes)} context; with NCCL "
            f"{_range(result.communication_bytes)}; with DDP up to "
            f"{size(result.ddp_bucket_bytes[1])} buckets (0 as views of gradients)",
        )
    if wanted and not result.checkpointing:
        page.note("checkpointing: this model has no sibling blocks of one structure")
    if result.built == "real":
        page.note("the model had to be built with all its memory: its constructor works on no other device")
    _end(page, result, full=full)


def _end(page: Page, result: StepMemory, *, full: bool) -> None:
    if not full:
        page.note("context, compiled code and memory outside of torch's tensors", "not included")
        page.more()
        return
    if result.workspaces:
        calls = ", ".join(f"{count} x {name}" for name, count in result.workspaces.items())
        page.note(f"plus kernel workspaces, not predictable: {calls}")
    for text in result.not_seen:
        page.note(f"not included: {text}")


def _tables(page: Page, result: MeasuredMemory | PredictedMemory) -> None:
    table = make_table("kind", "at the peak", "share")
    for kind, nbytes in result.kinds.items():
        table.add_row(kind.replace("_", " "), size(nbytes), f"{nbytes / result.peak:.1%}")
    make_console().print(table)
    highest = make_table("phase", "highest")
    for phase, nbytes in result.phases.items():
        highest.add_row(phase, size(nbytes))
    make_console().print(highest)
    modules = make_table("module at the peak", "self", "total", *COLUMNS.values())
    for module in result.modules[:MAX_MODULES]:
        kinds = {kind.value: nbytes for kind, nbytes in module.kinds.items()}
        modules.add_row(
            module.name or "(no module)",
            size(module.own),
            size(module.inclusive),
            *(size(kinds[kind]) if kinds.get(kind) else "" for kind in COLUMNS),
        )
    make_console().print(modules)
    if len(result.modules) > MAX_MODULES:
        page.note(f"{len(result.modules) - MAX_MODULES} more modules in --json")
    tensors = make_table("live at the peak", "bytes", "kind", "of", left=("kind",), named=("of",))
    for tensor in result.largest[:MAX_TENSORS]:
        times = f"{tensor.count} x " if tensor.count > 1 else ""
        tensors.add_row(
            f"{times}{list(tensor.shape)} {tensor.dtype}",
            size(tensor.bytes),
            tensor.kind.replace("_", " "),
            " ".join(part for part in (tensor.module, tensor.operation.removeprefix("aten.")) if part),
        )
    make_console().print(tensors)
    found = result.logits
    if found is not None:
        page.note(f"{logits(result)}; elements x (bytes + 4) is {size(found.formula)}", "logits")


def _savings(savings: tuple[Saving, ...]) -> None:
    table = make_table("checkpointing", "peak", "saves", "recomputes", "of the step")
    for saving in savings:
        table.add_row(
            wrapped(saving), size(saving.peak), size(saving.saved),
            flop(saving.recomputed_flops), f"{saving.share_of_step:.1%}",
        )  # fmt: skip
    make_console().print(table)


def _range(pair: tuple[int, int]) -> str:
    return f"{size(pair[0])} to {size(pair[1])}"
