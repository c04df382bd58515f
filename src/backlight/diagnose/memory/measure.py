"""The memory of a script's steps: run it unchanged, record some steps, end it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backlight.diagnose.memory.account import Account
from backlight.diagnose.memory.allocator import Allocator
from backlight.diagnose.memory.observer import Observer
from backlight.diagnose.memory.prediction_result import GRANULE, Flops, Logits
from backlight.launch.observe import end_script, explain


@dataclass(frozen=True)
class Measured:
    """The memory of recorded steps.

    Attributes
    ----------
    code:
        The script's own exit code.
    steps, warmup:
        Steps that were recorded, and those that passed before.
    device:
        Type of the device whose memory this is.
    parameters:
        Number of elements, a tied one once.
    flops:
        Of the last recorded step, as far as formulas are known; see :class:`Flops`.
    allocator:
        What the caching allocator of CUDA reports; None elsewhere.
    trouble:
        What is missing, and why.
    """

    code: int
    steps: int
    warmup: int
    device: str
    parameters: int
    account: Account
    flops: Flops
    logits: Logits | None
    allocator: Allocator | None
    trouble: tuple[str, ...]


def measure_memory(
    script: str, arguments: list[str], *, module: bool, warmup: int, steps: int, quiet: bool = False
) -> Measured:
    """Run a script for as many steps as an account of its memory takes.

    Parameters
    ----------
    script, arguments, module:
        As for :func:`backlight.launch.script.launch`.
    warmup, steps:
        Steps to let pass, and steps to record after them.
    quiet:
        Send what the script prints to standard error.

    Raises
    ------
    ValueError
        If no step was recorded.
    """
    observer = Observer(end_script, warmup, steps)
    code = explain(observer, script, arguments, module=module, quiet=quiet)
    recorder = observer.recorder
    if recorder is None or not observer.recorded:
        what = f"after {observer.seen} of the {warmup + 1} steps that are needed (--warmup {warmup})"
        if not observer.seen:
            what = "without a step of an optimizer after a backward; expected a training"
            if not module and "def build_model" in Path(script).read_text(encoding="utf-8", errors="replace"):
                what += ". It looks like a recipe: add --fake to predict its memory"
        also = f"; {'; '.join(observer.trouble)}" if observer.trouble else ""
        raise ValueError(f"{script}: ended (exit code {code}) {what}{also}")
    granule = GRANULE if recorder.device == "cuda" else 1
    parameters = {id(p): p for model in observer.trained.models for p in model.parameters()}
    return Measured(
        code=code,
        steps=observer.recorded,
        warmup=warmup,
        device=recorder.device,
        parameters=sum(p.numel() for p in parameters.values()),
        account=Account(recorder.ledger, recorder.start, granule),
        flops=observer.counter.flops(),
        logits=observer.logits.found(recorder.start, granule) if observer.logits is not None else None,
        allocator=observer.allocator,
        trouble=tuple(observer.trouble),
    )
