"""Memory in print: one line for the peak, tables by kind, module and tensor, or one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from backlight.cli.console import Page, print_json
from backlight.diagnose.memory.document import (
    NOT_PREDICTED,
    measured_answer,
    predicted_answer,
    sum_of_gradients,
)
from backlight.text import size

if TYPE_CHECKING:
    from backlight.diagnose.memory.account import Account
    from backlight.diagnose.memory.batch_search import Fit, Saving
    from backlight.diagnose.memory.measure import Measured
    from backlight.diagnose.memory.prediction_result import Logits, Prediction

MODULES, TENSORS = 10, 8
"""Rows that are printed; --json has more."""


def print_measured(measured: Measured, *, as_json: bool) -> None:
    """Print a measurement."""
    answer = measured_answer(measured)
    if as_json:
        print_json(answer)
        return
    page = Page()
    where = "" if measured.device == "cpu" else f" on {measured.device}"
    page.say((f"{_headline(measured.account)}{where}; {_plural(measured.parameters)}", "bold"))
    _kinds(measured.account)
    _modules(measured.account)
    _tensors(measured.account)
    _logits(page, measured.logits)
    allocator = measured.allocator
    if allocator is None:
        _note(page, "fragmentation: not measured, the memory is not that of a caching allocator")
    else:
        _note(
            page,
            f"allocator: {size(allocator.reserved)} reserved at most, {size(allocator.allocated)} in use "
            f"({allocator.fragmentation:.0%} in pieces), {allocator.retries} retries",
        )
    steps = "1 step" if measured.steps == 1 else f"{measured.steps} steps"
    _note(page, f"{steps} recorded after {measured.warmup}, uncompiled: a compiled step may need less")
    for text in (*measured.trouble, *(f"not seen: {what}" for what in answer["not_seen"])):
        _note(page, text)
    if measured.code:
        _note(page, f"the script ended with exit code {measured.code}")


def print_predicted(
    prediction: Prediction, savings: Sequence[Saving], fit: Fit | None, *, asked: bool, as_json: bool
) -> None:
    """Print a prediction, with what was asked of checkpointing and of a budget."""
    if as_json:
        print_json(predicted_answer(prediction, savings, fit))
        return
    page = Page()
    page.say((f"predicted: {_headline(prediction.account)}; {_plural(prediction.parameters)}", "bold"))
    _kinds(prediction.account)
    _modules(prediction.account)
    _tensors(prediction.account)
    _logits(page, prediction.logits)
    if prediction.flops.step:
        page.say(
            ("operations: ", "dim"),
            f"{_flops(prediction.flops.forward)} forward, {_flops(prediction.flops.backward)} backward"
            + (
                f", of them {_flops(prediction.flops.recomputed)} recomputed"
                if prediction.flops.recomputed
                else ""
            ),
        )
    if savings:
        _savings(savings)
    elif asked:
        _note(page, "checkpointing: no blocks of one structure stand side by side in this model")
    if fit is not None:
        _fit(page, fit)
    from backlight.diagnose.memory.prediction_result import COMMUNICATION, CONTEXT

    _note(
        page,
        f"on a GPU besides: {_range(CONTEXT)} context; with NCCL {_range(COMMUNICATION)}; with DDP up to "
        f"{size(sum_of_gradients(prediction))} buckets (0 as views of gradients)",
    )
    if prediction.built == "real":
        _note(page, "the model had to be built with all its memory: its constructor works on no other device")
    for text in NOT_PREDICTED:
        _note(page, f"not seen: {text}")


def _headline(account: Account) -> str:
    kinds = sorted(account.kinds().items(), key=lambda item: -item[1])
    parts = ", ".join(
        f"{kind.value.replace('_', ' ')} {size(nbytes)}" for kind, nbytes in kinds[:4] if nbytes
    )
    return f"peak {size(account.peak)} in {account.phase}: {parts}; between steps {size(account.begin)}"


def _kinds(account: Account) -> None:
    table = _table("kind", "at the peak", "share")
    for kind, nbytes in account.kinds().items():
        table.add_row(kind.value.replace("_", " "), size(nbytes), f"{nbytes / account.peak:.1%}")
    Console().print(table)
    highest = _table("phase", "highest")
    for phase, nbytes in account.phase_peaks().items():
        highest.add_row(phase, size(nbytes))
    Console().print(highest)


def _modules(account: Account) -> None:
    modules = account.modules()
    table = _table("module at the peak", "own", "inclusive", "params", "grads", "state", "activations")
    from backlight.diagnose.memory.storage_log import Kind

    columns = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATE, Kind.ACTIVATIONS)
    for module in modules[:MODULES]:
        table.add_row(
            Text(module.name or "(no module)"),
            size(module.exclusive),
            size(module.inclusive),
            *(size(module.own[kind]) if module.own.get(kind) else "" for kind in columns),
        )
    Console().print(table)
    if len(modules) > MODULES:
        _note(Page(), f"{len(modules) - MODULES} more in --json")


def _tensors(account: Account) -> None:
    table = _table("live at the peak", "bytes")
    table.add_column("kind")
    table.add_column("of")
    for tensor in account.largest(TENSORS):
        times = f"{tensor.count} x " if tensor.count > 1 else ""
        table.add_row(
            Text(f"{times}{list(tensor.shape)} {tensor.dtype}"),
            size(tensor.nbytes),
            tensor.kind.value.replace("_", " "),
            Text(" ".join(part for part in (tensor.module, tensor.operation.removeprefix("aten.")) if part)),
        )
    Console().print(table)


def _logits(page: Page, logits: Logits | None) -> None:
    if logits is not None:
        page.say(
            ("logits: ", "dim"),
            f"{list(logits.shape)} {logits.dtype} take {size(logits.nbytes)}, with {logits.copies} copies of "
            f"their size at most {size(logits.live)}; elements x (bytes + 4) is {size(logits.formula)}",
        )


def _savings(savings: Sequence[Saving]) -> None:
    table = _table("checkpointing", "peak", "saves", "recomputes", "share of the step")
    for saving in savings:
        count = len(saving.wrapped)
        what = (
            saving.wrapped[0]
            if count == 1
            else f"all {count} {saving.blocks.type} of {saving.blocks.parent or 'the model'}"
        )
        table.add_row(
            Text(what), size(saving.peak), size(saving.saved), _flops(saving.flops), f"{saving.share:.1%}"
        )
    Console().print(table)


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


def _note(page: Page, text: str) -> None:
    page.say(("note: ", "dim"), text)


def _range(pair: tuple[int, int]) -> str:
    return f"{size(pair[0])} to {size(pair[1])}"


def _plural(count: int) -> str:
    for unit, factor in ((" B", 1e9), (" M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g}{unit} parameters"
    return f"{count} parameters"


def _flops(count: float) -> str:
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}FLOP"
    return f"{count:.0f} FLOP"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table
