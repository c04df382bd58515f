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
from backlight.analysis.side_by_side import Row
from backlight.cli.doctor import Check
from backlight.codec import NOT_FINITE
from backlight.diagnose.memory.result import MeasuredMemory, PredictedMemory
from backlight.diagnose.profile.result import ProfileResult
from backlight.diagnose.scaling.sweep import Scaling
from backlight.diagnose.test_matrix.report import MatrixReport
from backlight.findings.evaluate import Withdrawn
from backlight.monitors.grokking.model.lead_lag import LeadLag
from backlight.monitors.grokking.model.reader import Stated
from backlight.monitors.grokking.model.verdicts import Detection
from backlight.monitors.steptime.model.step_comparison import TimeComparison, TimeRow
from backlight.records import Finding
from backlight.store.format.spectra import NUMBERS
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


class _Line(TypedDict):
    line: str
    function: str
    source: str


class _Ended(TypedDict):
    script: str
    exit_code: int
    notes: list[str]


class _Remark(TypedDict):
    kind: str
    text: str
    place: _Line | None


class _Region(TypedDict):
    function: str
    reentrant: bool
    mode: str
    preserve_rng_state: bool
    place: _Line | None
    calls: int
    recomputations: int
    remarks: list[_Remark]


class _Regions(_Ended):
    steps: int
    backwards: int
    regions: list[_Region]


class _Probe(TypedDict):
    probe: str
    outcome: str
    text: str


class _Probes(_Ended):
    place: _Line | None
    loss: float | None
    probes: list[_Probe]
    findings: NotRequired[list[Finding]]


class _Findings(TypedDict):
    """``lacks`` is what the run lacks of a recording to its end, empty where it lacks nothing."""

    verdict: str
    lacks: str
    findings: list[Finding]
    withdrawn: list[Withdrawn]


class _Untrained(TypedDict):
    parameter: str
    aliases: list[str]
    shape: list[int]
    cause: str
    text: str
    place: _Line | None
    found: str


class _Failure(TypedDict):
    text: str
    place: _Line | None
    saved: _Line | None


class _Missing(_Ended):
    parameters: int
    steps: int
    backwards: int
    nodes: int
    not_trained: list[_Untrained]
    failure: _Failure | None


class _Origin(_Ended):
    steps: int
    backwards: int
    operations: int
    skipped_by_scaler: int
    found: Mapping[str, Any] | None
    vanished: Mapping[str, int]


class _StepSamples(TypedDict):
    step: int
    text: str
    decomposed: list[Mapping[str, Any]]


class _Variation(TypedDict):
    deviation: float
    measured: bool


_Times = _with(
    TimeComparison, verdict=str, basis=str, rows=_list(_with(TimeRow, verdict=str)), variation=_Variation
)  # fmt: skip
_Rows = _list(_with(Row, texts=list[str]))
_Comparison = _with(Comparison, rows=_Rows, parameters=_Rows, times=_list(_Times), kinds=_Times | None)


class _Interval(TypedDict):
    value: float | None
    low: float | None
    high: float | None


class _Spectrum(TypedDict):
    eigenvalues: list[float | None]
    trace: float | None
    frobenius: float | None
    spectral: float | None
    nuclear: float | None
    participation_ratio: float | None
    numerical_rank: float | None
    condition: float | None
    log_pseudo_determinant: float | None
    effective_rank: float | None
    coherence: NotRequired[float | None]
    noise_scale: NotRequired[float | None]
    explained_1: float | None
    explained_10: NotRequired[float | None]


class _Gram(TypedDict):
    recipe: str
    samples: int
    parameters: int
    loss: float | None
    unchecked: str | None
    second_moment: _Spectrum
    covariance: _Spectrum
    blocks: Mapping[str, _Spectrum]
    noise_scales: Mapping[str, _Interval]


class _Checkpoint(TypedDict):
    step: int
    path: str | None


class _Layer(TypedDict):
    parameter: str
    step: int
    shape: list[int]
    split_of: str | None
    method: str


class _Spectra(TypedDict):
    run: str
    world_size: int
    checkpoints: list[_Checkpoint]
    measured: int
    measured_before: int
    sweeps: int
    samples_per_replicate: float | None
    left_out: Mapping[str, str]
    noise_scale: _Interval | None


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
    "attach": Attached | AttachedDumps | AttachedJob,
    "check": _Probes | _Regions,
    "compare": _Comparison | _with(ABTest, times=_Times) | _Overlaid,
    "doctor": list[Check],
    "findings": _Findings | _StepSamples,
    "gram": _Gram,
    "grok detect": _list(_Grokking | _NotEvaluated),
    "grok list": list[_Experiment],
    "grok run": _Estimate,
    "ls": list[ListedRun],
    "memory measure": _answer(_without(MeasuredMemory, "account")),
    "memory predict": _answer(_without(PredictedMemory, "account")),
    "nan": _Origin,
    "profile": _answer(ProfileResult, findings=list[Finding]),
    "query": list[Mapping[str, Any]],
    "spectra": _with(_Spectra, layers=_list(_with(_Layer, **dict.fromkeys(NUMBERS, float | None)))),
    "sweep": Scaling,
    "test-matrix": MatrixReport,
    "trace": _with(Analysis, unit=str) | _with(TraceDiff, unit=str),
    "why-no-grad": _Missing,
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
