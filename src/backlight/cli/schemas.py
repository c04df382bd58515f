"""JSON schemas of what commands print with ``--json``, made from the types of their answers.

``python docs/write_schemas.py`` writes them to ``docs/schemas``, one file per command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import (
    Any,
    NotRequired,  # before Python 3.12 pydantic reads no other
)

from typing_extensions import TypedDict

from backlight.records import Finding


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


def answers() -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Return, by command, the type of its answer and the types of further printed fields."""
    from backlight.cli.doctor import Check
    from backlight.diagnose.memory.result import MeasuredMemory, PredictedMemory
    from backlight.diagnose.profile.result import ProfileResult
    from backlight.diagnose.scaling.sweep import Scaling
    from backlight.diagnose.test_matrix.report import MatrixReport
    from backlight.monitors.stalls.model.attach import Attached
    from backlight.monitors.stalls.model.attached_dumps import AttachedDumps
    from backlight.monitors.stalls.model.attached_job import AttachedJob
    from backlight.store.read.run_list import ListedRun
    from backlight.trace.analysis import Analysis
    from backlight.trace.trace_diff import TraceDiff

    unit = {"unit": str}
    return {
        "attach": (Attached | AttachedDumps | AttachedJob, {}),
        "check": (_Probes, {}),
        "checkpointing": (_Regions, {}),
        "doctor": (list[Check], {}),
        "findings": (list[Finding], {}),
        "ls": (list[ListedRun], {}),
        "memory": (MeasuredMemory | PredictedMemory, {}),
        "nan": (_Origin, {}),
        "profile": (ProfileResult, {"findings": list[Finding]}),
        "query": (list[Mapping[str, Any]], {}),
        "sweep": (Scaling, {}),
        "test-matrix": (MatrixReport, {}),
        "trace": (Analysis | TraceDiff, unit),
        "why-no-grad": (_Missing, {}),
    }


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON schema of what ``backlight COMMAND --json`` prints.

    Raises
    ------
    KeyError
        If none is published for ``command``.
    """
    from pydantic import TypeAdapter

    answer, further = answers()[command]
    schema = TypeAdapter(answer).json_schema(mode="serialization")
    for name, kind in further.items():
        more = TypeAdapter(kind).json_schema(mode="serialization")
        schema.setdefault("$defs", {}).update(more.pop("$defs", {}))
        parts = [schema] if "properties" in schema else _alternatives(schema)
        for part in parts:
            part["properties"][name] = more
            part["required"] = sorted({*part.get("required", ()), name})
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"backlight {command} --json"}
    return {**schema, **head}


def _alternatives(schema: Mapping[str, Any]) -> list[Any]:
    if "$ref" in schema:
        return [schema["$defs"][schema["$ref"].rpartition("/")[2]]]
    return [schema["$defs"][one["$ref"].rpartition("/")[2]] for one in schema["anyOf"]]
