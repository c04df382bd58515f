"""Records become JSON and are read back; what is none is refused in one line."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from backlight import codec
from backlight.records import (
    Evidence,
    Finding,
    Fingerprint,
    Layout,
    ParameterRecord,
    Placement,
    RunStatus,
    Severity,
    Subject,
)
from backlight.session.settings import Settings
from backlight.store.filesystem import ProcessIdentity
from backlight.store.format.manifest import AttemptEntry, Manifest, Progress

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


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_are_read_back_whatever_a_newer_release_added(record: Any) -> None:
    data = json.loads(codec.encode(record))
    assert codec.convert({**data, "of a newer release": 1}, type(record)) == record
    assert codec.convert(json.loads(codec.encode_row(record)), type(record)) == record


@dataclasses.dataclass(frozen=True)
class Numbers:
    x: float = 0.0
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    pairs: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x: expected 0 or more")


def test_numbers_that_are_not_finite_are_read_back() -> None:
    numbers = Numbers(math.inf, pairs=(("a", math.nan), ("b", -math.inf)))
    data = json.loads(codec.encode(numbers), parse_constant=pytest.fail)
    assert data["pairs"] == [["a", "NaN"], ["b", "-Infinity"]]
    again = codec.convert(data, Numbers)
    assert again.x == math.inf
    assert math.isnan(again.pairs[0][1])
    assert codec.encode({"measured": None}) == '{"measured": null}'


def test_arrays_sets_and_foreign_values_become_types_of_json() -> None:
    assert codec.plain({1: np.arange(2), "of": np.float32(0.5), "it": {3}, "path": math.pi + 1j}) == {
        "1": [0, 1], "of": 0.5, "it": [3], "path": str(math.pi + 1j),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        ({"x": "fast"}, Numbers, r"^Numbers: x: expected float, got 'fast'$"),
        ({"counts": {"a": 1.5}}, Numbers, r"^Numbers: counts: expected int, got 1.5$"),
        ({"counts": 3}, Numbers, r"^Numbers: counts: expected keys with values, got 3$"),
        ({"pairs": [["a", 1], ["b", None]]}, Numbers, r"^Numbers: pairs.1.1: expected float, got None$"),
        ({"x": -1}, Numbers, r"^Numbers: x: expected 0 or more$"),
        ([], Numbers, r"^Numbers: expected keys with values, got \[\]$"),
        ({"name": "a"}, ParameterRecord, r"^ParameterRecord: the key 'shape' is missing$"),
        ({"x": "a" * 99}, Numbers, r"got 'a{56}\.\.\.$"),
    ],
)
def test_other_values_are_refused_in_one_line(data: Any, kind: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codec.convert(data, kind)


def test_settings_name_the_file_and_the_key() -> None:
    with pytest.raises(ValueError, match=r"^settings: every: expected int \| null, got 'often'$"):
        Settings.of({"every": "often"})
