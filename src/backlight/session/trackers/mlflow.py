"""MLflow: the run that the user has open, else one of its own, in whatever store MLflow is set to.

Only the client with explicit run ids is used: the active run of a thread is the user's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backlight.records import Finding
from backlight.session.trackers.base import PREFIX, Point, Tracked, tracker

EXPERIMENT = "backlight"
"""Experiment that runs of our own belong to."""

BATCH = 1000
"""Metrics that a call may carry at most, by MLflow's own limit."""

ATTEMPTS = "3"
"""How often a server is asked again when a stored run is sent, unless MLflow is set otherwise."""

_TAG = 5000


class _Run:
    """A run of MLflow; ``own`` where we made it and so end it."""

    def __init__(self, client: Any, identifier: str, *, is_own: bool) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415 - slow, and not everybody's

        self._client, self._id, self._is_own, self._metric = client, identifier, is_own, Metric

    def send(self, points: Sequence[Point]) -> None:
        """Log every number as a metric; MLflow has no histograms."""
        metrics = [
            self._metric(PREFIX + name, value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
            if self._is_own or not name.startswith("user/")
        ]
        for start in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + BATCH])

    def findings(self, findings: Sequence[Finding], step: int) -> None:
        """Tag the run with each rule and its findings."""
        del step
        by_rule: dict[str, str] = {}
        for finding in findings:
            line = f"{finding.severity}: {finding.title}"
            by_rule[finding.rule] = f"{by_rule[finding.rule]}\n{line}" if finding.rule in by_rule else line
        for rule, lines in by_rule.items():
            self._client.set_tag(self._id, f"{PREFIX}findings/{rule}", lines[:_TAG])

    def close(self, *, failed: bool) -> None:
        """End the run if backlight started it."""
        if self._is_own:
            self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _open_run() -> Any:
    mlflow = sys.modules.get("mlflow")
    active = mlflow.active_run() if mlflow is not None and hasattr(mlflow, "active_run") else None
    return active.info.run_id if active is not None else None


@tracker("mlflow", active=_open_run)
def open_mlflow(target: str, run: Tracked, active: Any) -> _Run:
    """Send to the user's run, else to a new one.

    ``target`` is a tracking URI, or a directory for a SQLite store; without it MLflow's own
    setting holds.
    """
    from mlflow import MlflowClient  # noqa: PLC0415 - slow, and not everybody's

    if active is not None:
        return _Run(MlflowClient(), str(active), is_own=False)
    if not run.live:
        # The user waits at a terminal: MLflow's own seven attempts at an absent server take minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", ATTEMPTS)
    client = MlflowClient(tracking_uri=_uri(target) if target else None)
    existing = client.get_experiment_by_name(EXPERIMENT)
    experiment = existing.experiment_id if existing is not None else client.create_experiment(EXPERIMENT)
    tags = {f"{PREFIX}run": str(run.path.absolute())}
    return _Run(client, client.create_run(experiment, run_name=run.name, tags=tags).info.run_id, is_own=True)


def _uri(target: str) -> str:
    if "://" in target or target in {"databricks", "uc"}:
        return target
    folder = Path(target).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}"
