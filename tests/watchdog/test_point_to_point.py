"""Sends and receives in dumps of the flight recorder, as pipelines issue them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backlight.records import DiagnosisKind
from backlight.watchdog.attach import attach_dumps

BATCH, OPEN, DONE = "coalesced", "started", "completed"


class Rank:
    """Entries of one rank as torch writes them: of a batch, only the entry that ends it has a state."""

    def __init__(self, place: int, ranks: Sequence[int], first_record: int = 0) -> None:
        self.place, self.ranks = place, ranks
        self.entries: list[dict[str, Any]] = []
        self._number = self._collectives = 0
        self._first = first_record

    def _add(self, name: str, state: str, size: Sequence[int], dtype: str, *, is_paired: bool) -> None:
        place = self._first + len(self.entries)
        self.entries.append(
            {
                "record_id": place, "process_group": ("1", "mesh_pp"), "profiling_name": f"nccl:{name}",
                "collective_seq_id": self._collectives, "p2p_seq_id": self._number, "is_p2p": is_paired,
                "input_sizes": [list(size)] if name != BATCH else [], "input_dtypes": [dtype],
                "output_sizes": [list(size)] if name != BATCH else [], "output_dtypes": [dtype],
                "state": state, "time_created_ns": 1000 * place, "retired": state == DONE,
            }
        )  # fmt: skip

    def _name(self, kind: str, peer: int) -> str:
        return f"{kind} {self.place}{'->' if kind == 'send' else '<-'}{peer}"

    def single(
        self, kind: str, peer: int, state: str = DONE, size: Sequence[int] = (8, 4), dtype: str = "Float"
    ) -> Rank:
        self._number += 1
        self._add(self._name(kind, peer), state, size, dtype, is_paired=True)
        return self

    def batch(self, *calls: tuple[str, int], state: str = DONE) -> Rank:
        self._number += 1
        for kind, peer in calls:
            self._add(self._name(kind, peer), "scheduled", (8, 4), "Float", is_paired=True)
        self._add(BATCH, state, (), "Float", is_paired=True)
        return self

    def reduced_in_batch(self, state: str = DONE) -> Rank:
        self._collectives += 1
        for _ in range(2):
            self._add("all_reduce", "scheduled", (16,), "Float", is_paired=False)
        self._add(BATCH, state, (), "Float", is_paired=False)
        return self

    def collective(self, name: str, inputs: Any, outputs: Any, state: str = DONE) -> Rank:
        self._collectives += 1
        self._add(name, state, (), "Float", is_paired=False)
        self.entries[-1] |= {"input_sizes": inputs, "output_sizes": outputs}
        return self


def ranks_of(count: int, numbers: Sequence[int] | None = None, **options: Any) -> list[Rank]:
    return [Rank(place, numbers or range(count), **options) for place in range(count)]


def diagnosed(ranks: Sequence[Rank], folder: Path) -> tuple[DiagnosisKind, int | None, str]:
    for rank in ranks:
        config = {"1": {"name": "1", "desc": "mesh_pp", "ranks": str(list(rank.ranks))}}
        data = {"version": "2.10", "pg_config": config, "entries": rank.entries}
        (folder / f"nccl_trace_rank_{rank.ranks[rank.place]}").write_text(json.dumps(data))
    found = attach_dumps(folder).diagnosis
    return found.kind, found.rank, found.claim


def pipeline(count: int, microbatches: int, *, in_batches: bool) -> list[Rank]:
    """Each stage passes activations on and gradients back: the stages differ in the number of their calls."""
    ranks = ranks_of(count)
    for rank in ranks:
        before, after = rank.place - 1, rank.place + 1
        for first, second in (((before, "recv"), (after, "send")), ((after, "recv"), (before, "send"))):
            for _ in range(microbatches):
                for peer, kind in (first, second):
                    if 0 <= peer < count:
                        rank.batch((kind, peer)) if in_batches else rank.single(kind, peer)
    return ranks


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("in_batches", [False, True])
def test_pipeline_that_has_completed_passes(count: int, in_batches: bool, tmp_path: Path) -> None:
    kind, _, claim = diagnosed(pipeline(count, 4, in_batches=in_batches), tmp_path)
    assert kind is DiagnosisKind.PASS, claim


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("kind", ["send", "recv"])
def test_stage_that_has_not_issued_the_other_half_is_the_cause(
    kind: str, in_batches: bool, tmp_path: Path
) -> None:
    ranks = pipeline(3, 4, in_batches=in_batches)
    if in_batches:
        ranks[0].batch((kind, 1), state=OPEN)
    else:
        ranks[0].single(kind, 1, OPEN)
    found, rank, claim = diagnosed(ranks, tmp_path)
    assert (found, rank) == (DiagnosisKind.BLOCKED, 1)
    other = "receive" if kind == "send" else "send"
    words = "to" if kind == "send" else "from"
    assert f"rank 1 has not issued the {other} for {kind}(8x4 float32) {words} rank 1 #9" in claim
    assert "in which rank 0 waits" in claim


def test_chain_of_waits_ends_at_its_cause(tmp_path: Path) -> None:
    ranks = ranks_of(4)
    for rank in ranks[:3]:
        rank.single("recv", rank.place + 1, OPEN)
    found, rank, claim = diagnosed(ranks, tmp_path)
    assert (found, rank) == (DiagnosisKind.BLOCKED, 3), claim
    assert "it has issued none there" in claim


def test_ranks_that_both_send_first_wait_for_each_other(tmp_path: Path) -> None:
    ranks = ranks_of(2)
    for rank in ranks:
        rank.single("send", 1 - rank.place, OPEN).single("recv", 1 - rank.place, "scheduled")
    found, _, claim = diagnosed(ranks, tmp_path)
    assert found is DiagnosisKind.MISMATCH
    assert "rank 0 waits in send(8x4 float32) to rank 1" in claim
    assert "rank 1 waits in send(8x4 float32) to rank 0" in claim


def test_ranks_that_send_and_receive_in_one_batch_do_not_wait_for_each_other(tmp_path: Path) -> None:
    ranks = ranks_of(2)
    for rank in ranks:
        rank.batch(("send", 1 - rank.place), ("recv", 1 - rank.place), state=OPEN)
    found, rank, claim = diagnosed(ranks, tmp_path)
    assert (found, rank) == (DiagnosisKind.BLOCKED, None)
    assert "all observed ranks have issued send(8x4 float32) to rank 1 #1" in claim


def test_call_behind_an_open_one_is_issued(tmp_path: Path) -> None:
    """Rank 2 waits for rank 1, which has issued the call, and whose stream waits for rank 0."""
    ranks = ranks_of(3)
    ranks[1].batch(("recv", 0), state=OPEN).batch(("send", 2), state="scheduled")
    ranks[2].batch(("recv", 1), state=OPEN)
    found, rank, claim = diagnosed(ranks, tmp_path)
    assert (found, rank) == (DiagnosisKind.BLOCKED, 0), claim
    assert "rank 0 has not issued the send for recv(8x4 float32) from rank 0 #1" in claim


@pytest.mark.parametrize(
    ("other", "words"), [({"size": (4, 4)}, "sizes"), ({"dtype": "BFloat16"}, "dtypes")], ids=str
)
def test_pair_that_differs_is_a_mismatch(other: dict[str, Any], words: str, tmp_path: Path) -> None:
    ranks = pipeline(2, 2, in_batches=False)
    ranks[0].single("send", 1, OPEN)
    ranks[1].single("recv", 0, OPEN, **other)
    found, _, claim = diagnosed(ranks, tmp_path)
    assert found is DiagnosisKind.MISMATCH
    assert f"the {words} of the ranks differ: rank 0 send(8x4 float32) to rank 1; rank 1 recv(" in claim


def test_other_shape_of_as_many_elements_is_none(tmp_path: Path) -> None:
    ranks = ranks_of(2)
    ranks[0].single("send", 1, size=(8, 4))
    ranks[1].single("recv", 0, size=(32,))
    assert diagnosed(ranks, tmp_path)[0] is DiagnosisKind.PASS


def test_ranks_are_those_of_the_job(tmp_path: Path) -> None:
    ranks = ranks_of(2, [2, 6])
    ranks[0].single("recv", 1, OPEN)
    found, rank, claim = diagnosed(ranks, tmp_path)
    assert (found, rank) == (DiagnosisKind.BLOCKED, 6)
    assert "from rank 6 #1 of group mesh_pp [2, 6]" in claim


@pytest.mark.parametrize("lost", [(0, 700), (300, 0), (300, 700)])
def test_calls_that_were_overwritten_are_not_missing(lost: tuple[int, int], tmp_path: Path) -> None:
    ranks = [Rank(place, range(2), first_record=first) for place, first in enumerate(lost)]
    for _ in range(3):
        ranks[0].single("send", 1)
    for _ in range(2):
        ranks[1].single("recv", 0)
    assert diagnosed(ranks, tmp_path)[0] is DiagnosisKind.PASS
    ranks[0].single("send", 1, OPEN)
    found, rank, _ = diagnosed(ranks, tmp_path)
    assert (found, rank) == (DiagnosisKind.BLOCKED, 1)
    ranks[1].single("recv", 0, OPEN)
    found, rank, _ = diagnosed(ranks, tmp_path)
    assert (found, rank) == (DiagnosisKind.BLOCKED, None)


def test_rank_without_a_dump_may_be_the_cause(tmp_path: Path) -> None:
    ranks = ranks_of(3)
    ranks[0].single("recv", 2, OPEN)
    found, rank, claim = diagnosed(ranks[:2], tmp_path)
    assert (found, rank) == (DiagnosisKind.BLOCKED, None)
    assert "rank 2 left no dump, so the cause may be there" in claim


def test_batch_of_collectives_has_the_state_of_its_end(tmp_path: Path) -> None:
    ranks = ranks_of(2)
    for rank in ranks:
        rank.reduced_in_batch()
    assert diagnosed(ranks, tmp_path)[0] is DiagnosisKind.PASS
    ranks[0].reduced_in_batch(OPEN)
    found, rank, claim = diagnosed(ranks, tmp_path)
    assert (found, rank) == (DiagnosisKind.BLOCKED, 1)
    assert "rank 1 has not issued all_reduce(16 float32) #2" in claim


@pytest.mark.parametrize(
    ("name", "parts_are_outputs"), [("all_gather", True), ("reduce_scatter", False)], ids=str
)
def test_parts_of_ranks_may_have_sizes_of_their_own(
    name: str, parts_are_outputs: bool, tmp_path: Path
) -> None:
    ranks = ranks_of(3)
    parts = [[10 + rank.place] for rank in ranks]

    def issue(rank: Rank, parts: list[list[int]]) -> None:
        own = [parts[rank.place]]
        rank.collective(name, *((own, parts) if parts_are_outputs else (parts, own)))

    for rank in ranks:
        issue(rank, parts)
    assert diagnosed(ranks, tmp_path)[0] is DiagnosisKind.PASS
    for rank in ranks:
        issue(rank, [[7], *parts[1:]] if rank.place == 2 else parts)
    found, at, _ = diagnosed(ranks, tmp_path)
    assert (found, at) == (DiagnosisKind.MISMATCH, 2)


def test_open_call_never_passes(tmp_path: Path) -> None:
    """Also one of a group that was destroyed and made again, where no rank is missing."""
    ranks = ranks_of(2)
    for rank in ranks:
        rank.collective("all_reduce", [[4]], [[4]]).collective("all_reduce", [[4]], [[4]], OPEN)
        rank._collectives = 0
        rank.collective("barrier", [[1]], [[1]])
    found, _, claim = diagnosed(ranks, tmp_path)
    assert found is DiagnosisKind.UNKNOWN
    assert "2 of 6 recorded collectives have not completed" in claim
