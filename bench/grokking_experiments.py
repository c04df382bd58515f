"""The ten experiments in their ci presets: the effect of the paper, and its absence in a control.

Each preset is trained on one core for each seed, and so is a negative control of its own. A claim that
is not a verdict on the accuracies (robustness, slingshots, tickets, distribution) has a check of its
own, written out next to it. What does not show is printed as it came out. Verdicts that are not the
`ci_expects` of the experiment are marked. Seconds are those of the processor, so that what else the
machine does counts little.

    python bench/grokking_experiments.py [NAME ...] [--seeds 3] [--first 0] [--only ci|control]
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from backlight.experiments.experiment import EXPERIMENTS
from backlight.experiments.task import Task
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
    return Outcome(logs, verdict_of(task, logs), time.process_time() - start)


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
    """Check that robust accuracy rises by .1 or more after clean accuracy has come."""
    fitted = outcome.verdict.memorised
    robust = outcome.series("progress/adversarial_accuracy")
    after = [value for step, value in robust if fitted is not None and step >= fitted.by]
    if not after:
        return False, "not fitted"
    return after[-1] - after[
        0
    ] >= 0.1, f"robust accuracy {after[0]:.2f} when fitted, {after[-1]:.2f} at the end"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="experiments; all ten by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", choices=("ci", "control"), help="leave out the other")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    table = Table(title="ci presets on one core: the effect, and its control")
    for column in ("experiment", "run", "seed", "verdict", "fitted", "generalised", "effect", "details", "s"):
        table.add_column(column)
    shown: dict[str, list[bool]] = {}
    for name in arguments.names or list(EXPERIMENTS):
        claim = CLAIMS[name]
        runs = [("ci", {}, ""), (claim.control_name, claim.control, claim.labels)]
        if arguments.only:
            runs = runs[:1] if arguments.only == "ci" else runs[1:]
        for run, change, labels in runs:
            for seed in range(arguments.first, arguments.first + arguments.seeds):
                outcome = trained(name, seed, change, labels)
                effect, details = claim.check(outcome)
                shown.setdefault(f"{name}, {run}", []).append(effect)
                found = outcome.verdict
                printed = f"{found.verdict}{' (strong)' if found.strong else ''}"
                if run == "ci" and found.verdict != EXPERIMENTS[name].ci_expects:
                    printed += ", not expected"
                row = (
                    name,
                    run,
                    str(seed),
                    printed,
                    str(found.memorised or "never"),
                    str(found.generalised or "never"),
                    "shows" if effect else "absent",
                    details,
                    f"{outcome.seconds:.1f}",
                )
                table.add_row(*row)
                console.print(" | ".join(row), highlight=False)
    console.print(table)
    for key, effects in shown.items():
        what = EXPERIMENTS[key.split(",")[0]].effect
        console.print(f"{key}: {what} shows in {sum(effects)} of {len(effects)}", highlight=False)


if __name__ == "__main__":
    main()
