"""Records are read as pydantic reads them, whether pydantic takes part or not."""

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from backlight.exact_types import exact
from backlight.records import (
    Evidence,
    Finding,
    Fingerprint,
    Layout,
    ParameterRecord,
    Placement,
    Record,
    RunStatus,
    Severity,
    Subject,
    to_json,
)
from backlight.session.settings import Settings
from backlight.store.format.manifest import AttemptEntry, Manifest, Progress
from backlight.store.platform.process import ProcessIdentity

PROGRESS = Progress(RunStatus.RUNNING, ProcessIdentity(7, "host"), files={"rank-00000.db": {"steps": 3}})
RECORDS = [
    Placement(Layout.SHARD, (8, 4), (4, 4), (4, 0)),
    ParameterRecord("head.weight", (8, 4), "float32", "cpu", 32, aliases=("tied",), gradient=Placement()),
    Finding(
        severity=Severity.ERROR, title="t", detail="d", subject=Subject(step=3), refuted_if="r", fix="f",
        evidence=(Evidence("scalars/loss", 3, 1.5), Evidence("events", value=2), Evidence("x", value="NaN")),
        overridden={"limit": 0.5},
    ),
    Fingerprint("train.py", arguments=("--lr", "1"), modules=(("", "Linear"), ("head", "Linear"))),
    PROGRESS,
    Manifest("id", groups={"a": "b*"}, attempts=[AttemptEntry(index=0, step_offset=0, progress=PROGRESS)]),
]  # fmt: skip
OTHER = (None, True, 3, -1.5, "text", "7", [], ["x"], {}, {"x": 1}, [[1, 2], [3]])


def _changes(value: Any) -> Iterator[Any]:
    """Yield copies of ``value``, each with one part of another type, or missing."""
    yield from OTHER
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            for other in _changes(value[key]):
                changed = copy.copy(value)
                changed[key] = other
                yield changed
            shorter = copy.copy(value)
            del shorter[key]
            yield shorter
    if isinstance(value, dict):
        yield {**value, "of a newer backlight": 1}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_what_is_exact_is_read_as_pydantic_reads_it(record: Record) -> None:
    kind: Any = type(record)
    data = json.loads(json.dumps(to_json(record)))
    assert exact(kind, data) == kind.from_json(data) == record
    adapter = TypeAdapter(kind)
    refused = 0
    for changed in _changes(data):
        found = exact(kind, changed)
        try:
            expected = adapter.validate_python(changed)
        except ValidationError:
            refused += 1
            assert found is None
        else:
            assert found is None or (found == expected and repr(found) == repr(expected))
    assert refused > 10


def test_many_records_are_read_by_pydantic() -> None:
    data = to_json(RECORDS[1])
    assert all(ParameterRecord.from_json(data) == RECORDS[1] for _ in range(1000))
    with pytest.raises(ValueError, match="ParameterRecord: shape: "):
        ParameterRecord.from_json({**data, "shape": 3})


@pytest.mark.parametrize("rows", [0, 2, 400])
def test_lists_are_read_alike_at_any_length(rows: int) -> None:
    data = [to_json(RECORDS[1])] * rows
    assert ParameterRecord.tuple_from_json(json.dumps(data)) == (RECORDS[1],) * rows
    for wrong in ("{}", "3", "[3]", "[", json.dumps([*data, {**to_json(RECORDS[1]), "shape": 3}])):
        with pytest.raises(ValueError, match=r"ParameterRecord|Expecting|Invalid JSON"):
            ParameterRecord.tuple_from_json(wrong)


def test_settings_are_checked_as_before() -> None:
    assert exact(Settings, {"every": 2, "monitors": ("health",)}) == Settings(("health",), every=2)
    assert Settings.of({"every": "2"}) == Settings(every=2)
    with pytest.raises(ValueError, match="every: 0: expected 1 or more"):
        Settings.of({"every": 0})


def test_settings_and_records_need_no_pydantic() -> None:
    code = (
        "import sys\n"
        "from backlight.session.settings import Settings\n"
        "from backlight.store.platform.process import ProcessIdentity\n"
        "Settings.of({'quiet': True, 'every': 2, 'monitors': 'health'})\n"
        "ProcessIdentity.from_json({'pid': 3, 'host': 'a'})\n"
        "print('pydantic' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
