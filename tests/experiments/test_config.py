"""Configurations: presets, files, options and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from backlight.experiments.config import ConfigurationError, assigned, configure, preset, read
from backlight.experiments.experiment import EXPERIMENTS


@pytest.mark.parametrize("name", [*EXPERIMENTS, "oracle"])
@pytest.mark.parametrize("chosen", ["ci", "paper"])
def test_printed_configuration_is_read_back_unchanged(name: str, chosen: str, tmp_path: Path) -> None:
    before = preset(name, chosen)
    file = tmp_path / "file.yaml"
    file.write_text(before.as_yaml())
    assert configure(None, None, (str(file), read(file))) == before


def test_last_layer_wins_and_types_are_kept() -> None:
    file = ("file.yaml", {"experiment": "oracle", "training": {"lr": "1e-2", "steps": 7}, "seed": 4})
    found = configure(None, None, file, ("--set", assigned(["training.lr=2e-3", "measures.gram=3"])))
    assert (found.settings.training.lr, found.settings.training.steps, found.seed) == (0.002, 7, 4)
    assert found.settings.training.betas == (0.9, 0.98)
    assert found.measures.gram == 3
    assert found.measures.top_k == 100


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["training.lrr=1"], r"unknown key 'training.lrr'; did you mean 'training.lr'\?"),
        (["meassures.gram=1"], r"unknown key 'meassures'; did you mean 'measures'\?"),
        (["measures.grams=1"], r"unknown key 'measures.grams'; did you mean 'measures.gram'\?"),
        (["run.zzz=1"], r"unknown key 'run.zzz'; there are: checkpoint_every"),
        (["training.lr=fast"], r"training.lr: expected float, got 'fast'"),
        (["training.steps=0"], "training.steps=0: expected 1 or more"),
        (["training=3"], "training: expected keys with values, got 3"),
        (["measures.eigenvalues=moon"], "measures.eigenvalues: 'moon': expected host or device"),
        (["run.threads=0"], "run.threads=0: expected 1 or more"),
        (["control=shuffled"], "control 'shuffled': expected random-labels, or none"),
        (["seed=1.5"], "seed: expected int, got 1.5"),
        (["training.lr"], "expected section.key=value"),
        ([".lr=1"], "expected section.key=value"),
        (["training.lr={"], "is not valid YAML"),
        (["training.lr=[&a 1, *a]"], "is not valid YAML"),
    ],
)
def test_error_names_invalid_value(items: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        configure("oracle", None, ("--set", assigned(items)))


@pytest.mark.slow
def test_files_without_configuration_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read(file)
    keys = "expected keys with values, as `backlight grok run --dry-run` prints"
    bomb = "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 10)}]\n" for i in range(1, 10))
    for text, message in (
        ("a: [", "not valid YAML"), ("- 1\n", keys),
        (f"k0: &k0 x\n{bomb}", "it has an alias, which is not read"),
        ("a: &a 1\nb: *a\n", "it has an alias"), ("[" * 100_000, "nests too deeply"),
        ("a: &a {x: 1}\nb: {<<: *a}", "it has an alias"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=message):
            read(file)
    with pytest.raises(ConfigurationError, match="is a configuration of 'nanda', not of 'power'"):
        configure("power", None, ("file.yaml", {"experiment": "nanda"}))
    with pytest.raises(ConfigurationError, match="no experiment is named"):
        configure(None, None)
    with pytest.raises(ConfigurationError, match=r"no experiment is called 'nnada'; did you mean 'nanda'\?"):
        configure("nnada", None)
    with pytest.raises(ConfigurationError, match="preset 'cl': expected ci or paper"):
        preset("nanda", "cl")
