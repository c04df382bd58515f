"""Rules on how a training was run: threads, allocator, compiler, arguments."""

from __future__ import annotations

from typing import Any

from backlight.records import Severity

GIB = 2**30


def test_threads_of_all_ranks_against_cores(stored: Any, judged: Any) -> None:
    facts = {"cores": 16, "threads": 16, "local_ranks": 8, "workers": 2}
    (found,) = judged(stored(circumstances=facts), "thread_oversubscription")
    assert "144 threads want 16 cores: 8 ranks on this machine" in found.detail
    assert "OMP_NUM_THREADS=1 " in found.fix
    assert not judged(stored(circumstances=facts | {"threads": 1, "workers": 1}), "thread_oversubscription")
    assert not judged(
        stored(circumstances={"cores": 4, "threads": 4, "local_ranks": 1, "workers": 0}),
        "thread_oversubscription",
    )


def test_fragmentation_by_reserve_and_by_retries(stored: Any, judged: Any) -> None:
    apart = {"memory": {"reserved": 12 * GIB, "peak": 8 * GIB, "retries": 0}}
    (found,) = judged(stored(circumstances=apart), "memory_fragmentation")
    assert found.severity is Severity.INFO
    assert "held 12.0 GiB of the device and had 8.0 GiB in use: 4.0 GiB (33 %)" in found.detail
    again = {"memory": {"reserved": 12 * GIB, "peak": 11.9 * GIB, "retries": 3}}
    (other,) = judged(stored(circumstances=again), "memory_fragmentation")
    assert other.severity is Severity.WARNING
    assert "tried again 3 times" in other.detail
    sound = {"memory": {"reserved": 12 * GIB, "peak": 11 * GIB, "retries": 0}}
    assert not judged(stored(circumstances=sound), "memory_fragmentation")
    assert not judged(stored(circumstances={"memory": {"peak": 8 * GIB}}), "memory_fragmentation")


def test_graph_breaks_with_their_reasons(stored: Any, judged: Any) -> None:
    facts = {
        "compilation": {"graphs": 3, "graph_breaks": {"Tensor.item(): capture_scalar_outputs is off": 2}}
    }
    (found,) = judged(stored(circumstances=facts), "graph_breaks")
    assert (
        "Compilation broke 2 times, so that 3 graphs stand where fewer could: Tensor.item()" in found.detail
    )
    assert not judged(
        stored(circumstances={"compilation": {"graphs": 1, "graph_breaks": {}}}), "graph_breaks"
    )
    assert not judged(stored(circumstances={"compilation": None}), "graph_breaks")


def test_recompilations_beyond_the_usual_one(stored: Any, judged: Any) -> None:
    row = {
        "function": "forward",
        "line": "model.py:10",
        "count": 7,
        "seconds": 12.5,
        "reason": "size mismatch",
    }
    (found,) = judged(stored(circumstances={"compilation": {"recompiled": [row]}}), "recompilations")
    assert (
        "forward was compiled 7 times beyond the first, which took 12.5 s in all: size mismatch"
        in found.detail
    )
    assert found.subject.line == "model.py:10"
    usual = {"compilation": {"recompiled": [row | {"count": 1}]}}
    assert not judged(stored(circumstances=usual), "recompilations")


def test_skipped_cuda_graphs_with_their_reason(stored: Any, judged: Any) -> None:
    facts = {"compilation": {"cuda_graph_skips": 2, "cuda_graph_reasons": ["cpu device (arg0)"]}}
    (found,) = judged(stored(circumstances=facts), "cuda_graphs_skipped")
    assert "skipped for 2 graphs: cpu device (arg0)" in found.detail
    assert not judged(stored(circumstances={"compilation": {"cuda_graph_skips": 0}}), "cuda_graphs_skipped")
