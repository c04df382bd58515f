"""Lines of a profile: injected slow lines are found, with the share of their phase that they measured."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from backlight import codec
from backlight.cli.console import FACTS, Page
from backlight.diagnose.profile.answer import answer as profile_answer
from backlight.diagnose.profile.line_samples import (
    LineSampler,
    Sample,
    line_times,
    settle,
    speedscope,
    stack_times,
)
from backlight.diagnose.profile.result import ProfileResult
from backlight.diagnose.profile.step_summary import StepTime, summarize_steps
from backlight.text import duration, number
from backlight.watchdog.stacks import Frame

# Each slow line is alone in its phase, or shares it with `other_loop`; the script times both by itself.
SCRIPT = """
import atexit, json, time
import torch
from torch import nn
from torch.utils.data import DataLoader

ROWS = torch.ones(4, 1)
spent = {}
clock = time.perf_counter

class Handwritten(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
    def step(self):
        for value in range(300_000): value * value  # the optimizer

def collate(rows):
    for value in range(300_000): value * value  # the collate_fn
    return ROWS

def generate(loader):
    for batch in loader:
        begin = clock()
        time.sleep(0.012)  # the generator
        spent.setdefault("generator", []).append(clock() - begin)
        yield batch

def loop():
    begin = clock()
    for value in range(300_000): value * value  # the loop
    spent.setdefault("loop", []).append(clock() - begin)

model = nn.Linear(1, 1)
optimizer = Handwritten(model.parameters())
atexit.register(lambda: open("spent.json", "w").write(json.dumps(spent)))
for batch in generate(DataLoader(range(100_000), batch_size=4, collate_fn=collate)):
    model(batch).sum().backward()
    optimizer.step()
    loop()
"""

OPERATIONS = """
import torch
from torch import nn
model = nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.ones(512, 256)
for _ in range(100_000):
    x = model(data)
    for _ in range(8): x = x @ model.weight  # the products
    x.sum().backward()
    optimizer.step()
"""


def line_of(script: str, comment: str) -> str:
    return f"train.py:{1 + next(i for i, line in enumerate(script.splitlines()) if comment in line)}"


def profile(folder: Path, script: str, *arguments: str) -> dict[str, Any]:
    (folder / "train.py").write_text(script, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "backlight",
        "profile",
        "--json",
        "--traced",
        "0",
        *arguments,
        "train.py",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


Answer = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    folder = tmp_path_factory.mktemp("lines")
    for _ in range(5):
        found = profile(folder, SCRIPT, "--timed", "40", "--out", "run", "--flame-graph", "flame.json")
        if found["step"] is not None:  # step times may drift on a busy machine
            break
    return folder, found


@pytest.mark.parametrize(
    ("phase", "comment", "function"),
    [
        ("optimizer", "# the optimizer", "Handwritten.step"),
        ("data", "# the collate_fn", "collate"),
        ("other", "# the loop", "loop"),
        ("other", "# the generator", "generate"),
    ],
)
def test_slow_line_is_named(answer: Answer, phase: str, comment: str, function: str) -> None:
    rows = {(row["phase"], row["line"]): row for row in answer[1]["lines"]}
    found = rows[phase, line_of(SCRIPT, comment)]
    assert found["function"] == function
    assert found["samples"] >= 3
    of_phase = [row for row in answer[1]["lines"] if row["phase"] == phase]
    assert found["ms"] == max(row["ms"] for row in of_phase if row["function"] == function)
    # What else is in these phases takes microseconds.
    slow = {"Handwritten.step", "collate", "loop", "generate"}
    assert sum(row["share"] for row in of_phase if row["function"] in slow) > 0.8


def test_shares_are_those_that_the_script_measured(answer: Answer) -> None:
    """The lines divide their phase as the script's own clock does, within the error of so many samples."""
    folder, found = answer
    spent = json.loads((folder / "spent.json").read_text(encoding="utf-8"))
    begin, end = found["warmup_dropped"], found["warmup_dropped"] + found["step"]["steps"]
    loop, generator = (sum(spent[name][begin:end]) for name in ("loop", "generator"))
    rows = {row["line"]: row for row in found["lines"] if row["phase"] == "other"}
    count = sum(row["samples"] for row in rows.values())
    expected = loop / (loop + generator)
    share = rows[line_of(SCRIPT, "# the loop")]["share"]
    assert share == pytest.approx(expected, abs=5 * (expected * (1 - expected) / count) ** 0.5)


def test_lines_add_up_to_their_phases(answer: Answer) -> None:
    found = answer[1]
    for name, phase in found["phases"].items():
        parts = [row for row in found["lines"] if row["phase"] == name]
        if parts:
            assert sum(row["share"] for row in parts) == pytest.approx(1)
            assert sum(row["ms"] for row in parts) == pytest.approx(
                phase["share"] * found["step"]["median_ms"]
            )


def test_sampling_states_its_cost(answer: Answer) -> None:
    assert 0 < answer[1]["sampling"]["cost"] < 1


def test_flame_graph_is_written_and_stored(answer: Answer) -> None:
    folder, found = answer
    written = json.loads((folder / "flame.json").read_text(encoding="utf-8"))
    (stored,) = folder.glob("run/**/lines.speedscope.json")
    assert json.loads(stored.read_text(encoding="utf-8")) == written
    (graph,) = written["profiles"]
    frames = written["shared"]["frames"]
    names = [[frames[index]["name"] for index in row] for row in graph["samples"]]
    assert {row[0] for row in names} == {row["phase"] for row in found["lines"]}
    assert all(row[1].startswith("<module> (train.py:") for row in names)
    assert sum(graph["weights"]) == pytest.approx(graph["endValue"])


def test_operations_of_torch_are_at_their_line(tmp_path: Path) -> None:
    found = profile(tmp_path, OPERATIONS, "--timed", "40")
    products = [row for row in found["lines"] if row["line"] == line_of(OPERATIONS, "# the products")]
    backward = [row for row in found["lines"] if row["phase"] == "backward"]
    assert sum(row["samples"] for row in products) >= 3
    assert {row["line"] for row in backward} == {line_of(OPERATIONS, "backward()")}


def test_too_few_samples_are_reported(tmp_path: Path) -> None:
    script = SCRIPT.replace("0_000)", "0)").replace("0.012", "0")
    found = profile(tmp_path, script, "--timed", "12")
    assert found["lines"] is None
    assert any(text.startswith("lines: ") for text in found["not_measured"]) or found["step"] is None


@pytest.mark.parametrize("has_thread", [False, True])
def test_switch_interval_is_restored_and_kept_with_other_threads(has_thread: bool) -> None:
    before, release = sys.getswitchinterval(), threading.Event()
    other = threading.Thread(target=release.wait, name="of the script")
    if has_thread:
        other.start()
    sampler = LineSampler(lambda: "other")
    # Other tests of this process may have left threads.
    left = [t for t in threading.enumerate() if t is not other and t is not threading.current_thread()]
    with pytest.MonkeyPatch.context() as patch:
        alive = [t for t in threading.enumerate() if t not in left]
        patch.setattr(threading, "enumerate", lambda: alive)
        sampler.start()
    during = sys.getswitchinterval()
    sampler.stop()
    release.set()
    assert sys.getswitchinterval() == before
    assert (during < before) is not has_thread
    assert sampler.others == (["of the script"] if has_thread else [])
    assert sampler.error is None


OUTER, INNER = Frame("train.py", 3, "<module>"), Frame("train.py", 9, "main.<locals>.work")


def summary(phases: dict[str, float], count: int = 20) -> Any:
    steps = [StepTime.of(phases, 0.1, True) for _ in range(count)]
    return steps, summarize_steps(steps)


def test_samples_weigh_the_time_since_the_last_one() -> None:
    """A section that holds the interpreter lock lets one sample through at its end."""
    steps, profile = summary({"forward": 0.06})
    samples = [Sample(15, "other", (INNER, OUTER), 0.09)]
    samples += [Sample(15, "other", (OUTER,), 0.01) for _ in range(3)]
    first, second = line_times(settle(samples, steps, profile), profile)
    assert (first.line, first.function, first.samples) == ("train.py:9", "work", 1)
    assert first.share == pytest.approx(0.75)
    assert first.ms == pytest.approx(0.75 * 40)
    assert (second.function, second.samples) == ("<module>", 3)


@pytest.mark.parametrize(("phases", "expected"), [({"loss": 0.02}, "loss"), ({"forward": 0.02}, "other")])
def test_time_after_a_forward_is_loss_only_with_a_backward(phases: dict[str, float], expected: str) -> None:
    steps, profile = summary(phases)
    (found,) = settle([Sample(15, "loss", (OUTER,), 0.01)], steps, profile)
    assert found.phase == expected


def test_samples_of_the_warm_up_and_of_open_steps_do_not_count() -> None:
    steps, profile = summary({"forward": 0.02})
    assert settle([Sample(at, "other", (OUTER,), 0.01) for at in (0, len(steps))], steps, profile) == []


def test_flame_graph_has_the_phase_at_its_root() -> None:
    steps, profile = summary({"forward": 0.02})
    samples = settle([Sample(15, "other", (INNER, OUTER), 0.01)], steps, profile)
    graph = speedscope("train.py", stack_times(samples, profile))
    names = [frame["name"] for frame in graph["shared"]["frames"]]
    assert names == ["other", "<module> (train.py:3)", "main.<locals>.work (train.py:9)"]
    assert graph["profiles"][0]["samples"] == [[0, 1, 2]]


def test_verdict_names_phase_and_line_and_at_most_ten_facts_follow(
    answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {key: value for key, value in answer[1].items() if key != "findings"}
    result = codec.convert(content, ProfileResult)
    name, phase = max(result.phases.items(), key=lambda item: item[1].share)
    top = next(row for row in result.lines or () if row.phase == name)
    reply = profile_answer(result)
    assert f"mostly {name}" in reply.verdict
    assert top.line in reply.verdict
    assert phase.share > 0
    assert reply.facts
    assert not any(top.line in line for line in reply.facts)
    assert any(f"the first took {duration(result.first_ms / 1e3)}" in line for line in reply.facts)
    assert result.step is not None
    assert f"throughput: {number(1e3 / result.step.median_ms)} steps/s" in reply.facts
    Page().answer(reply)
    short = capsys.readouterr().out.splitlines()
    Page().answer(reply, full=True)
    assert len(short) <= 2 + FACTS + len(result.not_measured)
    assert "MAD ms" in capsys.readouterr().out
    assert not any("MAD ms" in line for line in short)
