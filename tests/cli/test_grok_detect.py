"""``backlight grok detect`` and ``compare`` on stored runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.analysis.overlay import overlay
from backlight.store.read.run import open_run
from grokking_runs import Grok, write_grokking_run
from run_builder import build_run

pytestmark = pytest.mark.slow

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run = write_grokking_run(folder / "oracle")
    write_grokking_run(folder / "control", Grok(control="random-labels", control_of=run.run_id, seed=3))
    write_grokking_run(folder / "late", Grok(generalises=1300, seed=1))
    write_grokking_run(folder / "bare", Grok(accuracies=False, geometry=False, steps=100))
    return folder


def test_detect_prints_verdict_times_conditions_and_control(command: Command, runs: Path) -> None:
    code, out, errors = command("grok", "detect", runs / "oracle")
    assert (code, errors) == (0, "")
    for words in (
        "grokking, strong",
        "(30, 40]",
        "starts from below",
        "12 of 12",
        "control control: memorised",
        "No measure is distinguished from its controls by 2 runs and 1 control",
        "its end",
    ):
        assert words in out, words


def test_detect_is_readable_in_80_columns(
    command: Command, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = command("grok", "detect", runs / "oracle")[1].splitlines()
    first = next(row for row, line in enumerate(lines) if line.startswith("condition"))
    conditions = lines[first + 1 : first + 8]
    assert all(line.rstrip().endswith("holds") for line in conditions), conditions
    measures = next(row for row, line in enumerate(lines) if line.startswith("measure"))
    table = lines[measures + 1 : measures + 11]
    assert max(map(len, (*conditions, *table))) <= 80  # sentences are broken where a terminal prints them
    assert all(line.split()[0].strip("_/") and len(line.split()) >= 4 for line in table), table


def test_detect_as_json_has_everything(command: Command, runs: Path) -> None:
    code, out, _ = command("grok", "detect", runs / "oracle", runs / "control", "--json")
    first, second = json.loads(out)
    assert code == 0
    assert (first["verdict"], first["strong"], second["verdict"]) == ("grokking", True, "memorised")
    assert first["memorised"] == {"after": 30, "by": 40}
    assert first["control"]["verdict"] == "memorised"
    assert len(first["sweep"]) == 12
    assert {"measure", "correlation", "lead_steps", "control", "conclusion"} <= set(first["following"][0])
    assert second["facts"]["control"] == "random-labels"


def test_detect_evaluates_the_other_runs_after_an_error(command: Command, runs: Path) -> None:
    code, out, errors = command("grok", "detect", runs / "bare", runs / "control")
    assert code == 2
    assert "memorised" in out
    assert f"{runs / 'bare'}: no train_accuracy and no test_accuracy was logged" in errors
    assert "watch.log(train_accuracy=..., test_accuracy=...)" in errors
    assert errors.count("\n") == 1


def test_detect_takes_chance_and_test_size(command: Command, refused: Callable[..., str], runs: Path) -> None:
    out = command("grok", "detect", runs / "oracle", "--test-size", 8, "--json")[1]
    assert json.loads(out)[0]["verdict"] == "insufficient-data"
    assert "0 <= chance < 1; got 2.0" in refused("grok", "detect", runs / "oracle", "--chance", 2)


def test_compare_overlays_runs(command: Command, runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, errors = command(
        "compare", runs / "oracle", runs / "late", runs / "control", "--align", "--out", page
    )
    assert (code, errors) == (0, "")
    assert "control never generalised and cannot be aligned" in out
    assert "gram/model/coherence" in out
    assert out.strip().endswith(str(page))
    text = page.read_text()
    assert "Content-Security-Policy" in text
    assert "steps after generalisation" in text


def test_compare_prints_whole_numbers_at_eighty_columns(
    command: Command, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = command("compare", runs / "oracle", runs / "late", "--measure", "")[1]
    result = json.loads(command("compare", runs / "oracle", runs / "late", "--measure", "", "--json")[1])
    first_words = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert set(result["measures"]) <= first_words
    assert max(map(len, out.splitlines())) <= 80
    rows = [line.split() for line in out.splitlines() if {"late", "oracle"} & set(line.split())]
    values = [cell for row in rows[2:] for cell in row[1 + (row[0] in result["measures"]) :]]
    assert len(values) >= 6 * len(result["measures"])
    for cell in values:
        float(cell.replace(",", ""))  # raises where a number was cut or broken


def test_detect_without_a_control_has_no_control_column(command: Command, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "oracle", tmp_path / "copy")
    output = command("grok", "detect", tmp_path / "copy")[1]
    assert "no matched control was found" in output
    assert "control ends" not in output
    assert "no claim" not in output


def test_aligned_runs_generalise_at_step_zero(runs: Path) -> None:
    names = ("oracle", "late")
    overlaid = overlay([open_run(runs / name) for name in names], align=True)
    for name in names:
        steps, values = overlaid.measures["test_accuracy"][name]
        threshold = overlaid.runs[name][2].test_accuracy  # both were evaluated
        assert values[steps == 0][0] >= threshold
        assert values[steps == -10][0] < threshold
    assert 0 in overlaid.table_steps()
    plain = overlay([open_run(runs / name) for name in names])
    assert plain.measures["test_accuracy"]["oracle"][0][0] == 0


def test_compare_as_json_contains_the_curves(command: Command, runs: Path) -> None:
    out = command("compare", runs / "oracle", runs / "late", "--measure", "test_", "--json")[1]
    result = json.loads(out)
    assert set(result["measures"]) == {"test_accuracy", "test_loss"}
    assert len(result["measures"]["test_accuracy"]["late"]["values"]) == 201


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("oracle", "--align"), "expected two runs or more"),
        (("oracle", "late", "--measure", "nope"), "begins with nope; there are: "),
        (("control", "bare", "--align"), "none of the runs generalised"),
        (("oracle", "nowhere", "--align"), "nowhere"),
    ],
)
def test_compare_refuses_in_one_line(
    refused: Callable[..., str], runs: Path, arguments: tuple[str, ...], words: str
) -> None:
    paths = [a if a.startswith("-") or a in {"nope"} else runs / a for a in arguments]
    assert words in refused("compare", *paths)


def test_markup_in_a_run_is_printed_as_text(command: Command, tmp_path: Path) -> None:
    for name in ("one", "two"):
        stated = {"experiment": "[red]x[/nope]\x1b[31m", "control": "", "chance": 0.1}
        accuracies = {"train_accuracy": [1.0] * 20, "test_accuracy": [0.1 + step / 100 for step in range(20)]}
        build_run(
            tmp_path / name, monitors=("grokking",), events=[(0, "grokking", stated)],
            user=accuracies | {"progress/[bold]": [1.0] * 20},
        )  # fmt: skip
    overlaid = ("compare", tmp_path / "one", tmp_path / "two", "--measure", "")
    for arguments in (("grok", "detect", tmp_path / "one"), overlaid):
        code, out, errors = command(*arguments)
        assert (code, errors) == (0, "")
        assert "[red]x[/nope]\\x1b[31m" in out
        assert "\x1b" not in out


def test_directories_of_the_same_name_get_distinct_labels(runs: Path, tmp_path: Path) -> None:
    other = write_grokking_run(tmp_path / "oracle", Grok(steps=300))
    overlaid = overlay([open_run(runs / "oracle"), other])
    assert set(overlaid.runs) == {"oracle", "oracle (2)"}


def test_report_writes_plots(command: Command, runs: Path, tmp_path: Path) -> None:
    code, out, _ = command(
        "report", runs / "bare", "--out", tmp_path / "page.html", "--plots", tmp_path / "plots"
    )
    assert code == 0
    page, *pictures = out.split()
    assert Path(page) == tmp_path / "page.html"
    assert {Path(p).suffix for p in pictures} == {".svg", ".png"}
    assert all(Path(p).is_file() for p in pictures)
