"""Functional dropout is observed without a change of values, and torch is as it was afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from backlight.capture.functional_calls import DropoutCalls

X = torch.ones(1, 1, 8, 4)


def drawn() -> list[torch.Tensor]:
    torch.manual_seed(0)
    given = [F.dropout(X, 0.5), F.dropout(X, p=0.5, training=True), F.dropout(X, 0.5, False)]
    return [*given, F.scaled_dot_product_attention(X, X, X, None, 0.25), F.dropout(X, 0.0)]


def test_values_are_the_same_and_calls_without_a_mode_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.delitem(counters, "frames", raising=False)
    before = F.dropout, F.scaled_dot_product_attention
    expected, calls = drawn(), DropoutCalls()
    assert calls.start()
    found = drawn()
    calls.stop()
    assert (F.dropout, F.scaled_dot_product_attention) == before
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert [(name, p) for name, p, _ in calls.rows] == [
        ("dropout", 0.5),
        ("scaled_dot_product_attention", 0.25),
    ]
    assert {line.path for *_, line in calls.rows if line is not None} == {__file__}


def test_nothing_is_replaced_where_code_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters, "frames", {"ok": 1})
    before = F.dropout
    calls = DropoutCalls()
    assert not calls.start()
    assert F.dropout is before
