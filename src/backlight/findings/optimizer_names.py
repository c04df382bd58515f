"""Optimizers of a run by their class and parameters, and whether their step depends on a gradient's size."""

from __future__ import annotations

from backlight.findings import phrases
from backlight.store.read.run import Run

SCALE_FREE = frozenset(
    {
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "Adam8bit",
        "AdamW",
        "AdamW8bit",
        "Adamax",
        "Lion",
        "Muon",
        "NAdam",
        "PagedAdamW8bit",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SparseAdam",
    }
)
"""Optimizers whose step hardly changes if all gradients shrink by one factor."""


def optimizer_kinds(run: Run) -> tuple[str, ...]:
    """Return the classes of the optimizers of a run by number; empty where none was recorded."""
    stored = run.fingerprint()
    return () if stored is None else tuple(kind.partition("(")[0] for kind in stored.optimizers)


def scale_free_kinds(run: Run) -> tuple[str, ...]:
    """Return the classes of the optimizers where each of them is in ``SCALE_FREE``; else nothing."""
    kinds = optimizer_kinds(run)
    return tuple(dict.fromkeys(kinds)) if SCALE_FREE.issuperset(kinds) else ()


def optimizer_name(run: Run, number: int) -> str:
    """Return the class of an optimizer; where several have it, with the parameters that it holds."""
    kinds = optimizer_kinds(run)
    held = [p for p in run.parameters() if p.group.partition("/")[0] == str(number)]
    kind = kinds[number] if number < len(kinds) else "the optimizer"
    if kinds.count(kind) < 2 or not held:
        return kind
    return f"{kind} of {phrases.parameters([p.name for p in held], len(held))}"
