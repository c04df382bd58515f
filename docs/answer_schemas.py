"""JSON schemas of what commands print with ``--json``, made from the types of their answers.

``python docs/answer_schemas.py`` writes them to ``docs/schemas``, one file per command.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import GenericAlias
from typing import Any, ClassVar, NotRequired, get_origin, get_type_hints

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # before Python 3.12 pydantic reads no other

from backlight.analysis.ab_test import ABTest
from backlight.analysis.compare import Comparison
from backlight.analysis.reference import Reference
from backlight.cli.doctor import Requirement
from backlight.codec import NOT_FINITE
from backlight.diagnose.explanations import Missing, NonFinite, Probes, Regions
from backlight.diagnose.memory.result import MeasuredMemory, PredictedMemory
from backlight.diagnose.profile.result import ProfileResult
from backlight.diagnose.recipe_gram import GramRecord
from backlight.diagnose.scaling.sweep import Scaling
from backlight.diagnose.spectra.run import SpectraRecord
from backlight.diagnose.test_matrix.report import MatrixReport
from backlight.findings.evaluate import Withdrawn
from backlight.monitors.grokking.model.lead_lag import LeadLag
from backlight.monitors.grokking.model.reader import Stated
from backlight.monitors.grokking.model.verdicts import Detection
from backlight.monitors.health.panels.samples import StepSamples
from backlight.records import Finding
from backlight.store.read.run_list import ListedRun
from backlight.trace.analysis import Analysis
from backlight.trace.trace_diff import TraceDiff
from backlight.watchdog.attach import Attached, AttachedDumps, AttachedJob

FOLDER = Path(__file__).parent / "schemas"


def _with(kind: Any, name: str = "", /, **fields: Any) -> Any:
    """Return the type of an object with the fields of ``kind``, and ``fields`` as well or instead."""
    hints = get_type_hints(kind, include_extras=True)
    own = {field: hint for field, hint in hints.items() if get_origin(hint) is not ClassVar}
    found: Any = TypedDict(name or kind.__name__, {**own, **fields})  # type: ignore[misc]  # not a literal
    found.__doc__ = kind.__doc__
    return found


def _without(kind: Any, field: str) -> Any:
    """Return the type of an object with the fields of ``kind`` except one."""
    hints = {name: hint for name, hint in get_type_hints(kind, include_extras=True).items() if name != field}
    found: Any = TypedDict(kind.__name__, hints)  # type: ignore[misc]  # not a literal
    found.__doc__ = kind.__doc__
    return found


def _answer(kind: Any, name: str = "", /, **fields: Any) -> Any:
    """Return the type of an :class:`~backlight.answer.Answer` whose record is of ``kind``."""
    return _with(kind, name, verdict=str, facts=list[str], **fields)


def _list(kind: Any) -> Any:
    return GenericAlias(list, (kind,))


class _Findings(TypedDict):
    """``lacks`` is what the run lacks of a recording to its end, empty where it lacks nothing."""

    verdict: str
    lacks: str
    findings: list[Finding]
    withdrawn: list[Withdrawn]


class _Experiment(TypedDict):
    name: str
    title: str
    arxiv: str
    paper: str
    claim: str
    unclear: str
    effect: str
    expects: str
    ci_expects: str


class _Experiments(TypedDict):
    experiments: list[_Experiment]


class _Part(TypedDict):
    name: str
    times: int
    seconds: float
    disk_bytes: int
    memory_bytes: int


class _Tier(TypedDict):
    fits: bool
    reason: str
    disk_bytes: int


class _Estimate(TypedDict):
    parts: list[_Part]
    seconds: float
    disk_bytes: int
    memory_bytes: int
    free_disk_bytes: int
    reserve_bytes: int
    free_memory_bytes: int
    tiers: Mapping[str, _Tier]
    tier: str
    left_out: list[str]


_Grokking = _with(
    Detection, "Grokking", run=str, name=str, facts=Stated, controls=list[str], seeds=list[str], needed=int,
    control=_with(Detection, "Control", run=str) | None, following=list[LeadLag],
    change_points=list[int] | None,
)  # fmt: skip


class _NotEvaluated(TypedDict):
    run: str
    error: str


class _OverlaidRun(TypedDict):
    run: str
    facts: Stated
    verdict: Detection | None
    reason: str | None


class _Curve(TypedDict):
    steps: list[int]
    values: list[float | None]


class _Overlaid(TypedDict):
    aligned: bool
    left_out: list[str]
    runs: Mapping[str, _OverlaidRun]
    measures: Mapping[str, Mapping[str, _Curve]]


ANSWERS: Mapping[str, Any] = {
    "attach": _answer(Attached) | _answer(AttachedDumps) | _answer(AttachedJob),
    "check": _answer(Probes, findings=NotRequired[list[Finding]]) | _answer(Regions),
    "compare": _answer(Comparison) | _answer(Reference) | _answer(ABTest) | _answer(_Overlaid),
    "doctor": list[Requirement],
    "findings": _Findings | _answer(StepSamples),
    "gram": _answer(GramRecord),
    "grok detect": _list(_Grokking | _NotEvaluated),
    "grok list": _answer(_Experiments),
    "grok run": _answer(_Estimate),
    "ls": list[ListedRun],
    "memory measure": _answer(_without(MeasuredMemory, "account")),
    "memory predict": _answer(_without(PredictedMemory, "account")),
    "nan": _answer(NonFinite),
    "profile": _answer(ProfileResult, findings=list[Finding]),
    "query": list[Mapping[str, Any]],
    "spectra": _answer(SpectraRecord),
    "sweep": _answer(Scaling),
    "test-matrix": _answer(MatrixReport),
    "trace": _answer(Analysis) | _answer(TraceDiff),
    "why-no-grad": _answer(Missing),
}
"""Type of the answer by command."""


_NUMBER = {"anyOf": [{"type": "number"}, {"enum": list(NOT_FINITE)}]}


def _numbers(schema: Any) -> Any:
    """Return a schema whose numbers may be the name of one that JSON does not have."""
    if isinstance(schema, list):
        return [_numbers(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "number":
        return {**{key: part for key, part in schema.items() if key != "type"}, "$ref": "#/$defs/number"}
    return {key: _numbers(part) for key, part in schema.items()}


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON schema of what ``backlight COMMAND --json`` prints; KeyError for another command."""
    schema = TypeAdapter(ANSWERS[command]).json_schema(mode="serialization")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"backlight {command} --json"}
    numbers: dict[str, Any] = _numbers(schema)
    if numbers != schema:
        numbers["$defs"] = {**numbers.get("$defs", {}), "number": _NUMBER}
    return {**numbers, **head}


def file_name(command: str) -> str:
    """Return the name of the file of a command's schema."""
    return f"{command.replace(' ', '-')}.json"


def as_text(schema: dict[str, Any]) -> str:
    """Return what a file holds."""
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for command in ANSWERS:
        (FOLDER / file_name(command)).write_text(as_text(schema_of(command)))
