"""The published JSON schemas; the fixture ``command`` checks each answer of a test against its schema."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from answer_schemas import ANSWERS, file_name, schema_of

from answers import strict_loads
from backlight.analysis.report import write_bundle
from backlight.records import Evidence, Finding, Severity, Subject
from run_builder import build_health_run

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


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_stored_schema_is_the_generated_one(name: str) -> None:
    schema = schema_of(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads((FOLDER / file_name(name)).read_text()) == json.loads(json.dumps(schema)), (
        "run: python docs/answer_schemas.py"
    )


def test_there_is_no_schema_of_another_command() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(map(file_name, ANSWERS))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ANSWERS.keys() - {"query"}))
def test_an_answer_of_another_shape_is_refused(name: str) -> None:
    for answer in ({}, [{}]):
        with pytest.raises(jsonschema.ValidationError, match=r"required prop|not valid under|of type"):
            jsonschema.validate(answer, schema_of(name))


@pytest.mark.slow
def test_predicted_sizes_of_a_sweep(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    code, out, _ = command("sweep", tmp_path / "recipe.py", "--set", "dim=4,8,16", "--fake", "--json")
    assert code == 0
    assert len(json.loads(out)["points"]) == 3


@pytest.mark.slow
def test_doctor_and_an_empty_list(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, _ = command("doctor", "--json")
    assert code == 0
    assert json.loads(out)
    assert json.loads(command("ls", tmp_path, "--json")[1]) == []


@pytest.fixture
def diverged(tmp_path: Path) -> Path:
    """Return a run whose loss, event and evidence are not finite."""
    path, infinite = tmp_path / "runs" / "diverged", float("inf")
    finding = Finding(
        severity=Severity.ERROR, rule="spike", monitor="health", title="loss", detail="", fix="",
        subject=Subject(), evidence=(Evidence("scalars/loss", 1, -infinite),), refuted_if="",
    )  # fmt: skip
    build_health_run(
        path, {"a": [1.0, 1.0]}, findings=[finding], scalars={"loss": [1.0, float("nan")]},
        events=[(1, "skipped", {"scale": infinite})],
    )  # fmt: skip
    return path


@pytest.mark.slow
def test_answers_name_the_numbers_that_json_lacks(
    command: Callable[..., tuple[int, str, str]], diverged: Path
) -> None:
    def answer(*arguments: object) -> Any:
        return json.loads(command(*arguments, "--json")[1])  # the fixture refuses Python's NaN

    assert answer("ls", diverged.parent)[0]["loss"] == "NaN"
    assert "-Infinity" in [
        e["value"] for finding in answer("findings", diverged)["findings"] for e in finding["evidence"]
    ]
    assert answer("query", diverged, "SELECT 'inf'::DOUBLE AS a")[0]["a"] == "Infinity"
    payload = answer("query", diverged, "SELECT payload FROM events WHERE kind = 'skipped'")[0]["payload"]
    assert strict_loads(payload) == {"scale": "Infinity"}


@pytest.mark.slow
def test_documents_of_a_bundle_are_strict_json(diverged: Path, tmp_path: Path) -> None:
    with tarfile.open(write_bundle(diverged, tmp_path / "run.tar.gz")) as bundle:
        documents = [member for member in bundle.getmembers() if member.name.endswith(".json")]
        assert len(documents) >= 3
        for member in documents:
            file = bundle.extractfile(member)
            assert file is not None
            strict_loads(file.read())
