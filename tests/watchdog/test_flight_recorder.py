"""Dumps of torch's flight recorder: nothing in them is executed; results agree with torch's analyzer."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from backlight.records import DiagnosisKind
from backlight.watchdog.collectives import Dump, find_mismatches, find_waits
from backlight.watchdog.decision import decide_dumps
from backlight.watchdog.flight_recorder import DumpError, parse_dump, read_dump, read_dumps
from backlight.watchdog.observation import IssuedCollectives, Observation
from backlight.watchdog.text import Diagnosis, describe
from flight_dumps import dumped, entry, write


def parsed(*ranks: list[dict[str, Any]]) -> dict[int, Dump]:
    return {r: parse_dump(r, dumped(*entries, world=len(ranks))) for r, entries in enumerate(ranks)}


def diagnose_collectives(dumps: dict[int, Dump]) -> Diagnosis:
    observations = [Observation(rank, issued=IssuedCollectives(dump=dump)) for rank, dump in dumps.items()]
    return describe(decide_dumps(observations)[0])


OK = [entry()]
BROADCASTS = [entry("broadcast"), entry("broadcast"), entry("coalesced", inputs=((),))]
UNEVEN = [entry("_broadcast_oop"), entry("_broadcast_oop"), entry("ALLGATHER_coalesced", inputs=((),))]
OTHER = [
    entry("_broadcast_oop"),
    entry("_broadcast_oop", inputs=((5, 5),)),
    entry("ALLGATHER_coalesced", inputs=((),)),
]
REDUCES = [entry("_reduce_oop"), entry("_reduce_oop"), entry("REDUCE_SCATTER_coalesced", inputs=((),))]

EXAMPLES = {
    # The cases of torch's own tests of its analyzer, and the examples of its tutorial.
    "all_reduce": (OK, OK),
    "coalesced all_reduce": ([entry("allreduce_coalesced")], [entry("allreduce_coalesced")]),
    "two broadcasts": (BROADCASTS, BROADCASTS),
    "uneven all-gather": (UNEVEN, OTHER),
    "reduce scatter": (REDUCES, REDUCES),
    "empty coalesced": (OK, [entry(), *REDUCES]),
    "operation": (OK, [entry("all_gather", outputs=((8, 4),))]),
    "input sizes": (OK, [entry(inputs=((5, 4),), outputs=((5, 4),))]),
    "dtype": (OK, [entry(dtype="float16")]),
    "gather": (
        [entry("gather", outputs=((4, 4), (4, 4)))],
        [entry("gather", outputs=((),))],
    ),
    "second collective": ([entry(), entry(number=2)], [entry(), entry("broadcast", number=2)]),
    "in two groups": (
        [entry(), entry(number=1, group="1"), entry(number=2)],
        [entry(), entry(number=1, group="1"), entry(number=2)],
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_agrees_with_the_analyzer_of_torch(name: str) -> None:
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    details = {
        f"rank_{rank}": {**json.loads(json.dumps(dumped(*entries))), "rank": rank, "host_name": f"h{rank}"}
        for rank, entries in enumerate(EXAMPLES[name])
    }
    options = argparse.Namespace(
        allow_incomplete_ranks=False, mismatch_cap=10, just_print_entries=False, selected_ranks=None,
        pg_filters=None, print_stack_trace=False, verbose=False,
    )  # fmt: skip
    found = builder.build_db(details, options, "2.8")
    passes = all(c.pass_check and not c.missing_ranks for c in found.collectives)
    assert (next(find_mismatches(parsed(*EXAMPLES[name])), None) is None) is passes


def test_rank_without_a_call_is_the_cause_as_for_the_analyzer_of_torch() -> None:
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    ranks = (
        [entry(), entry(number=2, state="started")],
        [entry()],
        [entry(), entry(number=2, state="started")],
    )
    details = {
        f"rank_{rank}": {**dumped(*entries, world=3), "rank": rank, "host_name": "h"}
        for rank, entries in enumerate(ranks)
    }
    options = argparse.Namespace(
        allow_incomplete_ranks=False, mismatch_cap=10, just_print_entries=False, selected_ranks=None,
        pg_filters=None, print_stack_trace=False, verbose=False,
    )  # fmt: skip
    missing = {
        c.collective_seq_id: c.missing_ranks for c in builder.build_db(details, options, "2.8").collectives
    }
    (wait,) = find_waits(parsed(*ranks))
    assert missing[wait.call.number] == {1} == set(wait.absent)
    diagnosis = diagnose_collectives(parsed(*ranks))
    assert diagnosis is not None
    assert (diagnosis.kind, diagnosis.rank) == (DiagnosisKind.BLOCKED, 1)
    assert "rank 1 has not issued all_reduce(4x4 float32) #2, in which rank 0, 2 wait" in diagnosis.claim


def test_completed_collectives_have_no_diagnosis() -> None:
    assert diagnose_collectives(parsed(OK, OK)).kind is DiagnosisKind.PASS
    ahead = [entry(), entry(number=2)]  # a rank that is ahead waits for no one
    assert diagnose_collectives(parsed(ahead, OK)).kind is DiagnosisKind.PASS


def test_device_that_has_not_started_is_named() -> None:
    started, scheduled = ([entry(state=state)] for state in ("started", "scheduled"))
    diagnosis = diagnose_collectives(parsed(started, scheduled, started))
    assert diagnosis is not None
    assert (diagnosis.kind, diagnosis.rank) == (DiagnosisKind.BLOCKED, 1)
    assert "its device has not started it" in diagnosis.claim
    everywhere = diagnose_collectives(parsed(started, started, started))
    assert everywhere is not None
    assert everywhere.rank is None


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    first = [entry(state="started", group="1"), entry(number=1, state="scheduled")]
    diagnosis = diagnose_collectives(parsed([first[0]], [entry(state="started")], [entry(state="started")]))
    assert diagnosis is not None
    assert (diagnosis.kind, diagnosis.rank) == (DiagnosisKind.MISMATCH, 0)
    assert "#1 of group pair [0, 1]" in diagnosis.claim


def test_group_that_was_made_again_starts_anew() -> None:
    ranks = [[entry(number=1), entry(number=2), entry("barrier", number=1, inputs=())] for _ in range(2)]
    ranks[1].insert(0, entry("broadcast", number=1))
    assert list(find_mismatches(parsed(*ranks))) == []


def test_overwritten_buffer_is_no_missing_call() -> None:
    dump = dumped(entry(number=7, state="started"), entry(number=8, state="started"))
    other = dumped(entry(number=1, group="1"))
    other["entries"][0]["record_id"] = 900  # its calls of the first group may have been overwritten
    (wait,) = find_waits({0: parse_dump(0, dump), 1: parse_dump(1, other)})
    assert wait.absent == ()


# Files


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "pickle"])
def test_dumps_are_read(as_json: bool, tmp_path: Path) -> None:
    frames = [
        {"filename": "/home/me/train.py", "line": 12, "name": "main"},
    ]
    for rank in range(2):
        state = "started" if rank else "completed"
        write(tmp_path, rank, dumped(entry(state=state, frames=frames)), as_json=as_json)
    (tmp_path / "notes.txt").write_text("not a dump")
    found = read_dumps(tmp_path)
    assert list(found) == [0, 1]
    (record,) = found[1].records
    assert (record.line, record.started, record.completed) == ("/home/me/train.py:12", True, False)
    assert record.text == "all_reduce(4x4 float32) #1"


class Evil:
    """An object whose unpickling would run a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_pickle_that_names_a_function_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    path = write(tmp_path, 0, {"entries": [Evil(marker)]})
    with pytest.raises(DumpError, match=r"rank_0: refused: it names \w+\.mkdir; a dump holds only plain"):
        read_dump(path, 0)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "expected a dump of the flight recorder"),
        (b"{", "expected a dump of the flight recorder"),
        (b"[]", "expected"),
        (b'{"entries": [{}]}', "expected `entries` of torch's flight recorder, got KeyError"),
        (b'{"entries": 7}', "expected `entries`"),
        (b"\x80\x02cos\nsystem\n.", "refused: it names os.system"),
        (b"\x80\x02\x82\x01.", "expected a dump"),
        (b"\x80\x02Uabc", "expected a dump"),
        # An index of two thousand million, for which the reader in C would reserve memory.
        (b"\x80\x02}r\xff\xff\xff\x7f.", "expected `entries`"),
        (b"\x80\x02P1\n.", "refused: it refers to objects outside"),
        (b"\x80\x02Vx\nQ.", "refused: it refers to objects outside"),
    ],
)
def test_damaged_dump_is_one_clear_error(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "dump_0"
    path.write_bytes(content)
    with pytest.raises(DumpError, match=f"dump_0: {re.escape(words)}"):
        read_dump(path, 0)


def test_directory_without_dumps_and_rank_twice(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="no dump of the flight recorder; expected one file per rank"):
        read_dumps(tmp_path)
    write(tmp_path, 1, dumped(entry()))
    (tmp_path / "other_1").write_bytes(b"")
    with pytest.raises(DumpError, match="nccl_trace_rank_1 and other_1 are both of rank 1"):
        read_dumps(tmp_path)
