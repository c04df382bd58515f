"""The ten experiments in their ci presets: the effect of the paper, and its absence in a control.

Each preset is trained on one core for each seed, and so is a negative control of its own. A claim that
is not a verdict on the accuracies (robustness, slingshots, tickets, distribution) has a check of its
own, written out next to it. What does not show is recorded as it came out. Seconds are those of the
processor, so that what else the machine does counts little.

Each run is written into bench/grokking_experiments.json with its accuracies and the version of its preset and
its check, and the table of docs/grokking-experiments.md is made from that file. A test compares the versions,
evaluates the accuracies again and makes the table again, so that no row outlives what it was measured with.

    python bench/grokking_experiments.py [NAME ...] [--seeds 5] [--first 0] [--only ci|control]
    python bench/grokking_experiments.py --table      # only the table, from the runs in the file
"""

from __future__ import annotations

import argparse
import ast
import base64
import collections
import dataclasses
import hashlib
import inspect
import json
import statistics
import sys
import textwrap
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backlight import codec
from backlight.experiments.experiment import EXPERIMENTS
from backlight.experiments.task import Task
from backlight.monitors.grokking.model.curves import wilson
from backlight.monitors.grokking.model.detection import detect
from backlight.monitors.grokking.model.verdicts import Detection

Log = tuple[int, dict[str, float]]
Change = dict[str, Any]


@dataclasses.dataclass
class Outcome:
    """A training run: its logs, its verdict by the accuracies, its processor seconds."""

    logs: list[Log]
    verdict: Detection
    seconds: float
    task: Task

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return steps and values of what was measured under ``name``."""
        return [(step, values[name]) for step, values in self.logs if name in values]

    def last(self, name: str) -> float:
        """Return the last value of ``name``."""
        return self.series(name)[-1][1]


def changed(settings: Any, change: Change) -> Any:
    """Return settings with ``{"training.lr": 1e-3}`` put in."""
    for key, value in change.items():
        section, field = key.split(".")
        part = dataclasses.replace(getattr(settings, section), **{field: value})
        settings = dataclasses.replace(settings, **{section: part})
    return settings


def verdict_of(task: Task, logs: list[Log], test: str = "test_accuracy") -> Detection:
    """Compare training accuracy with ``test``."""
    logged = [(step, values) for step, values in logs if test in values]
    steps = [step for step, _ in logged]
    return detect(
        steps,
        [values["train_accuracy"] for _, values in logged],
        steps,
        [values[test] for _, values in logged],
        chance=task.chance,
        train_size=len(task.split.train_inputs),
        test_size=len(task.split.test_inputs),
    )


def trained(name: str, seed: int, change: Change, control: str = "") -> Outcome:
    """Train the ci preset with ``change``."""
    experiment = EXPERIMENTS[name]
    settings = changed(experiment.ci, change)
    task = experiment.build(settings, seed, torch.device("cpu"), control)
    plan, logs, start = settings.training, [], time.process_time()
    for step in range(plan.steps + 1):
        if step % plan.log_every == 0 or step == plan.steps:
            thorough = step % plan.thorough_every == 0
            logs.append((step, dict(task.evaluate(thorough=thorough))))
        if step == plan.steps:
            break
        task.before_step(step)
        task.train_step(step)
    return Outcome(logs, verdict_of(task, logs), time.process_time() - start, task)


def spikes(losses: list[tuple[int, float]], after: int, factor: float = 20.0, least: float = 1e-5) -> int:
    """Count how often a fitted training loss rose ``factor`` times above its lowest since the last spike."""
    lowest, count = float("inf"), 0
    for step, loss in losses:
        if step < after:
            continue
        if loss > max(factor * lowest, least):
            count, lowest = count + 1, loss
        lowest = min(lowest, loss)
    return count


def verdict(outcome: Outcome) -> tuple[bool, str]:
    """Check for grokking."""
    return outcome.verdict.verdict == "grokking", ""


def restricted_before_test(outcome: Outcome) -> tuple[bool, str]:
    """Check for grokking, and that restricted loss is halved before the test loss is."""
    halves = []
    for key in ("progress/restricted_loss", "test_loss"):
        series = outcome.series(key)
        halves.append(next((s for s, v in series if s > 0 and v < series[0][1] / 2), None))
    early = halves[0] is not None and (halves[1] is None or halves[0] < halves[1])
    shown = outcome.verdict.verdict == "grokking" and early
    return shown, f"restricted loss halved at {halves[0]}, test loss at {halves[1]}"


def structure(outcome: Outcome) -> tuple[bool, str]:
    """Check that the representation is whole and tests are answered."""
    quality, test = outcome.last("progress/representation_quality"), outcome.last("test_accuracy")
    return quality > 0.9 and test >= 0.75, f"representation quality {quality:.2f}, test {test:.2f}"


def in_but_not_out(outcome: Outcome) -> tuple[bool, str]:
    """Check for grokking in distribution and none out of it."""
    out = outcome.last("progress/out_of_distribution_accuracy")
    shown = outcome.verdict.verdict == "grokking" and out < 0.2
    return shown, f"test {outcome.last('test_accuracy'):.2f}, out of distribution {out:.2f}"


def robustness(outcome: Outcome) -> tuple[bool, str]:
    """Check for a delay of the accuracy on attacked samples, which no guessing net has, by the verdict."""
    robust = outcome.series("progress/adversarial_accuracy")
    train = [(step, values["train_accuracy"]) for step, values in outcome.logs]
    detection = detect(*zip(*train, strict=True), *zip(*robust, strict=True), chance=0.0, test_size=200)
    shown = detection.verdict == "grokking"
    times = f"generalised in {detection.generalised}" if detection.generalised else "never general"
    return shown, f"robust accuracy: {times}, {robust[-1][1]:.2f} at the end"


def slingshots(outcome: Outcome) -> tuple[bool, str]:
    """Check for two loss spikes or more, a last layer that grew by a quarter since, and a test half right."""
    fitted = outcome.verdict.memorised
    if fitted is None:
        return False, "not fitted"
    count = spikes(outcome.series("train_loss"), 5 * fitted.by)
    norms = [value for step, value in outcome.series("progress/last_layer_norm") if step >= 5 * fitted.by]
    test = outcome.last("test_accuracy")
    shown = count >= 2 and norms[-1] > 1.25 * norms[0] and test >= 0.5
    return shown, f"{count} spikes, last layer {norms[0]:.1f} to {norms[-1]:.1f}, test {test:.2f}"


def participation(outcome: Outcome) -> tuple[bool, str]:
    """Check for grokking with neurons on one wave each."""
    first, last = outcome.series("progress/fourier_ipr")[0][1], outcome.last("progress/fourier_ipr")
    shown = outcome.verdict.verdict == "grokking" and last > 2 * first
    return shown, f"participation {first:.2f} to {last:.2f}"


def generalises_after(outcome: Outcome, level: float = 0.9) -> float:
    """Return the steps from the rewinding to a test accuracy of ``level``; inf for never."""
    rewound = [(step, values) for step, values in outcome.logs if values["progress/phase"] == 1]
    start = rewound[0][0]
    return next((step - start for step, values in rewound if values["test_accuracy"] >= level), float("inf"))


def ticket(outcome: Outcome) -> tuple[bool, str]:
    """Check that the rewound net generalises in fewer steps than the dense one took."""
    dense = next((s for s, v in outcome.logs if v["test_accuracy"] >= 0.9), float("inf"))
    after = generalises_after(outcome)
    return after < dense, f"test .9: dense {dense}, rewound {after}, end {outcome.last('test_accuracy'):.2f}"


@dataclasses.dataclass(frozen=True)
class Claim:
    """What is checked of an experiment, and the control in which it must not show."""

    check: Callable[[Outcome], tuple[bool, str]]
    control_name: str
    control: Change = dataclasses.field(default_factory=dict)
    labels: str = ""


RANDOM = "random labels"
CLAIMS = {
    "power": Claim(verdict, RANDOM, labels="random-labels"),
    "liu": Claim(structure, "slow embeddings", {"training.embedding_lr": 1e-5}),
    "nanda": Claim(restricted_before_test, "weight decay 0", {"training.weight_decay": 0.0}),
    "wang": Claim(in_but_not_out, RANDOM, labels="random-labels"),
    "omnigrok": Claim(verdict, "initialisation x 1", {"model.scale": 1.0}),
    "humayun": Claim(robustness, RANDOM, labels="random-labels"),
    "thilak": Claim(slingshots, "epsilon 1e-4", {"training.eps": 1e-4}),
    "doshi": Claim(participation, RANDOM, labels="random-labels"),
    "levi": Claim(verdict, "lambda = 2", {"data.train_size": 50}),
    "minegishi": Claim(ticket, "random mask", {"training.mask": "random"}),
}


RUNS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "grokking-experiments.md"
MARKS = "<!-- presets -->", "<!-- end of presets -->"
Row = dict[str, Any]


def version(name: str) -> str:
    """Return a digest of all that determines an experiment's rows but torch: preset, control, code, check."""
    experiment, claim = EXPERIMENTS[name], CLAIMS[name]
    module = ast.parse(Path(inspect.getfile(experiment.build)).read_text(encoding="utf-8"))
    codes = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    codes += ast.parse(textwrap.dedent(inspect.getsource(claim.check))).body  # type: ignore[arg-type]
    for node in codes:
        node.decorator_list, node.returns = [], None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        for inner in ast.walk(node):  # names of types determine no number
            if isinstance(inner, ast.arg):
                inner.annotation = None
            elif isinstance(inner, ast.FunctionDef):
                inner.returns = None
    parts = [codec.plain(experiment.ci), claim.control, claim.labels, *map(ast.unparse, codes)]
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def packed(outcome: Outcome) -> str:
    """Return steps, training and test accuracies of the verdict, as counts of samples."""
    logged = [(step, values) for step, values in outcome.logs if "test_accuracy" in values]
    sizes = len(outcome.task.split.train_inputs), len(outcome.task.split.test_inputs)
    columns = [sizes[0], *(round(v["train_accuracy"] * sizes[0]) for _, v in logged)]
    columns += [sizes[1], *(round(v["test_accuracy"] * sizes[1]) for _, v in logged)]
    table = np.array([round(outcome.task.chance * 1e9), *(step for step, _ in logged), *columns], np.int32)
    return base64.b64encode(zlib.compress(table.tobytes(), 9)).decode()


def evaluated(curves: str) -> Detection:
    """Return the verdict on accuracies that :func:`packed` wrote."""
    table = np.frombuffer(zlib.decompress(base64.b64decode(curves)), np.int32).reshape(3, -1)
    (chance, *steps), (train_size, *train), (test_size, *test) = table.tolist()
    return detect(
        steps, np.array(train) / train_size, steps, np.array(test) / test_size,
        chance=chance / 1e9, train_size=train_size, test_size=test_size,
    )  # fmt: skip


def row_of(run: str, seed: int, effect: bool, details: str, outcome: Outcome) -> Row:
    """Return a row of the file."""
    curves = packed(outcome)
    return {
        "run": run, "seed": seed, "effect": effect, "details": details, "seconds": round(outcome.seconds),
        "torch": torch.__version__, **summary(evaluated(curves)), "curves": curves,
    }  # fmt: skip


def summary(detection: Detection) -> Row:
    """Return what the table shows of a verdict."""
    rise = detection.transition
    return {
        "verdict": detection.words,
        "memorised": str(detection.memorised or "never"),
        "generalised": str(detection.generalised or "never"),
        "ratio": [None if bound is None else round(bound, 1) for bound in detection.ratio or ()],
        "decades": [b if b is None else round(b, 2) for b in (rise.decades, *rise.interval)] if rise else [],
        "sharpness": rise.sharpness.value if rise else "",
    }


def read() -> dict[str, Any]:
    """Return the runs of the file by experiment; none where there is no file."""
    return json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.exists() else {}


def record(name: str, row: Row) -> None:
    """Write a row, in place of one of the same run; rows of another version go."""
    stored = read()
    entry = stored.get(name)
    if entry is None or entry["version"] != version(name):
        entry = {"version": version(name), "rows": []}
    others = [r for r in entry["rows"] if (r["run"], r["seed"]) != (row["run"], row["seed"])]
    entry["rows"] = sorted([*others, row], key=lambda r: (r["run"] != "ci", r["seed"]))
    stored[name] = entry
    text = json.dumps(dict(sorted(stored.items())), indent=1, ensure_ascii=False)
    RUNS.write_text(text + "\n", encoding="utf-8")


def shows(rows: list[Row]) -> str:
    """Return in how many runs an effect shows, with the 95 % interval of Wilson."""
    count = sum(row["effect"] for row in rows)
    low, high = wilson(count / len(rows), len(rows))
    return f"{count} of {len(rows)} ({100 * low:.0f} to {100 * high:.0f} %)"


def counted(words: Iterable[str]) -> str:
    """Return words with how often each occurs: ``grokking 4, no-delay 1``."""
    return ", ".join(f"{word} {count}" for word, count in collections.Counter(words).most_common() if word)


def table(stored: dict[str, Any]) -> str:
    """Return the table of the page, of the experiments that the file has."""
    lines = [
        "| name | published claim | shows in | verdicts | t_m; t_g by seed | t_g / t_m | rise in decades | "
        "control | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, entry in stored.items():
        rows = [row for row in entry["rows"] if row["run"] == "ci"]
        controls = [row for row in entry["rows"] if row["run"] != "ci"]
        if not rows:
            continue
        times = "; ".join(f"{r['seed']}: {r['memorised']}, {r['generalised']}" for r in rows)
        ratios = ", ".join(_interval(r["ratio"]) for r in rows if r["ratio"])
        decades = ", ".join(
            f"{r['decades'][0]:g} ({_interval(r['decades'][1:])})" for r in rows if r["decades"]
        )
        against = "not run"
        if controls:
            verdicts = counted(r["verdict"] for r in controls)
            against = f"{CLAIMS[name].control_name}: {shows(controls)}; {verdicts}"
        cells = (
            f"`{name}`", EXPERIMENTS[name].effect, shows(rows), counted(r["verdict"] for r in rows), times,
            ratios, f"{decades}: {counted(r['sharpness'] for r in rows)}" if decades else "", against,
            f"{statistics.median(r['seconds'] for r in rows):.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    missing = [f"`{name}`" for name in CLAIMS if name not in stored]
    lines += ["", f"Not run with these presets: {', '.join(missing)}."] if missing else []
    return "\n".join(lines)


def _interval(bounds: list[float | None]) -> str:
    low, high = [*bounds, None][:2]
    return f"from {low:g}" if high is None else f"{low:g} to {high:g}"


def page(text: str, stored: dict[str, Any]) -> str:
    """Return the text of the page with the table of the runs."""
    begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    return f"{text[:begin]}\n{table(stored)}\n{text[end:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="experiments; all ten by default")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", choices=("ci", "control"), help="leave out the other")
    parser.add_argument("--table", action="store_true", help="train nothing; write the table of the page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in [] if arguments.table else arguments.names or list(EXPERIMENTS):
        claim = CLAIMS[name]
        runs = [("ci", {}, ""), (claim.control_name, claim.control, claim.labels)]
        if arguments.only:
            runs = runs[:1] if arguments.only == "ci" else runs[1:]
        for run, change, labels in runs:
            for seed in range(arguments.first, arguments.first + arguments.seeds):
                outcome = trained(name, seed, change, labels)
                effect, details = claim.check(outcome)
                row = row_of(run, seed, effect, details, outcome)
                record(name, row)
                shown = {key: value for key, value in row.items() if key not in {"curves", "torch"}}
                sys.stdout.write(f"{name}: {json.dumps(shown, ensure_ascii=False)}\n")
                sys.stdout.flush()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")


if __name__ == "__main__":
    main()
