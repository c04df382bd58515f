"""The outer product on demand, products of matrix gradients, the window Gram and the sketch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import backlight
from backlight.measure.gram import outer
from backlight.measure.gram.frequent_directions import FrequentDirections
from backlight.measure.gram.outer import OuterProductError
from backlight.measure.gram.products import left_product, product_spectrum, right_product
from backlight.measure.gram.window import Window


def test_outer_product_serves_what_the_dense_matrix_holds() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False)).double()
    net(torch.randn(4, 3, dtype=torch.float64)).square().sum().backward()
    product = backlight.outer_product(net)
    g = torch.cat([p.grad.flatten() for p in net.parameters()])
    dense = torch.outer(g, g)
    assert product.shape == (12, 12)
    assert torch.equal(product.dense(), dense)
    assert product.entry(3, -1) == float(dense[3, -1])
    assert torch.equal(product.row(5), dense[5])
    assert torch.equal(product.block(slice(2, 6), [0, 7]), dense[2:6][:, [0, 7]])
    assert torch.equal(product.block("1.weight", "0.bias"), dense[8:12, 6:8])
    assert torch.equal(product.block(-1, "0.bias"), dense[-1:, 6:8])
    assert product.position("1.weight", 1, -2) == 10
    v = torch.randn(12, 2, dtype=torch.float64)
    torch.testing.assert_close(product @ v, dense @ v)
    torch.testing.assert_close(product.matvec(v[:, 0]), dense @ v[:, 0])
    assert product.norm == pytest.approx(float(dense.norm()), rel=1e-12)
    assert product.norm == pytest.approx(float(dense.trace()), rel=1e-12)


def test_outer_product_of_tensors() -> None:
    assert backlight.outer_product(torch.ones(2, 3)).shape == (6, 6)
    assert list(backlight.outer_product([("a", torch.ones(2)), ("b", torch.ones(1))]).offsets) == ["a", "b"]
    assert backlight.outer_product([torch.ones(2), torch.ones(3)]).offsets == {"0": 0, "1": 2}
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([2.0, 3.0])
    assert backlight.outer_product(parameter).entry(0, 1) == 6


def test_outer_product_refuses() -> None:
    with pytest.raises(OuterProductError, match="there is no gradient; call backward first"):
        backlight.outer_product(nn.Linear(2, 2))
    with pytest.raises(OuterProductError, match="same name"):
        backlight.outer_product([("a", torch.ones(1)), ("a", torch.ones(1))])
    product = backlight.outer_product([("w", torch.ones(2, 2))])
    with pytest.raises(OuterProductError, match="no gradient of 'v'; there are: w"):
        product.position("v", 0)
    with pytest.raises(OuterProductError, match=r"'w' has shape \[2, 2\], got the index \[2, 0\]"):
        product.position("w", 2, 0)
    with pytest.raises(OuterProductError, match="row 4 of 4 does not exist"):
        product.entry(4, 0)
    with pytest.raises(OuterProductError, match="there are 4 rows"):
        product.block([9], [0])
    with pytest.raises(OuterProductError, match=r"expected 4 rows to multiply, got \[3\]"):
        product.matvec(torch.ones(3))


def test_a_dense_matrix_needs_space(monkeypatch: pytest.MonkeyPatch) -> None:
    product = backlight.outer_product(torch.ones(1_000_000))
    with pytest.raises(
        OuterProductError, match=r"1000000 x 1000000 entries takes 4 TB.*ask for entries, rows"
    ):
        product.dense()
    monkeypatch.setattr(outer, "available", lambda device: 799)
    small = backlight.outer_product(torch.ones(10))
    with pytest.raises(OuterProductError, match="takes 400 B, 799 B of memory are available"):
        small.dense()
    monkeypatch.setattr(outer, "available", lambda device: 800)
    assert small.dense().shape == (10, 10)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (4, 3, 2)])
def test_products_of_a_matrix_gradient(shape: tuple[int, ...]) -> None:
    G = torch.randn(*shape)
    matrix = G.double().flatten(1)
    torch.testing.assert_close(left_product(G), matrix @ matrix.T)
    torch.testing.assert_close(right_product(G), matrix.T @ matrix)
    singular = np.linalg.svd(matrix.numpy(), compute_uv=False)
    np.testing.assert_allclose(product_spectrum(G).eigenvalues, singular**2, rtol=1e-9)
    assert len(product_spectrum(G, top=2).eigenvalues) == 2


def test_products_of_a_vector_tell_nothing() -> None:
    with pytest.raises(ValueError, match="rank one, and its norm says all"):
        product_spectrum(torch.ones(3))


def test_window_is_the_gram_of_the_last_steps() -> None:
    window = Window(4)
    steps = [[torch.randn(5, 3), torch.randn(7)] for _ in range(10)]
    for number, gradients in enumerate(steps):
        window.push(number, gradients)
        last = steps[max(0, number - 3) : number + 1]
        A = torch.stack([torch.cat([g.flatten() for g in s]).double() for s in last])
        torch.testing.assert_close(window.matrix, A @ A.T, rtol=1e-12, atol=1e-12)
        assert window.steps == list(range(max(0, number - 3), number + 1))
    assert len(window) == 4


def test_window_costs_one_row_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from backlight.measure.gram import window as module

    multiplied: list[int] = []
    inner = module._inner
    monkeypatch.setattr(module, "_inner", lambda kept, g: multiplied.append(kept.numel()) or inner(kept, g))
    window = Window(4)
    for step in range(6):
        window.push(step, [torch.randn(10)])
    assert multiplied == [40] * 6
    monkeypatch.setattr(module, "_BLOCK", 12)
    window.push(6, [torch.full((10,), 2.0)])
    assert float(window.matrix[-1, -1]) == pytest.approx(40)


def test_window_copies_what_it_keeps_and_refuses_other_shapes() -> None:
    window = Window(2)
    with pytest.raises(ValueError, match="empty; push"):
        _ = window.matrix
    g = torch.ones(3)
    window.push(0, [g])
    g.zero_()
    assert float(window.matrix) == 3
    with pytest.raises(ValueError, match=r"step 1 have sizes \[4\], earlier ones \[3\]"):
        window.push(1, [torch.ones(4)])
    with pytest.raises(ValueError, match="at least 1 step, got 0"):
        Window(0)


def certified(sketch: FrequentDirections, A: torch.Tensor) -> None:
    B = sketch.rows()
    assert B.shape[0] <= sketch.size
    gap = torch.linalg.eigvalsh(A.T @ A - B.T @ B)
    scale = float(torch.linalg.matrix_norm(A, 2)) ** 2
    assert float(gap.min()) >= -1e-10 * scale
    assert float(gap.max()) <= sketch.shrinkage + 1e-10 * scale


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_certificate_of_a_sketch_holds(decay: float) -> None:
    A = torch.randn(60, 20, dtype=torch.float64) * torch.exp(-decay * torch.arange(20, dtype=torch.float64))
    sketch = FrequentDirections(6, 20)
    for start in (0, 1, 8, 30):
        sketch.add(A[start : {0: 1, 1: 8, 8: 30, 30: 60}[start]])
        certified(sketch, A[: sketch.seen])
    assert sketch.seen == 60
    # The bound of the algorithm itself: the shrinkage is no more than the squared tail over rows - k.
    tail = torch.linalg.svdvals(A) ** 2
    assert 0 < sketch.shrinkage <= float(tail[3:].sum()) / (6 - 3) + 1e-9


def test_a_sketch_of_few_rows_is_exact() -> None:
    A = torch.randn(6, 20, dtype=torch.float64)
    sketch = FrequentDirections(6, 20)
    for row in A:
        sketch.add(row)
    assert sketch.shrinkage == 0
    B = sketch.rows()
    torch.testing.assert_close(B.T @ B, A.T @ A)


def test_sketches_merge() -> None:
    A, B = torch.randn(40, 15, dtype=torch.float64), torch.randn(30, 15, dtype=torch.float64)
    one, two = FrequentDirections(5, 15), FrequentDirections(7, 15)
    one.add(A)
    two.add(B)
    one.merge(two)
    assert one.seen == 70
    certified(one, torch.cat([A, B]))
    with pytest.raises(ValueError, match="cannot merge 3 columns into 15"):
        one.merge(FrequentDirections(5, 3))


@pytest.mark.parametrize("taken", [3, 9, 14])
def test_a_sketch_goes_on_from_its_state_as_if_it_had_not_stopped(taken: int) -> None:
    rows = torch.randn(40, 15, dtype=torch.float64)
    whole = FrequentDirections(5, 15)
    whole.add(rows[:taken])
    state = whole.state()
    resumed = FrequentDirections.from_state(state)
    for sketch in (whole, resumed):
        sketch.add(rows[taken:])
    assert torch.equal(whole.rows(), resumed.rows())
    assert (whole.shrinkage, whole.seen) == (resumed.shrinkage, resumed.seen) == (whole.shrinkage, 40)
    assert len(state["rows"]) == (taken if taken < 11 else 9)  # what was taken is a copy


def test_a_state_that_is_not_one_is_refused() -> None:
    state = FrequentDirections(2, 3).state()
    with pytest.raises(ValueError, match="the state lacks seen, shrinkage"):
        FrequentDirections.from_state({"size": 2, "rows": state["rows"]})
    with pytest.raises(ValueError, match=r"expected at most 4 rows, got \[5, 3\]"):
        FrequentDirections.from_state({**state, "rows": torch.zeros(5, 3)})


def test_a_sketch_refuses() -> None:
    sketch = FrequentDirections(2, 3)
    with pytest.raises(ValueError, match=r"expected rows of 3 numbers, got \[4\]"):
        sketch.add(torch.ones(4))
    with pytest.raises(ValueError, match="not finite; the sketch was left as it was"):
        sketch.add(torch.tensor([1.0, math.inf, 0.0]))
    assert sketch.seen == 0
    with pytest.raises(ValueError, match="at least 1, got 0 and 3"):
        FrequentDirections(0, 3)
