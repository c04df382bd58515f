"""From a non-finite loss, gradient or parameter back to where it was born, and how it spread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backlight.diagnose.nan.value_tracker import NonFiniteRecord
    from backlight.user_code import SourceLine


@dataclass
class NanOrigin:
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
    line: SourceLine | None = None
    node: str = ""
    backward_line: SourceLine | None = None
    module: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    born: bool = True
    parameter: str = ""
    constant: SourceLine | None = None
    modules: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def ancestors(symptoms: Iterable[NonFiniteRecord]) -> list[NonFiniteRecord]:
    """Return the records that led to ``symptoms``, themselves included, in order of time."""
    seen: dict[int, NonFiniteRecord] = {}
    stack = list(symptoms)
    while stack:
        record = stack.pop()
        if id(record) not in seen:
            seen[id(record)] = record
            stack.extend(record.parents)
    return sorted(seen.values(), key=lambda record: record.index)


def find_origin(symptoms: Iterable[NonFiniteRecord]) -> NonFiniteRecord | None:
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
    origin: NonFiniteRecord,
    records: Sequence[NonFiniteRecord],
    step: int,
    symptom: str,
    modules: Mapping[int, str],
    parameters: Mapping[int, str],
) -> NanOrigin:
    """Put a birth into words; ``modules`` gives names by ``id``, ``parameters`` by storage."""
    followers: list[str] = []
    touched = {id(origin)}
    own = modules.get(origin.module, "")
    for record in records:
        if any(id(parent) in touched for parent in record.parents):
            touched.add(id(record))
            name = modules.get(record.module, "")
            if record.phase == origin.phase and name and name != own and name not in followers:
                followers.append(name)
    constants = [r for r in ancestors([origin]) if r.kind == "constant" and r is not origin]
    return NanOrigin(
        step=step,
        phase=origin.phase,
        operation=origin.operation,
        value="NaN" if origin.nan else "infinity",
        symptom=symptom,
        line=origin.line,
        node=origin.node,
        backward_line=origin.own_line,
        module=own,
        shape=origin.shape,
        dtype=origin.dtype,
        born=origin.kind != "outside",
        parameter=parameters.get(origin.storage, ""),
        constant=constants[0].line if constants else None,
        modules=followers,
    )
