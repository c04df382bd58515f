"""The published JSON schemas; the fixture ``command`` checks each answer of a test against its schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from answer_schemas import ANSWERS, file_name, schema_of

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"

RECIPE = """
import torch
from torch import nn

def build_model(dim=4):
    return nn.Linear(dim, 2)

def batches(rank, world_size, dim=4):
    while True:
        yield torch.randn(3, dim)

def loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_stored_schema_is_the_generated_one(name: str) -> None:
    schema = schema_of(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads((FOLDER / file_name(name)).read_text()) == json.loads(json.dumps(schema)), (
        "run: python docs/answer_schemas.py"
    )


def test_there_is_no_schema_of_another_command() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(map(file_name, ANSWERS))


@pytest.mark.parametrize("name", sorted(ANSWERS.keys() - {"query"}))
def test_an_answer_of_another_shape_is_refused(name: str) -> None:
    for answer in ({}, [{}]):
        with pytest.raises(jsonschema.ValidationError, match=r"required prop|not valid under|of type"):
            jsonschema.validate(answer, schema_of(name))


def test_predicted_sizes_of_a_sweep(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    code, out, _ = command("sweep", tmp_path / "recipe.py", "--set", "dim=4,8,16", "--fake", "--json")
    assert code == 0
    assert len(json.loads(out)["points"]) == 3


def test_doctor_and_an_empty_list(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, _ = command("doctor", "--json")
    assert code == 0
    assert json.loads(out)
    assert json.loads(command("ls", tmp_path, "--json")[1]) == []
