"""The report of a matrix as one frozen record, which ``matrix.json`` holds and every form is made from."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backlight.diagnose.matrix.comparison import Comparison, Effect
from backlight.diagnose.matrix.directory import FORMAT, REPORT, MatrixFolderError
from backlight.diagnose.matrix.evaluation import Judgement
from backlight.diagnose.matrix.observations import Kept, Missing
from backlight.diagnose.matrix.tree import Branch, Standing
from backlight.records import DiagnosisKind


@dataclass(frozen=True, slots=True)
class CaseReport:
    """One case: what was started, what is said of it, and where its evidence lies."""

    name: str
    control: str
    factor: str
    command: str
    directory: str
    environment: Mapping[str, str]
    branch: str
    seconds: float
    limit: float
    attempt: str
    judgement: Judgement
    files: tuple[Kept, ...]
    missing: tuple[Missing, ...]
    tail: tuple[str, ...]
    ended_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Todo:
    """One thing to do next: where, why, and the command that shows whether it helped."""

    do: str
    at: str
    why: str
    verify: str


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """Everything that a reader of a matrix is told. ``not_run`` names cases without a result."""

    name: str
    plan: str
    made: str
    environment: Mapping[str, str]
    cases: tuple[CaseReport, ...]
    comparisons: tuple[Comparison, ...]
    branches: tuple[Branch, ...]
    open: tuple[str, ...]
    actions: tuple[Todo, ...]
    verify: tuple[str, ...]
    not_run: tuple[str, ...] = ()
    format: int = FORMAT

    @property
    def headline(self) -> str:
        """The conclusions that the evidence supports, or how many cases have which verdict."""
        supported = [b.conclusion for b in self.branches if b.conclusion and b.standing is Standing.SUPPORTED]
        if supported:
            return "; ".join(supported)
        counts: dict[str, int] = {}
        for case in self.cases:
            counts[case.judgement.verdict.value] = counts.get(case.judgement.verdict.value, 0) + 1
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no case has run"
        return f"{told}; no conclusion of the plan's tree is supported" if self.branches else told


def read_report(folder: Path) -> MatrixReport:
    """Read the report that stands in the folder of a matrix.

    Raises
    ------
    MatrixFolderError
        If there is none, or it cannot be read.
    """
    path = folder / REPORT
    try:
        document = json.loads(path.read_bytes())
        found = document["format"]
        report = _build(MatrixReport, document) if found == FORMAT else None
    except OSError as error:
        raise MatrixFolderError(f"{path}: cannot be read: {error.strerror}; is {folder} a matrix?") from None
    except (KeyError, TypeError, ValueError) as error:
        raise MatrixFolderError(f"{path}: is damaged or no report of a matrix: {error!r}") from None
    if report is None:
        raise MatrixFolderError(f"{path}: format {found}, this release reads {FORMAT}; upgrade backlight")
    return typing.cast(MatrixReport, report)


_ENUMERATIONS = (DiagnosisKind, Effect, Standing)


def _build(kind: Any, value: Any) -> Any:
    """Turn plain JSON into the records that the annotations of ``kind`` name."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(
            **{
                f.name: _build(hints[f.name], value[f.name])
                for f in dataclasses.fields(kind)
                if f.name in value
            }
        )
    if kind in _ENUMERATIONS:
        return kind(value)
    if typing.get_origin(kind) is tuple:
        return tuple(_build(typing.get_args(kind)[0], entry) for entry in value)
    return value
