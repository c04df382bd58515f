"""Weights & Biases: the run that the user has open, else one of its own; online or offline as W&B is set.

W&B counts the steps of a run itself, and drops what comes with a lower number. In a run of the user's
nothing from backlight may therefore advance it: the newest numbers ride along with the next row that the user
logs, and ``backlight/step`` is their axis.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backlight.records import Finding, Severity
from backlight.session.trackers.base import PREFIX, Point, Tracked, TrackerError, in_markdown, tracker

TIMEOUT_S = 20.0
"""Seconds for which a run of backlight waits for a server, at its start and for its last rows.

W&B's own are 90, and without end. ``WANDB_INIT_TIMEOUT`` and ``WANDB_FINISH_TIMEOUT`` set others."""


class _Run:
    """A run of W&B; ``own`` where backlight opened it and so finishes it; ``alerts`` while it is live."""

    def __init__(self, wandb: Any, run: Any, *, is_own: bool, alerts: bool = True) -> None:
        self._wandb, self._run, self._is_own, self._alerts = wandb, run, is_own, alerts
        self._before: dict[str, str | None] = {}
        self._alerted: set[str] = set()
        run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def send(self, points: Sequence[Point]) -> None:
        """Log one row per point, or what is newest of each number."""
        rows = [self._row(point) for point in points]
        if self._is_own:
            for row in rows:
                self._run.log(row)
        elif rows:
            newest = {name: value for row in rows for name, value in row.items()}
            self._run.log(newest, commit=False)

    def findings(self, findings: Sequence[Finding], step: int) -> None:
        """Put the findings into the summary, below those of another watch, and their rules among the tags.

        Each rule with an error or a warning alerts once.
        """
        del step
        by_rule: dict[str, list[Finding]] = {}
        for finding in findings:
            by_rule.setdefault(finding.rule, []).append(finding)
        for rule, of_rule in by_rule.items():
            self._alert(rule, of_rule)
            name, lines = f"{PREFIX}findings/{rule}", [f"{f.severity}: {f.title}" for f in of_rule]
            before = self._before.setdefault(name, self._run.summary.get(name))
            self._run.summary[name] = "\n".join([*([before] if before else []), *lines])
        rules = sorted(f"{PREFIX}{rule}" for rule in by_rule)
        if rules:
            self._run.tags = tuple(dict.fromkeys((*(self._run.tags or ()), *rules)))

    def _alert(self, rule: str, findings: Sequence[Finding]) -> None:
        worst = max((finding.severity for finding in findings), key=lambda severity: severity.rank)
        if self._alerts and worst is not Severity.INFO and rule not in self._alerted:
            self._alerted.add(rule)
            level = "ERROR" if worst is Severity.ERROR else "WARN"
            self._run.alert(f"backlight: {rule}", in_markdown(findings), level=level)

    def close(self, *, failed: bool) -> None:
        """Finish the run if backlight started it."""
        if self._is_own:
            self._run.finish(exit_code=int(failed))

    def _row(self, point: Point) -> dict[str, Any]:
        row: dict[str, Any] = {
            PREFIX + name: value for name, value in point.values.items() if self._is_sent(name)
        }
        row |= {PREFIX + name: self._wandb.Histogram(spread) for name, spread in point.spreads.items()}
        return row | {f"{PREFIX}step": point.step}

    def _is_sent(self, name: str) -> bool:
        """Leave out what the user logs, in a run of theirs that has it already."""
        return self._is_own or not name.startswith("user/")


def _open_run() -> Any:
    wandb = sys.modules.get("wandb")
    return getattr(wandb, "run", None)


def _has_credentials(wandb: Any) -> bool:
    if "prompt" in inspect.signature(wandb.login).parameters:  # from 0.29 on
        return bool(wandb.login(prompt=False, verify=False))
    return wandb.api.api_key is not None


def _timeouts(wandb: Any, run: Tracked) -> dict[str, Any]:
    """Return how long W&B may wait, where the user set no limit: a dead server must not hold the process."""
    wanted = {"init_timeout": TIMEOUT_S}
    if run.live:  # sending a stored run may wait
        wanted["finish_timeout"] = TIMEOUT_S
    fields = getattr(wandb.Settings, "model_fields", {})
    return {
        name: seconds
        for name, seconds in wanted.items()
        if name in fields and f"WANDB_{name.upper()}" not in os.environ
    }


@tracker("wandb", active=_open_run)
def open_wandb(target: str, run: Tracked, active: Any) -> _Run:
    """Send to the user's run, else to a new one in the project ``target`` (``[ENTITY/]PROJECT``)."""
    import wandb  # noqa: PLC0415 - slow, and not everybody's

    if active is not None:
        return _Run(wandb, active, is_own=False)
    mode = os.environ.get("WANDB_MODE", "online")
    # W&B would ask at the terminal for a key, in the middle of a training run.
    if mode in {"online", "shared"} and not _has_credentials(wandb):
        raise TrackerError("no credentials of W&B: run wandb login, or set WANDB_MODE=offline")
    entity, _, project = target.rpartition("/")
    folder = os.environ.get("WANDB_DIR", str(run.path / "export"))
    with contextlib.suppress(OSError):  # W&B reports it and takes another directory
        Path(folder).mkdir(parents=True, exist_ok=True)
    # A run that is not the global one: what the script itself opens later is its own.
    opened = wandb.init(
        entity=entity or None,
        project=project or "backlight",
        name=run.name,
        dir=folder,
        reinit="create_new",
        config={"backlight/run": str(run.path.absolute())},
        settings=wandb.Settings(console="off", silent=True, **_timeouts(wandb, run)),
    )
    return _Run(wandb, opened, is_own=True, alerts=run.live)
