"""Prometheus: the newest numbers at a text endpoint, or in a file for the node exporter's collector.

The endpoint listens on the loopback interface unless a host is named, gives numbers and takes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from backlight.records import Finding
from backlight.session.trackers.base import Point, Tracked, TrackerError, tracker

PORT = 9464
"""Port where none is named."""

HOST = "127.0.0.1"
"""Interface where none is named."""

_KINDS = {
    "loss": ("loss", ("optimizer",)),
    "total_norm": ("gradient_norm", ()),
    "cost": ("cost_seconds", ()),
    "lr": ("learning_rate", ("optimizer", "group")),
    "phase": ("phase_seconds", ("phase",)),
    "norm": ("group_gradient_norm", ("group",)),
    "ratio": ("group_update_ratio", ("group",)),
    "clip": ("clip", ("what",)),
    "scaler": ("scaler", ("what",)),
    "user": ("user", ("name",)),
}
"""Metric and labels by the part of a point's name before the first slash."""


class _Gauges:
    """Gauges of one run in a registry of their own."""

    def __init__(self, run: Tracked) -> None:
        from prometheus_client import CollectorRegistry, Gauge  # noqa: PLC0415 - not everybody's

        self.registry = CollectorRegistry()
        self._run = run.name
        self._gauges = {
            head: Gauge(
                f"backlight_{metric}", f"{head} of the newest step", ("run", *labels), registry=self.registry
            )
            for head, (metric, labels) in _KINDS.items()
        }
        self._step = Gauge("backlight_step", "newest step", ("run",), registry=self.registry)
        self._time = Gauge(
            "backlight_step_timestamp_seconds", "when it ended", ("run",), registry=self.registry
        )
        self._findings = Gauge(
            "backlight_findings", "findings by rule", ("run", "rule", "severity"), registry=self.registry
        )

    def take(self, point: Point) -> None:
        for name, value in point.values.items():
            head, _, rest = name.partition("/")
            gauge = self._gauges.get(head)
            if gauge is None:
                continue
            count = len(_KINDS[head][1])
            labels = rest.split("/", count - 1) if count else []
            gauge.labels(self._run, *labels, *[""] * (count - len(labels))).set(value)
        self._step.labels(self._run).set(point.step)
        if math.isfinite(point.time):
            self._time.labels(self._run).set(point.time)

    def findings(self, findings: Sequence[Finding]) -> None:
        self._findings.clear()
        for (rule, severity), count in Counter((f.rule, f.severity.value) for f in findings).items():
            self._findings.labels(self._run, rule, severity).set(count)


class _Endpoint:
    """Answers on a port until the run is over."""

    def __init__(self, gauges: _Gauges, host: str, port: int) -> None:
        from prometheus_client import start_http_server  # noqa: PLC0415 - not everybody's

        self._gauges = gauges
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=gauges.registry)
        except OSError as error:
            raise TrackerError(
                f"{host}:{port} cannot be listened on ({error.strerror or error}); name another: "
                "prometheus=PORT or prometheus=HOST:PORT"
            ) from None

    def send(self, points: Sequence[Point]) -> None:
        """Show the newest of each number."""
        for point in points:
            self._gauges.take(point)

    def findings(self, findings: Sequence[Finding], step: int) -> None:
        """Count the findings by rule and severity."""
        del step
        self._gauges.findings(findings)

    def close(self, *, failed: bool) -> None:
        """Stop listening."""
        del failed
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


class _File:
    """Rewrites a file for the textfile collector; a reader sees the old or the new, never a part."""

    def __init__(self, gauges: _Gauges, path: str) -> None:
        self._gauges, self._path = gauges, path
        self._write()

    def send(self, points: Sequence[Point]) -> None:
        """Write the newest of each number."""
        for point in points:
            self._gauges.take(point)
        self._write()

    def findings(self, findings: Sequence[Finding], step: int) -> None:
        """Add the findings by rule and severity."""
        del step
        self._gauges.findings(findings)
        self._write()

    def close(self, *, failed: bool) -> None:
        """Leave the file as it is: it holds how the run ended."""

    def _write(self) -> None:
        from prometheus_client import write_to_textfile  # noqa: PLC0415 - not everybody's

        write_to_textfile(self._path, self._gauges.registry)


@tracker("prometheus")
def open_prometheus(target: str, run: Tracked, active: Any) -> _Endpoint | _File:
    """Serve at ``[HOST:]PORT``, or write to a file whose name ends in ``.prom``; TrackerError for others."""
    del active
    if target.endswith(".prom"):
        return _File(_Gauges(run), target)
    if not run.live:
        raise TrackerError("a stored run has no endpoint: name a file, prometheus=FILE.prom")
    host, _, port = target.rpartition(":")
    if port and not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise TrackerError(f"{target!r}: expected PORT, HOST:PORT or FILE.prom")
    return _Endpoint(_Gauges(run), host.strip("[]") or HOST, int(port) if port else PORT)
