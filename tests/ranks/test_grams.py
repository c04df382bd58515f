"""Exact Grams, and replicates of all ranks, of models under DDP, FSDP2 and tensor parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backlight.store import spectra as stored
from backlight.store.read.run import open_run
from ranks.launching import HERE, torchrun

pytestmark = pytest.mark.full

MATRICES = {"embed.weight", "block.up.weight", "block.down.weight"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("grams")
    torchrun(2, HERE / "grams.py", made)
    return made


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_gram_of_a_wrapped_model_equals_the_plain_one(folder: Path) -> None:
    for one in results(folder):
        assert one["grams"]["ddp"]
        assert one["grams"]["ddp_collectives"] == 0


@pytest.mark.parametrize("setup", ["fsdp", "tensor"])
def test_sharded_model_is_rejected_until_it_is_gathered(setup: str, folder: Path) -> None:
    for one in results(folder):
        grams = one["grams"]
        assert "is sharded over processes (DTensor)" in grams[f"{setup}_refused"]
        assert "with backlight.gathered(model):" in grams[f"{setup}_refused"]
        assert grams[setup]
        assert grams[f"{setup}_unchanged"]
        assert grams[f"{setup}_without_gradients"]


@pytest.mark.parametrize("setup", ["sharded", "wrapped"])
def test_replicates_of_all_ranks_are_gathered(setup: str, folder: Path) -> None:
    one, other = (result[setup] for result in results(folder))
    assert not one["warnings"]
    assert not other["warnings"]
    assert {**one["layers"], **other["layers"]} == dict.fromkeys(MATRICES, True)
    assert not set(one["layers"]) & set(other["layers"])
    measured = stored.measurements(open_run(folder / setup))
    assert {(m.step, m.parameter) for m in measured} == {(s, name) for s in (0, 2) for name in MATRICES}
    assert {m.replicates for m in measured} == {4}
