"""Memory in print: one line for the peak, tables by kind, module and tensor, or one JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backlight.cli.console import Page, make_table, print_json
from backlight.terminal import make_console
from backlight.text import scaled, size

if TYPE_CHECKING:
    from backlight.diagnose.memory.result import Fit, MeasuredMemory, PredictedMemory, Saving, StepMemory

MAX_MODULES, MAX_TENSORS = 10, 8
"""Rows that are printed; --json has more."""

COLUMNS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer_state": "state",
    "activations": "activations",
}
"""Kinds that have a column in the table of modules."""


def print_measured(result: MeasuredMemory, *, as_json: bool) -> None:
    """Print a measurement."""
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    page = Page()
    where = "" if result.device == "cpu" else f" on {result.device}"
    page.say((f"{_headline(result)}{where}; {_parameters(result.parameters)}", "bold"))
    _tables(page, result)
    allocator = result.allocator
    if allocator is None:
        page.note("fragmentation: not measured, the memory is not that of a caching allocator")
    else:
        page.note(
            f"allocator: {size(allocator.reserved_peak)} reserved at most, "
            f"{size(allocator.allocated_peak)} in use "
            f"({allocator.fragmentation:.0%} fragmented), {allocator.retries} retries",
        )
    steps = "1 step" if result.steps == 1 else f"{result.steps} steps"
    page.note(f"{steps} recorded after {result.warmup}, uncompiled: a compiled step may need less")
    for text in result.trouble:
        page.note(text)
    _not_included(page, result)
    if result.exit_code:
        page.note(f"the script ended with exit code {result.exit_code}")


def print_predicted(result: PredictedMemory, *, wanted: bool, as_json: bool) -> None:
    """Print a prediction; ``wanted``: the effect of checkpointing was requested."""
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    page = Page()
    bound = ", a lower bound" if result.too_low else ""
    page.say((f"predicted{bound}: {_headline(result)}; {_parameters(result.parameters)}", "bold"))
    for text in result.too_low:
        page.note(text, "lower bound")
    _tables(page, result)
    flops = result.flops
    if flops.step:
        recomputed = f", of which {_flops(flops.recomputed)} recomputed" if flops.recomputed else ""
        page.say(
            ("operations: ", "dim"),
            f"{_flops(flops.forward)} forward, {_flops(flops.backward)} backward{recomputed}",
        )
    if result.checkpointing:
        _savings(result.checkpointing)
    elif wanted:
        page.note("checkpointing: this model has no sibling blocks of one structure")
    if result.fit is not None:
        _fit(page, result.fit)
    page.note(
        f"on a GPU also: {_range(result.context_bytes)} context; with NCCL "
        f"{_range(result.communication_bytes)}; with DDP up to "
        f"{size(result.ddp_bucket_bytes[1])} buckets (0 as views of gradients)",
    )
    if result.built == "real":
        page.note("the model had to be built with all its memory: its constructor works on no other device")
    _not_included(page, result)


def _not_included(page: Page, result: StepMemory) -> None:
    if result.workspaces:
        calls = ", ".join(f"{count} x {name}" for name, count in result.workspaces.items())
        page.note(f"plus kernel workspaces, not predictable: {calls}")
    for text in result.not_seen:
        page.note(f"not included: {text}")


def _headline(result: StepMemory) -> str:
    kinds = sorted(result.kinds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{kind.replace('_', ' ')} {size(nbytes)}" for kind, nbytes in kinds[:4] if nbytes)
    peak, between = size(result.peak), size(result.between_steps)
    return f"peak {peak} in {result.phase_at_peak}: {parts}; between steps {between}"


def _tables(page: Page, result: StepMemory) -> None:
    table = make_table("kind", "at the peak", "share")
    for kind, nbytes in result.kinds.items():
        table.add_row(kind.replace("_", " "), size(nbytes), f"{nbytes / result.peak:.1%}")
    make_console().print(table)
    highest = make_table("phase", "highest")
    for phase, nbytes in result.phases.items():
        highest.add_row(phase, size(nbytes))
    make_console().print(highest)
    modules = make_table("module at the peak", "own", "inclusive", *COLUMNS.values())
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
    tensors = make_table("live at the peak", "bytes", "kind", "of", folded=("kind", "of"))
    for tensor in result.largest[:MAX_TENSORS]:
        times = f"{tensor.count} x " if tensor.count > 1 else ""
        tensors.add_row(
            f"{times}{list(tensor.shape)} {tensor.dtype}",
            size(tensor.bytes),
            tensor.kind.replace("_", " "),
            " ".join(part for part in (tensor.module, tensor.operation.removeprefix("aten.")) if part),
        )
    make_console().print(tensors)
    logits = result.logits
    if logits is not None:
        page.say(
            ("logits: ", "dim"),
            f"{list(logits.shape)} {logits.dtype} take {size(logits.bytes)}, with {logits.copies} copies of "
            f"their size at most {size(logits.live_at_most)}; elements x (bytes + 4) is "
            f"{size(logits.formula)}",
        )


def _savings(savings: tuple[Saving, ...]) -> None:
    table = make_table("checkpointing", "peak", "saves", "recomputes", "share of the step")
    for saving in savings:
        count = len(saving.wrapped)
        group = f"all {count} {saving.type} of {saving.parent or 'the model'}"
        what = saving.wrapped[0] if count == 1 else group
        table.add_row(
            what, size(saving.peak), size(saving.saved),
            _flops(saving.recomputed_flops), f"{saving.share_of_step:.1%}",
        )  # fmt: skip
    make_console().print(table)


def _fit(page: Page, fit: Fit) -> None:
    end = (
        f"{fit.setting}={fit.above} takes {size(fit.peak_above)}"
        if fit.above is not None and fit.peak_above is not None
        else "the search ended there"
    )
    page.say(
        (f"largest {fit.setting} within {size(fit.budget)}: {fit.batch}", "bold"),
        f" ({size(fit.peak)}; {end}; both predicted)",
    )


def _range(pair: tuple[int, int]) -> str:
    return f"{size(pair[0])} to {size(pair[1])}"


def _parameters(count: int) -> str:
    for unit, factor in ((" B", 1e9), (" M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g}{unit} parameters"
    return f"{count} parameters"


def _flops(count: float) -> str:
    return scaled(count, "FLOP")
