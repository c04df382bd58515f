"""What a run confirms and withdraws of the hints on a script."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from answers import Command
from backlight.diagnose.probes.hints import HintOutcome, ReachedLines, hint_lines, settle
from backlight.launch.reading.hint import Hint
from backlight.launch.reading.script_files import read_script
from backlight.records import Finding, Severity, Subject

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.sharpen = {sharpen}
    def forward(self, x):
        x = self.head(x)
        if self.sharpen:
            x = torch.softmax(x, 1)
        return x
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = 0
clear = {clear}
x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
for step in range(100):
    clear()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    total += {added}
"""

DEAD = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
(model(torch.randn(8, 4)).relu() * 0 + 1).sum().backward()
"""


def script(folder: Path, *, sharpen: bool = False, clear: str = "model.__class__.zero", added: str) -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(sharpen=sharpen, clear=clear, added=added))
    return path


def hint(path: str = "train.py", line: int = 1, *, steps: int = 8, needs_run: bool = False) -> Hint:
    return Hint("kind", ("spike",), steps, needs_run, "it looks wrong", "mend", path, line, 1, 4, "abc")


def spike() -> Finding:
    return Finding(
        severity=Severity.ERROR, title="A spike", detail="", subject=Subject(), evidence=(), fix="",
        refuted_if="", rule="spike",
    )  # fmt: skip


def reached(path: Path) -> ReachedLines:
    """Run three lines of a file, of which the second is skipped, and return what was reached."""
    path.write_text("if False:\n    a = 1\nb = 2\n")
    lines = ReachedLines([hint(str(path), number) for number in (1, 2, 3)])
    code = compile(path.read_text(), str(path), "exec")
    with lines:
        exec(code, {})
    assert sys.gettrace() is None
    return lines


@pytest.mark.parametrize(
    ("findings", "steps", "asked", "outcome"),
    [
        ([spike()], 10, {}, HintOutcome.CONFIRMED),
        ([], 10, {}, HintOutcome.WITHDRAWN),
        ([], 7, {}, HintOutcome.NOT_CONFIRMED),  # the rule has not had its steps
        ([], 10, {"steps": 0}, HintOutcome.NOT_CONFIRMED),
        (None, 10, {}, HintOutcome.NOT_CONFIRMED),
        ([spike()], 10, {"line": 2}, HintOutcome.NOT_REACHED),
    ],
)
def test_outcome_of_a_hint(
    tmp_path: Path, findings: list[Finding] | None, steps: int, asked: dict[str, int], outcome: HintOutcome
) -> None:
    path = tmp_path / "t.py"
    lines = reached(path)
    (result,) = settle([hint(str(path), **asked)], findings, lines, steps)
    assert result.outcome is outcome
    assert result.is_shown is (outcome in {HintOutcome.CONFIRMED, HintOutcome.NOT_CONFIRMED})
    shown = hint_lines([result])
    heads = {
        HintOutcome.CONFIRMED: ["confirmed: A spike"],
        HintOutcome.NOT_CONFIRMED: ["hint, not confirmed"],
    }
    assert shown[:1] == heads.get(outcome, [])


def test_what_needs_the_run_is_shown_only_where_it_confirms(tmp_path: Path) -> None:
    path = tmp_path / "t.py"
    lines = reached(path)
    doubtful = hint(str(path), steps=0, needs_run=True)
    assert [each.is_shown for each in settle([doubtful], [], lines, 10)] == [False]
    assert [each.is_shown for each in settle([doubtful], [spike()], lines, 10)] == [True]


def test_tracer_of_another_is_left_alone(tmp_path: Path) -> None:
    calls: list[str] = []

    def tracer(*_: object) -> None:
        calls.append("call")

    sys.settrace(tracer)
    try:
        with ReachedLines([hint()]) as lines:
            assert sys.gettrace() is tracer
        assert hint() in lines  # it may have run
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(None)


def test_check_confirms_and_withdraws(command: Command, tmp_path: Path) -> None:
    script(tmp_path, sharpen=True, clear="int", added="loss")
    assert [each.name for each in read_script("train.py")] == [
        "activation-before-loss", "never-cleared", "accumulated-loss",
    ]  # fmt: skip
    _, out, _ = command("check", "--through-time", "train.py")
    assert "3 hints, 2 confirmed" in out.splitlines()[0]
    assert "confirmed: Cross-entropy is given the output of softmax" in out
    assert "train.py:14:17: `softmax` before `cross_entropy`" in out
    assert "confirmed: Gradients are not cleared between optimizer steps" in out
    assert "line train.py:25" in out  # of the finding
    assert out.count("hint, not confirmed") == 1


def test_sound_script_is_shown_no_hint(command: Command, tmp_path: Path) -> None:
    """The line of the softmax does not run, and ``clear`` clears, which the reading cannot see."""
    script(
        tmp_path, clear="lambda: [setattr(p, 'grad', None) for p in model.parameters()]", added="loss.item()"
    )
    assert [each.name for each in read_script("train.py")] == ["activation-before-loss", "never-cleared"]
    code, out, _ = command("check", "--through-time", "train.py")
    assert code == 0
    assert "hint" not in out
    assert "findings" not in out.lower()


def test_annotations_name_probes_hints_and_findings(command: Command, tmp_path: Path) -> None:
    script(tmp_path, sharpen=True, clear="int", added="loss")
    probes = ("--through-time", "--mixed-samples")
    _, out, _ = command("check", *probes, "--format", "sarif", "train.py")
    results = json.loads(out)["runs"][0]["results"]
    places = {
        each["ruleId"]: each["locations"][0]["physicalLocation"]["region"]["startLine"] for each in results
    }
    assert places == {"accumulated-loss": 26, "gradients_not_cleared": 25, "loss_input": 14}
    _, out, _ = command("check", *probes, "--format", "github", "train.py")
    assert out.startswith("::notice file=train.py,line=26,title=accumulated-loss%3A hint%2C not confirmed")
    assert "::notice title=backlight::2 probes, 0 failed. 1 error, 1 warning" in out


def test_failed_probe_is_a_failure_and_exit_code_1(command: Command, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEAD)
    code, out, _ = command("check", "--overfit-one-batch", "--format", "junit", "train.py")
    assert code == 1
    (case,) = ET.fromstring(out).findall(".//testcase[failure]")
    assert case.get("name") == "overfit"
    code, out, _ = command("check", "--overfit-one-batch", "--fail-on", "future", "train.py")
    assert code == 0
    assert "overfit        failed" in out
    code, out, _ = command("check", "--overfit-one-batch", "--format", "sarif", "train.py")
    (result,) = json.loads(out)["runs"][0]["results"]
    assert (code, result["level"], result["ruleId"]) == (1, "error", "overfit")


def test_json_and_format_exclude_one_another(command: Command, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    code, _, errors = command("check", "--json", "--format", "sarif", "train.py")
    assert code == 2
    assert "--json and --format exclude one another" in errors
