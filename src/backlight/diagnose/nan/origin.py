"""From a non-finite loss, gradient or parameter back to where it was born, and how it spread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backlight.diagnose.nan.value_tracker import Bad
    from backlight.user_code import Line


@dataclass
class Birthplace:
    """The first operation with finite inputs and a non-finite output, and what followed.

    Attributes
    ----------
    step, phase:
        Number of the optimizer step, from 0; forward, backward, recomputation, optimizer.
    operation, node:
        Operation of torch; class of the autograd node where it ran in backward.
    line, backward_line:
        Line of the forward pass; line in the backward of a custom function.
    value:
        ``NaN`` or ``infinity``.
    born:
        False where the value came in from outside and was not born in the training.
    constant:
        Line at which an infinity was put in on purpose, where the value was made of that.
    symptom:
        Where it was noticed: ``loss``, ``gradients`` or ``parameters``.
    modules, parameters:
        Modules that it then passed, in order; parameters with non-finite gradients or values, in
        order of arrival.
    """

    step: int
    phase: str
    operation: str
    value: str
    symptom: str
    line: Line | None = None
    node: str = ""
    backward_line: Line | None = None
    module: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    born: bool = True
    parameter: str = ""
    constant: Line | None = None
    modules: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def ancestors(symptoms: Iterable[Bad]) -> list[Bad]:
    """Return the records that led to ``symptoms``, themselves included, in order of time."""
    seen: dict[int, Bad] = {}
    stack = list(symptoms)
    while stack:
        record = stack.pop()
        if id(record) not in seen:
            seen[id(record)] = record
            stack.extend(record.parents)
    return sorted(seen.values(), key=lambda record: record.index)


def find_birth(symptoms: Iterable[Bad]) -> Bad | None:
    """Return the record at which the non-finite values behind ``symptoms`` began.

    The first that was born; else the first that came in from outside; else the first constant.
    """
    led = ancestors(symptoms)
    for kind in ("born", "outside", "constant"):
        for record in led:
            if record.kind == kind:
                return record
    return led[0] if led else None


def describe(
    birth: Bad,
    records: Sequence[Bad],
    step: int,
    symptom: str,
    modules: Mapping[int, str],
    parameters: Mapping[int, str],
) -> Birthplace:
    """Put a birth into words; ``modules`` gives names by ``id``, ``parameters`` by storage."""
    followers: list[str] = []
    touched = {id(birth)}
    own = modules.get(birth.module, "")
    for record in records:
        if any(id(parent) in touched for parent in record.parents):
            touched.add(id(record))
            name = modules.get(record.module, "")
            if record.phase == birth.phase and name and name != own and name not in followers:
                followers.append(name)
    constants = [r for r in ancestors([birth]) if r.kind == "constant" and r is not birth]
    return Birthplace(
        step=step,
        phase=birth.phase,
        operation=birth.operation,
        value="NaN" if birth.nan else "infinity",
        symptom=symptom,
        line=birth.line,
        node=birth.node,
        backward_line=birth.own_line,
        module=own,
        shape=birth.shape,
        dtype=birth.dtype,
        born=birth.kind != "outside",
        parameter=parameters.get(birth.storage, ""),
        constant=constants[0].line if constants else None,
        modules=followers,
    )
