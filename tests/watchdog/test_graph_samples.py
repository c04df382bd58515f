"""Lines that made the nodes of a graph, from samples: written ones and those of a real forward."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path

import pytest
import torch

from backlight.monitors.stalls.instrument.heartbeat import BackwardPosition
from backlight.monitors.stalls.instrument.stack_sampler import user_frames
from backlight.watchdog import graph_samples
from backlight.watchdog.graph_samples import (
    GraphBuild,
    enclosing_loops,
    find_largest_share,
    parse_graph_build,
)
from backlight.watchdog.shared_state import SharedState
from backlight.watchdog.stacks import Frame
from backlight.watchdog.text import share_text

SCRIPT = """def attention(h):
    for head in range(8):
        for i in range(100):
            h = h * 1.0
    return h

def mlp(h):
    return [h + i for i in range(3)]

def main():
    while True:
        loss = mlp(attention(1))
        loss.backward()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(SCRIPT)
    return str(path)


def frames(script: str, *lines: int) -> tuple[Frame, ...]:
    return tuple(Frame(script, line, "f") for line in lines)


def graph_build(script: str, samples: list[tuple[int, int]], root: int = 1000) -> GraphBuild:
    stacks = (frames(script, 4, 12), frames(script, 8, 12), frames(script, 12))
    return GraphBuild(0, root, tuple(samples), stacks, caller=frames(script, 13))


def test_enclosing_loops_are_innermost_first(script: str) -> None:
    assert enclosing_loops(script, 4) == [(script, 3), (script, 2)]
    assert enclosing_loops(script, 8) == [(script, 8)]
    assert enclosing_loops(script, 1) == []
    assert enclosing_loops("/nowhere/at_all.py", 3) == []


def test_shares_follow_node_numbers_and_not_time(script: str) -> None:
    # Ten samples in the inner loop, ten in the comprehension, which makes nodes nine times as fast.
    samples = [(10 * i, 0) for i in range(1, 11)] + [(100 + 90 * i, 1) for i in range(1, 11)]
    found = find_largest_share(graph_build(script, samples))
    assert (found.line, found.is_loop, found.recomputed) == (8, True, False)
    assert found.share == pytest.approx(0.9, abs=0.06)
    assert share_text(
        found
    ) == f"about {100 * found.share:.0f} % (± {round(100 * found.margin + 0.5)}) of the nodes come from " + (
        "model.py:8 (a Python loop), by 20 samples of forward"
    )


def test_loop_of_the_step_is_left_out(script: str) -> None:
    found = find_largest_share(graph_build(script, [(50 * i, 2) for i in range(1, 20)]))
    assert (found.line, found.is_loop) == (12, False)


def test_too_few_samples_or_too_many_unsampled_nodes_give_no_share(script: str) -> None:
    few = [(100 * i, 0) for i in range(graph_samples.MIN_SAMPLES - 1)]
    assert find_largest_share(graph_build(script, few)) is None
    assert (
        find_largest_share(graph_build(script, [(5 * i, 0) for i in range(1, 20)])) is None
    )  # 10 % of the graph
    assert find_largest_share(None) is None


def test_recomputed_nodes_have_a_share_of_their_own(script: str) -> None:
    found = find_largest_share(graph_build(script, [(1000 + 100 * i, 0) for i in range(1, 20)]))
    assert found.recomputed
    assert "of the recomputed nodes come from model.py:3 (a Python loop), by 19 samples of recomputation" in (
        share_text(found)
    )


def test_written_samples_are_read(script: str) -> None:
    build = graph_build(script, [(3, 0), (5, 1)])
    assert parse_graph_build(json.loads(json.dumps(dataclasses.asdict(build)))) == build


@pytest.mark.slow
def test_samples_of_a_real_forward_name_its_loop(tmp_path: Path) -> None:
    shared_state = SharedState(tmp_path / "rank-00000.state")
    position = BackwardPosition(shared_state)
    position.end(0.0)
    ready, main, stop = threading.Event(), threading.get_ident(), threading.Event()

    def sample() -> None:
        import sys

        ready.set()
        while not stop.wait(0.02):
            position.sample(user_frames(sys._current_frames()[main]))

    helper = threading.Thread(target=sample)
    helper.start()
    try:
        ready.wait()
        x = torch.ones(4, requires_grad=True)
        h = x
        first, end = h, time.monotonic() + 1.0
        while time.monotonic() < end:
            h = h * 1.0
        many = h.grad_fn._sequence_nr()
        for _ in range((many - first.expand(4).grad_fn._sequence_nr()) // 100):
            h = h + 1.0
    finally:
        stop.set()
        helper.join()
    loss = h.sum()
    position.begin([loss])
    data = position.graph_build()
    found = find_largest_share(data)
    position.end(0.0)
    assert found is not None, data
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert "while time.monotonic() < end" in source[found.line - 1]
    assert found.share > 0.8
    del h, loss
