"""Matrices are selected by pattern, split and reshaped; the others are listed with the reason."""

import pytest
import torch
from torch import nn

from backlight.monitors.spectra.instrument.layers import Selection, select_layers
from backlight.monitors.spectra.settings import SpectraError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(6, 9), "out": nn.Linear(6, 6)}) for _ in "ab"
        )
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5)
        self.head.weight.requires_grad_(False)


def whole(name, tensor):
    return {name: tensor}


def fused(name, tensor):
    if not name.endswith("qkv.weight"):
        return {name: tensor}
    return {f"{name}:{part}": rows for part, rows in zip("qkv", tensor.chunk(3), strict=True)}


def select(model: nn.Module, split, include=(), exclude=()) -> Selection:
    return select_layers(model.named_parameters(), split, include, exclude, prefix="--")


def names(selection):
    return [layer.parameter for layer in selection.layers]


def test_matrices_in_order_of_model():
    selection = select(Net(), fused)
    assert names(selection) == [
        "conv.weight",
        *(f"blocks.0.qkv.weight:{part}" for part in "qkv"),
        "blocks.0.out.weight",
        *(f"blocks.1.qkv.weight:{part}" for part in "qkv"),
        "blocks.1.out.weight",
    ]
    conv, query = selection.layers[:2]
    assert (conv.shape, conv.rows, conv.columns) == ((4, 2, 3, 3), 4, 18)
    assert (conv.layer, conv.split_of) == ("conv", "")
    assert (query.shape, query.layer, query.split_of) == ((3, 6), "blocks.0.qkv", "blocks.0.qkv.weight")
    assert [layer.index for layer in selection.layers] == list(range(9))
    assert "frozen" in selection.left_out["head.weight"]
    assert "one dimension" in selection.left_out["norm.weight"]
    assert "conv.weight" not in selection.left_out


def test_patterns_match_matrices_weights_and_modules():
    chosen = select(Net(), fused, include=["blocks.0"], exclude=["*:k,*.out"])
    assert names(chosen) == ["blocks.0.qkv.weight:q", "blocks.0.qkv.weight:v"]
    assert chosen.left_out["blocks.0.qkv.weight:k"] == "left out by --exclude"
    assert chosen.left_out["conv.weight"] == "not in --include"
    parts = [f"blocks.1.qkv.weight:{part}" for part in "qkv"]
    assert names(select(Net(), fused, include=["blocks.1.qkv.weight"])) == parts
    outputs = ["conv.weight", "blocks.0.out.weight", "blocks.1.out.weight"]
    assert names(select(Net(), fused, include=["conv", "*.out.weight"])) == outputs


def test_pattern_without_match():
    with pytest.raises(SpectraError, match=r"--include 'blok\.0' matches none of 5 matrices.*blocks\.0"):
        select(Net(), whole, include=["blok.0"])
    with pytest.raises(SpectraError, match="--exclude 'decoder' matches none of 5 matrices"):
        select(Net(), whole, exclude=["decoder"])
    with pytest.raises(SpectraError, match="--include and --exclude leave none of 5 matrices"):
        select(Net(), whole, include=["conv"], exclude=["*"])


def test_nothing_to_measure():
    with pytest.raises(SpectraError, match="no parameter with two dimensions that needs a gradient"):
        select(nn.LayerNorm(4), whole)


def test_splits_that_cannot_be_used():
    with pytest.raises(SpectraError, match=r"split\('conv.weight', …\) gave list for 'a'; expected a tensor"):
        select(Net(), lambda name, tensor: {"a": [1]})
    with pytest.raises(SpectraError, match="two matrices are called 'same'"):
        select(Net(), lambda name, tensor: {"same": tensor})
    vectors = select(nn.Linear(3, 4), lambda name, tensor: {"first": tensor[0], "rest": tensor[1:]})
    assert names(vectors) == ["rest"]
    assert "two dimensions" in vectors.left_out["first"]


def test_tied_weight_is_one_layer():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert names(select(model, whole)) == ["0.weight"]
    assert torch.equal(model[0].weight, model[1].weight)
