"""Worker functions of the tests of Ray Train."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import prepare_model
from torch import nn

import backlight
from integrations.tiny import digest

STEPS = 24
STALL_S = 6.0
VARIABLES = ("BACKLIGHT_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def note(config: dict[str, Any], name: str, content: Any) -> None:
    rank = ray.train.get_context().get_world_rank()
    Path(config["folder"], f"{name}-{rank}.json").write_text(json.dumps(content))


def train(
    config: dict[str, Any],
    name: str,
    settings: dict[str, Any] | None = None,
    then: Callable[[backlight.Watch, nn.Module], None] = lambda watch, model: None,
) -> None:
    """Train, watched with ``settings``; note a digest of weights and random state, and call ``then``."""
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(ray.train.get_context().get_world_rank())
    watch = None if settings is None else backlight.watch(model, optimizer, **settings).start()
    for _ in range(STEPS):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()
    note(config, name, digest(model) + str(torch.rand(1).item()))
    if watch is not None:
        then(watch, model)
        watch.stop()


def hang(config: dict[str, Any]) -> None:
    """Train without and with a watch, report, and leave a collective out on rank 1."""

    def then(watch: backlight.Watch, model: nn.Module) -> None:
        feeds = next(m for m in watch.monitors if m.name == "trackers")._feeds
        while feeds and "backlight/loss" not in getattr(feeds[0]._sink, "newest", ()):
            time.sleep(0.05)  # numbers are delivered off the step's path
        ray.train.report({"mine": 1})
        skip_collective(Path(config["folder"], "waits"), model)

    note(config, "variables", {name: os.environ.get(name) for name in VARIABLES})
    train(config, "plain")
    train(config, "watched", {"stalls": {"after": STALL_S}, "trackers": "ray", "flush_interval": 0.1}, then)


def skip_collective(marker: Path, model: nn.Module) -> None:
    if ray.train.get_context().get_world_rank() == 1:
        while not marker.exists():  # moves until the other rank waits
            with model.no_sync():
                model(torch.randn(4, 8)).sum().backward()
            time.sleep(0.05)
        while True:
            time.sleep(0.2)  # injected: it never comes to the collective
    marker.touch()
    torch.distributed.all_reduce(torch.zeros(1))


def retry(config: dict[str, Any]) -> None:
    """Hang once, as the first attempt; the second one trains to its end."""
    first = Path(config["folder"], "first")
    is_first = not first.exists()

    def then(watch: backlight.Watch, model: nn.Module) -> None:
        torch.distributed.barrier()
        if is_first:
            first.touch()
            skip_collective(Path(config["folder"], "waits"), model)

    train(config, "watched", {"stalls": {"after": STALL_S}} if is_first else {}, then)


def held(config: dict[str, Any]) -> None:
    """Train and hang, where the directory of the run is not free."""
    hang(config)


def elastic(config: dict[str, Any]) -> None:
    """Train on one worker until there are two: it is ended for the next attempt."""

    def then(watch: backlight.Watch, model: nn.Module) -> None:
        size = ray.train.get_context().get_world_size()
        Path(config["folder"], "begun").touch()
        while size == 1:  # prepare_model wraps no model of a single worker
            model(torch.randn(4, 8)).sum().backward()
            time.sleep(0.05)

    train(config, "watched", {}, then)


def lightning(config: dict[str, Any]) -> None:
    """Fit with Lightning without and with the callback."""
    import lightning as L
    from ray.train.lightning import (
        RayDDPStrategy,
        RayLightningEnvironment,
        RayTrainReportCallback,
        prepare_trainer,
    )

    from backlight.integrations.lightning import BacklightCallback
    from integrations import lit

    for name in ("plain", "watched"):
        model = lit.Net()
        own = [BacklightCallback(summary=False)] if name == "watched" else [RayTrainReportCallback()]
        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", devices="auto", callbacks=own, logger=False,
            strategy=RayDDPStrategy(find_unused_parameters=True), plugins=[RayLightningEnvironment()],
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        prepare_trainer(trainer).fit(model, lit.data(), lit.data(16))
        note(config, name, lit.digest(model))


def huggingface(config: dict[str, Any]) -> None:
    """Train with the Trainer of transformers without and with the callback."""
    from ray.train.huggingface.transformers import prepare_trainer

    from backlight.integrations.huggingface import BacklightCallback
    from integrations import tiny

    for name in ("plain", "watched"):
        own = [BacklightCallback(summary=False)] if name == "watched" else []
        trainer = prepare_trainer(tiny.trainer(Path(config["folder"]), *own))
        trainer.train()
        note(config, name, tiny.digest(trainer.model))


def remote(config: dict[str, Any]) -> None:
    """Train and hang, where the storage is no file system of the node."""
    train(
        config,
        "watched",
        {"stalls": {"after": STALL_S}},
        lambda watch, model: skip_collective(Path(config["folder"], "waits"), model),
    )
