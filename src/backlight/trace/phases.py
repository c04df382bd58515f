"""The phase of a step that a host event belongs to, from the names that torch and users write."""

from __future__ import annotations

import re

import numpy as np

from backlight.records import Phase
from backlight.trace import categories
from backlight.trace.call_tree import Tree
from backlight.trace.events import MISSING, Events, Integers

PHASES = tuple(Phase)
"""A phase is stored as its place in this tuple."""

_PATTERNS = tuple(
    (phase, re.compile(pattern, re.IGNORECASE))
    for phase, pattern in (
        (Phase.BACKWARD, r"^autograd::engine::evaluate_function|^\W*(loss\.)?backward( pass)?\W*$"),
        (
            Phase.OPTIMIZER,
            r"^Optimizer\.(step|zero_grad)#|^\W*(optimizer|optim)(\.step|\.zero_grad| step)?\W*$",
        ),
        (
            Phase.DATA,
            r"^enumerate\(DataLoader\)|dataloader\.py\(\d+\): __next__|^\W*(data|data_?load(ing|er)?)\W*$",
        ),
        (Phase.CLIP, r"clip_grad"),
        (Phase.FORWARD, r"^\W*forward( pass)?\W*$|^(Distributed|FullySharded)DataParallel\.forward$"),
        (Phase.EVALUATION, r"^\W*(eval|evaluation|validation|validate)\W*$"),
        (Phase.CHECKPOINT, r"^\W*(save|saving)?[ _]?checkpoint(ing)?\W*$"),
        (Phase.LOSS, r"^aten::\w*(_loss|cross_entropy_loss|kl_div|ctc_loss)(_nd|2d)?$|^\W*loss\W*$"),
    )
)


def phase_of(name: str) -> Phase | None:
    """Return the phase that a name marks, None if it marks none; ``backlight:forward`` marks forward."""
    if name.startswith("backlight:"):
        wanted = name.removeprefix("backlight:")
        return Phase(wanted) if wanted in set(Phase) else None
    for phase, pattern in _PATTERNS:
        if pattern.search(name):
            return phase
    return None


def phases(events: Events, tree: Tree) -> Integers:
    """Return the phase of every place of the tree, as a place in :data:`PHASES`, int64 [H].

    Marks come from annotations, the autograd engine's own ranges and losses by name; the innermost
    counts. What is unmarked and recorded by autograd is forward, all the rest is other.
    """
    marks = [phase_of(word) for word in events.words["name"]]
    by_name = np.array([MISSING if mark is None else PHASES.index(mark) for mark in marks] + [MISSING])
    result = tree.inherited(by_name[events["name"][tree.rows]].astype(np.int64))
    operators = categories.rows(events, categories.OPERATOR)[tree.rows]
    recorded = operators & (events["sequence"][tree.rows] >= 0) & (events["forward_thread"][tree.rows] <= 0)
    weak = np.where((result < 0) & recorded, PHASES.index(Phase.FORWARD), result)
    result = np.where(result < 0, tree.inherited(weak), result)
    return np.where(result < 0, PHASES.index(Phase.OTHER), result)
