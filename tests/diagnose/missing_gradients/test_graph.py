"""Walk of the autograd graph: nodes, edges, leaves, long chains."""

from __future__ import annotations

import gc
import sys
import time

import pytest
import torch
from torch import nn

from backlight.capture.calls import ModuleCalls
from backlight.diagnose.missing_gradients import reasons
from backlight.diagnose.missing_gradients.reasons import WalkError, find_overwritten, walk
from backlight.diagnose.missing_gradients.tape import Tape
from backlight.diagnose.script_observer import Origin, Origins
from backlight.user_code import user_line
from processes import run_captured


def test_nodes_edges_leaves() -> None:
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    shared = a * b
    loss = (shared + shared.detach() * c).sum()
    found = walk([loss])
    assert found.sequence[0] == loss.grad_fn._sequence_nr()
    assert {found.reaches(t) for t in (a, b, c)} == {True}
    assert not found.reaches(torch.ones(2, requires_grad=True))
    assert len(found) == 7
    assert sorted(n for n in found.sequence if n >= 0) == sorted(
        node._sequence_nr() for node in (loss.grad_fn, shared.grad_fn, *_inner(loss))
    )
    product = found.sequence.index(shared.grad_fn._sequence_nr())
    assert {found.leaves[id(t)] for t in (a, b)} < found.below(product)
    assert found.leaves[id(c)] not in found.below(product)


def _inner(loss: torch.Tensor) -> list[object]:
    add = loss.grad_fn.next_functions[0][0]
    return [add, add.next_functions[1][0]]


def test_leaf_as_the_root() -> None:
    leaf = torch.ones((), requires_grad=True)
    assert walk([leaf]).reaches(leaf)
    assert len(walk([torch.ones(())])) == 0


def test_nodes_have_the_line_of_their_operation() -> None:
    x = torch.ones(2, requires_grad=True)
    with ModuleCalls() as calls, Tape(calls, pytest.fail) as tape:
        y = x
        for _ in range(8):
            y = y * 2
        loss = y.sum()
    numbers = sorted(number for number in walk([loss]).sequence if number >= 0)
    assert [tape.origins.of(number).line for number in numbers] == [o.line for o in tape.operations]


def test_origins_of_unrecorded_numbers() -> None:
    origins = Origins()
    line = user_line()
    origins.add(4, 6, Origin("late", line))
    origins.add(2, 3, Origin("early", line))
    names = [o.operation if (o := origins.of(number)) else None for number in range(8)]
    assert names == [None, None, "early", None, "late", "late", None, None]
    origins.trim(1)
    assert origins.of(2) is None


CHAIN = """
import gc, resource, sys, torch
from backlight.diagnose.missing_gradients.reasons import walk
from backlight.diagnose.missing_gradients.observer import MissingGradientObserver
limit = 2 << 20  # a fourth of the usual one, as is the chain of what overflows that
resource.setrlimit(resource.RLIMIT_STACK, (limit, resource.getrlimit(resource.RLIMIT_STACK)[1]))
x = torch.ones(1, requires_grad=True)
def chain():
    y = x
    for _ in range(50_000):
        y = y * 1.0
    return y.sum()
if sys.argv[1] == "walk":
    loss = chain()
    graph = walk([loss])
    print(len(graph), graph.reaches(x))
    if sys.argv[2] == "backward":
        loss.backward()
else:
    with MissingGradientObserver(10, lambda: None) as observer:
        loss = chain()
        loss.backward()
    print(observer.answer.nodes, observer.answer.notes)
del loss
gc.collect()
print("released")
"""


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        pytest.param(("walk", "drop"), "50002 True", marks=pytest.mark.full),
        (("walk", "backward"), "50002 True"),
        pytest.param(
            ("observe", ""),
            "50002 ['no torch optimizer was observed, so it is not known what updates the parameters']",
            marks=pytest.mark.full,
        ),
    ],
)
def test_long_chain_of_nodes_is_released(arguments: tuple[str, str], first: str) -> None:
    done = run_captured([sys.executable, "-c", CHAIN, *arguments], timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{first}\nreleased\n"


def test_walk_leaves_no_wrapper() -> None:
    loss = (torch.ones(2, requires_grad=True) * 2).sum()
    walk([loss])
    assert "MulBackward0" not in {type(o).__name__ for o in gc.get_objects()}


def test_failing_walk_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_tensors: object) -> object:
        raise KeyError("node")

    monkeypatch.setattr(reasons, "_walk", broken)
    with pytest.raises(WalkError, match="the walk of the autograd graph failed: KeyError: 'node'"):
        walk([torch.ones((), requires_grad=True)])


def test_long_walk_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasons, "WALK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(reasons, "_walk", lambda _tensors: time.sleep(60))
    with pytest.raises(WalkError, match="took longer than 0 s"):
        walk([torch.ones((), requires_grad=True)])


def test_overwritten_tensor_is_recognised_by_the_message() -> None:
    assert find_overwritten("Trying to backward through the graph a second time", []) is None
    message = (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        "[torch.FloatTensor [3]] is at version 2; expected version 1 instead. Hint: enable anomaly detection"
    )
    unrecorded = find_overwritten(message, [])
    assert unrecorded.line is None
    assert "no operation that was recorded fits" in unrecorded.text


def test_calls_survive_an_exception() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("mine")

    outer = nn.Sequential(nn.Identity(), Failing())
    with ModuleCalls() as calls:
        with pytest.raises(ArithmeticError, match="mine"):
            outer(torch.ones(1))
        assert calls.current() is None
        assert calls.was_called(outer[0])
    nn.Identity()(torch.ones(1))
    assert len(calls.called) == 3
