"""Questions to a tape: what a parameter's value becomes, where it is cut, whether the loss depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from backlight.diagnose.missing_gradients.tape import Operation

REENTRANT = "CheckpointFunction"
"""Class of torch's re-entrant checkpoint, whose ``forward`` runs without recording by design."""


@dataclass
class Use:
    """What became of a value as far as it carried a gradient.

    Attributes
    ----------
    operations:
        Positions of all operations that took it or something made of it, in order.
    cuts:
        Positions at which it came out without a gradient, in order.
    hidden:
        Positions inside custom functions, where autograd does not record.
    """

    operations: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)


class Flow:
    """An index over the operations of a tape.

    Parameters
    ----------
    operations:
        The tape.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        self._takers: dict[int, list[int]] = {}
        self._makers: dict[int, list[int]] = {}
        for position, operation in enumerate(operations):
            for number in set(operation.inputs):
                self._takers.setdefault(number, []).append(position)
            for number in set(operation.outputs):
                self._makers.setdefault(number, []).append(position)

    def producer(self, number: int) -> Operation | None:
        """Return the first operation that gave a tensor, or None if it was not seen."""
        made = self._makers.get(number)
        return self.operations[made[0]] if made else None

    def behind(self, numbers: Iterable[int]) -> set[int]:
        """Return every tensor that the given ones were computed from, gradient or not."""
        seen = set(numbers)
        stack = list(seen)
        while stack:
            for position in self._makers.get(stack.pop(), ()):
                for number in self.operations[position].inputs:
                    if number not in seen:
                        seen.add(number)
                        stack.append(number)
        return seen

    def use(self, number: int) -> Use:
        """Follow one leaf through every operation as long as a gradient could come back.

        An operation without recording inside a custom function is hidden, not a cut: what counts is
        whether the function's own output carries a gradient.
        """
        use = Use()
        seen, found, stack = {number}, set(), [number]
        while stack:
            for position in self._takers.get(stack.pop(), ()):
                if position in found:
                    continue
                found.add(position)
                operation = self.operations[position]
                if any(n == number for n, _ in operation.changed):
                    continue  # a leaf is filled, as initialisation does: that is no use of its value
                use.operations.append(position)
                if operation.inside >= 0 and not operation.enabled:
                    use.hidden.append(position)
                    continue
                if operation.cut:
                    use.cuts.append(position)
                    continue
                if not operation.carries:
                    continue
                for output in operation.outputs:
                    if output not in seen:
                        seen.add(output)
                        stack.append(output)
        use.operations.sort()
        use.cuts.sort()
        use.hidden.sort()
        return use

    def outermost(self, position: int) -> Operation:
        """Return the outermost custom function around an operation."""
        operation = self.operations[position]
        while operation.inside >= 0:
            operation = self.operations[operation.inside]
        return operation

    def in_checkpoint(self, position: int) -> Operation | None:
        """Return the re-entrant checkpoint around an operation, or None."""
        operation = self.operations[position]
        while operation.inside >= 0:
            operation = self.operations[operation.inside]
            if operation.name == REENTRANT:
                return operation
        return None

    def leaves_torch(self, position: int) -> Operation | None:
        """Return the operation that takes the output of a cut out of torch, or None."""
        operation = self.operations[position]
        if operation.cut == "numpy":
            return operation
        for number in operation.outputs:
            for later in self._takers.get(number, ()):
                if self.operations[later].name in {
                    "numpy",
                    "__array__",
                    "tolist",
                    "item",
                    "__dlpack__",
                    "__float__",
                }:
                    return self.operations[later]
        return None
