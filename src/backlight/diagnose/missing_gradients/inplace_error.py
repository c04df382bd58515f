"""A saved tensor that was changed in place: from torch's message to the two lines of code.

No saved-tensor hook is needed: the message gives shape and versions of the tensor, the tape holds
every in-place operation with the version that it left behind.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backlight.diagnose.missing_gradients.tape import Operation
    from backlight.user_code import SourceLine

_MESSAGE = re.compile(
    r"modified by an inplace operation: \[[\w.]+ \[(?P<shape>[\d, ]*)\]\]"
    r"(?:, which is output \d+ of (?P<node>\w+),)? is at version (?P<now>\d+); expected version (?P<then>\d+)"
)


@dataclass(frozen=True, slots=True)
class Overwritten:
    """The line that changed a tensor which backward needs, and the operation that had saved it."""

    text: str
    line: SourceLine | None
    saved: SourceLine | None


def find_overwritten(message: str, operations: Sequence[Operation]) -> Overwritten | None:
    """Find the in-place operation behind torch's error ``message``; None if it is another error.

    Where several operations fit, the text says how many.
    """
    matched = _MESSAGE.search(message)
    if matched is None:
        return None
    shape = tuple(int(n) for n in matched["shape"].replace(" ", "").split(",") if n)
    then, now = int(matched["then"]), int(matched["now"])
    writes = [
        (position, number)
        for position, operation in enumerate(operations)
        for number, version in operation.changed
        if version == then + 1 and _lasts(operations, number, now)
    ]
    fitting = [w for w in writes if operations[w[0]].shape == shape] or writes
    node = matched["node"] or ""
    named = [w for w in fitting if node.lower().startswith(operations[w[0]].name.strip("_").lower())]
    fitting = named or fitting
    # A tensor that nothing had used before the write cannot have been saved before it.
    found = [(w, saved) for w in fitting if (saved := _saved_by(operations, *w)) is not None]
    if not found:
        where = "; the operation was not seen (in another thread, or inside compiled code)"
        return Overwritten(
            f"a tensor of shape {shape} that backward needs was changed in place{where}", None, None
        )
    (position, _), saved = found[0]
    write = operations[position]
    text = (
        f"a tensor of shape {shape} that backward needs was changed in place by {write.name} "
        f"after {saved.name} had used it at {saved.line}"
    )
    if len(found) > 1:
        text += f" ({len(found)} operations fit; this is the first)"
    return Overwritten(text, write.line, saved.line)


def _lasts(operations: Sequence[Operation], number: int, now: int) -> bool:
    return max((v for o in operations for n, v in o.changed if n == number), default=-1) >= now


def _saved_by(operations: Sequence[Operation], position: int, number: int) -> Operation | None:
    saved = None
    for operation in operations[:position]:
        uses = number in operation.outputs or number in operation.inputs
        if uses and (operation.carries or number in operation.inputs):
            saved = operation
    return saved
