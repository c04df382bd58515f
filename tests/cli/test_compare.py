"""`backlight compare` through the installed console script: a newcomer's pairs of runs, 80 columns wide."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import backlight
from backlight.cli.console import FACTS
from backlight.records import Fingerprint
from cases import build, loop
from run_builder import build_steptime_run

pytestmark = pytest.mark.slow

TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum={momentum})
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
"""

Console = Callable[..., subprocess.CompletedProcess[str]]


def record(
    path: Path, lr: float = 0.1, *, frozen: bool = False, monitors: tuple[str, ...] = ("health",)
) -> None:
    torch.manual_seed(0)
    model = build()
    held = [p for name, p in model.named_parameters() if not (frozen and name.startswith("last"))]
    optimizer = torch.optim.SGD(held, lr=lr)
    with backlight.watch(model, optimizer, run=path, every=1, monitors=monitors):
        loop(model, optimizer, steps=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("compared")
    record(found / "a")
    record(found / "again")
    record(found / "lr", lr=0.2)
    record(found / "frozen", frozen=True)
    return found


def test_only_differences_are_named_without_full(console_script: Console, folder: Path) -> None:
    done = console_script(folder, "compare", "a", "again")
    assert done.returncode == 0, done.stderr
    assert "The recorded configurations agree." in done.stdout
    assert "Loss and gradient norm are identical at all 12 common steps." in done.stdout
    assert re.match(r"Final loss: [\d.e-]+ in all runs; best: [\d.e-]+\.\n", done.stdout)
    assert "final loss" not in done.stdout
    assert "Tables: --full" in done.stdout
    assert "final loss" in console_script(folder, "compare", "a", "again", "--full").stdout


def table_lines(printed: str) -> list[str]:
    """Return the lines of the tables, which fit a terminal; facts and notes are broken only there."""
    _, *tables = printed.split("\n\n")
    return [line for table in tables for line in table.splitlines() if not line.startswith("note: ")]


def test_changed_option_is_shown_side_by_side(console_script: Console, folder: Path) -> None:
    brief = console_script(folder, "compare", "a", "lr").stdout
    number = r"[\d.e-]+"
    first = rf"Final loss: A {number}, B {number}; best: A {number} at step \d+, B {number} at step \d+\.\n"
    assert re.match(first, brief)
    assert "  configuration: learning rate 0.1 / 0.2\n" in brief
    assert len(brief.splitlines()) <= 1 + FACTS + 1
    done = console_script(folder, "compare", "a", "lr", "--full")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["learning", "rate", "0.1", "0.2"] in lines
    assert any(line[:2] == ["final", "loss"] and len(line) == 5 for line in lines)
    assert all(len(line) <= 80 for line in table_lines(done.stdout))


def test_slower_run_is_claimed_and_an_equal_one_is_not(console_script: Console, tmp_path: Path) -> None:
    for seed, (name, factor) in enumerate([("a", 1.0), ("slow", 1.3), ("equal", 1.0)]):
        phases = {"backward": 0.02 * factor, "optimizer": 0.005}
        build_steptime_run(tmp_path / name, phases, fingerprint=Fingerprint(script="train.py"), seed=seed)
    pair = console_script(tmp_path, "compare", "a", "slow").stdout
    assert "Step time: B is slower than A. B÷A is 1.2" in pair
    assert "phases that differ: backward 1." in pair
    tables = console_script(tmp_path, "compare", "a", "slow", "--full").stdout
    lines = [line.split() for line in tables.splitlines()]
    assert [line[0] for line in lines if line[-1:] == ["slower"]] == ["step", "backward"]
    assert any(line[:1] == ["optimizer"] for line in lines)
    brief = console_script(tmp_path, "compare", "a", "slow", "equal").stdout
    assert "Step time against A: B is slower, 1 run undecided." in brief
    many = console_script(tmp_path, "compare", "a", "slow", "equal", "--full").stdout.splitlines()
    (head,) = [number for number, line in enumerate(many) if line.startswith("median step")]
    assert [line.split()[0] for line in many[head + 1 : head + 4]] == ["A", "B", "C"]
    assert [line.split()[-1] for line in many[head + 2 : head + 4]] == ["slower", "undecided"]
    assert max(map(len, table_lines("\n".join(many)))) <= 80


def test_edited_script_is_named(console_script: Console, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for momentum in (0, 0.9):
        script.write_text(TRAIN.format(momentum=momentum))
        done = console_script(tmp_path, "run", "-o", f"m{momentum}", "train.py")
        assert done.returncode == 0, done.stderr
    done = console_script(tmp_path, "compare", "m0", "m0.9")
    assert "script content: train.py was edited between the runs." in done.stdout
    tables = console_script(tmp_path, "compare", "m0", "m0.9", "--full").stdout
    assert ["SGD.momentum", "0", "0.9"] in [line.split() for line in tables.splitlines()]


def test_finding_of_one_run_is_named(console_script: Console, folder: Path) -> None:
    written = json.loads(console_script(folder, "compare", "a", "frozen", "lr", "--json").stdout)
    assert [row["letter"] for row in written["runs"]] == ["A", "B", "C"]
    losses = {row["name"]: row["values"] for row in written["rows"] if row["name"].endswith("loss")}
    assert losses["best loss"][0] <= losses["final loss"][0]
    assert losses["step of the best loss"][0] in range(12)
    (row,) = [row for row in written["findings"] if row["rule"] == "no_update"]
    assert (row["present"], row["severity"]) == (["B"], "warning")
    printed = console_script(folder, "compare", "a", "frozen").stdout
    assert "only in B: warning: `last.weight` and `last.bias` are not in any optimizer" in printed
    printed = console_script(folder, "compare", "a", "frozen", "--full").stdout
    assert re.search(r"warning +B +none +`last.weight` and `last.bias` are not in any", printed)


def test_page_has_the_tables_and_the_curves_of_all_runs(
    console_script: Console, folder: Path, tmp_path: Path
) -> None:
    page = tmp_path / "cmp.html"
    done = console_script(folder, "compare", "a", "lr", "frozen", "-o", page)
    assert done.stdout.endswith(f"{page}\n"), done.stderr
    text = page.read_text()
    report = json.loads(text.split('<script type="application/json" id="report">')[1].split("</script>")[0])
    assert report["verdict"]["headline"] == "The configurations differ in learning rate."
    assert report["verdict"]["detail"].startswith("Final loss: A ")
    assert report["panels"][0]["title"] == "Loss"
    panels = {panel["title"]: panel["data"] for panel in report["panels"] if "data" in panel}
    assert panels["What differs"]["rows"][0] == ["run", "a", "lr", "frozen"]
    assert panels["What differs"]["rows"][-1] == ["learning rate", "0.1", "0.2", "0.1"]
    assert panels["Results"]["heads"] == ["Series", "A", "B", "C"]
    stated = {panel["title"]: panel["stated"] for panel in report["panels"] if "stated" in panel}
    assert stated["Learning rate"] == "0.1 in A a, 0.2 in B lr, 0.1 in C frozen, at every recorded step."
    assert ["warning", "C", "none", "`last.weight` and `last.bias` are not in any optimizer"] in panels[
        "Findings"
    ]["rows"]
    assert [line["label"] for line in panels["Loss"]["charts"][0]["lines"]] == ["A a", "B lr", "C frozen"]


def test_strict_refuses_in_one_line(console_script: Console, folder: Path) -> None:
    done = console_script(folder, "compare", "a", "lr", "--strict")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "a and lr are not comparable: learning rate 0.1 against 0.2. Leave --strict out" in done.stderr
    assert console_script(folder, "compare", "a", "lr", "--strict", "--factor", "lr").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a",), "expected two runs or more, or --ab with two commands; got 1"),
        (("a", "nowhere"), "nowhere: there is no such folder"),
        (("a", "lr", "--factor", "lr"), "--factor names what may differ under --strict: add --strict"),
        (("a", "--ab", "x.py", "y.py"), "--ab takes two commands and no runs"),
    ],
)
def test_bad_arguments_are_refused(
    console_script: Console, folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = console_script(folder, "compare", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
