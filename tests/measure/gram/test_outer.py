"""The outer product of a gradient on demand, against the dense matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backlight
from backlight.measure.gram import outer
from backlight.measure.gram.outer import OuterProductError


def test_outer_product_equals_dense_matrix() -> None:
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
    torch.testing.assert_close(product @ v[:, 0], dense @ v[:, 0])
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
        product @ torch.ones(3)


def test_dense_matrix_needs_space(monkeypatch: pytest.MonkeyPatch) -> None:
    product = backlight.outer_product(torch.ones(1_000_000))
    with pytest.raises(
        OuterProductError, match=r"1000000 x 1000000 entries takes 4 TB.*ask for entries, rows"
    ):
        product.dense()
    monkeypatch.setattr(outer, "_free_memory", lambda device: 799)
    small = backlight.outer_product(torch.ones(10))
    with pytest.raises(OuterProductError, match="takes 400 B, 799 B of memory are available"):
        small.dense()
    for enough in (800, None):  # None: a device that does not report it
        monkeypatch.setattr(outer, "_free_memory", lambda device, free=enough: free)
        assert small.dense().shape == (10, 10)
