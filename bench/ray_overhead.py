"""What watching adds to the steps of two workers of Ray Train, and to the controller's polls.

Blocks of steps with and without ``backlight.watch`` alternate in one fit, with a control of two without; the
figures are medians of ratios over rounds, of processor time of a worker and by the clock. The steps at the
begin of a block, of which more are recorded (0.1 s of recording), are not timed unless ``--untimed`` is less.

    OMP_WAIT_POLICY=PASSIVE python bench/ray_overhead.py
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import backlight
from backlight.integrations.ray import BacklightCallback, read_stalls

KINDS = ("plain", "watched", "control")
UNTIMED_STEPS = 250
POLLS = 2000


def block(folder: Path, kind: str, number: int, steps: int, untimed: int) -> tuple[float, float]:
    """Return processor and wall seconds of the timed steps of one block."""
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(512, 512), nn.ReLU())]
    model = prepare_model(nn.Sequential(*layers, nn.Linear(512, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = folder / f"run-{number}"
    watch = backlight.watch(model, optimizer, run=run, quiet=True).start() if kind == "watched" else None
    x, y = torch.randn(64, 512), torch.randint(10, (64,))
    began = (0.0, 0.0)
    for step in range(untimed + steps):
        if step == untimed:
            began = time.process_time(), time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    ended = time.process_time(), time.perf_counter()
    if watch is not None:
        watch.stop()
    torch.distributed.barrier()
    return ended[0] - began[0], ended[1] - began[1]


def train(config: dict[str, Any]) -> None:
    """Measure the rounds, in each worker; rank 0 writes them."""
    folder, found = Path(config["folder"]), []
    for number in range(config["rounds"]):
        order = KINDS[number % 3 :] + KINDS[: number % 3]
        found.append(
            {kind: block(folder, kind, number, config["steps"], config["untimed"]) for kind in order}
        )
    if ray.train.get_context().get_world_rank() == 0:
        (folder / "rounds.json").write_text(json.dumps(found))


def polls(run: Path) -> float:
    """Return seconds of one poll of the controller, on a run that has not stalled."""
    launch = "bench"
    began = time.process_time()
    for _ in range(POLLS):
        read_stalls(run, launch)
    return (time.process_time() - began) / POLLS


def main() -> None:
    """Fit, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--untimed", type=int, default=UNTIMED_STEPS)
    options = parser.parse_args()
    ray.init(num_cpus=2, log_to_driver=False, logging_level=logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train,
            train_loop_config={
                "folder": folder,
                "rounds": options.rounds,
                "steps": options.steps,
                "untimed": options.untimed,
            },
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="bench", storage_path=folder, callbacks=[BacklightCallback()]),
        ).fit()
        found = json.loads(Path(folder, "rounds.json").read_text())
        poll_s = polls(Path(folder, "run-0"))
    ray.shutdown()
    for index, clock in enumerate(("processor time", "by the clock")):
        for kind in KINDS[1:]:
            ratios = [one[kind][index] / one["plain"][index] - 1 for one in found]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"{kind:8} {clock:15} {middle:+.2%} (quartiles {low:+.2%} to {high:+.2%})")
    print(f"a poll of the controller: {1e6 * poll_s:.0f} us of processor time")


if __name__ == "__main__":
    main()
