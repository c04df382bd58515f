"""Ray Train: what the training run gives ``ray.train.report`` carries the newest numbers as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from backlight.records import Finding
from backlight.session.trackers.base import PREFIX, Point, Tracked, TrackerError, tracker


class _RayReport:
    """Adds to each report of this worker; it makes none, since a report waits for all workers."""

    def __init__(self) -> None:
        try:
            # Below the public function, so that the callbacks of Ray for other frameworks come here as well.
            from ray.train.v2._internal.execution.train_fn_utils import get_train_fn_utils  # noqa: PLC0415

            worker: Any = get_train_fn_utils()
            report = worker.report
        except (ImportError, RuntimeError, AttributeError) as error:
            raise TrackerError(
                f"ray: this process is no worker of Ray Train ({error}); use the tracker in a worker function"
            ) from error
        self.newest: dict[str, float] = {}

        def with_newest(metrics: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            return report({**self.newest, **metrics}, *args, **kwargs)

        self._worker = worker
        worker.report = with_newest

    def send(self, points: Sequence[Point]) -> None:
        """Keep the newest values, and the step that they belong to."""
        values = {name: value for point in points for name, value in point.values.items()}
        prefixed = {f"{PREFIX}{name}": value for name, value in values.items()}
        self.newest = {**self.newest, **prefixed, f"{PREFIX}step": points[-1].step}

    def findings(self, findings: Sequence[Finding], step: int) -> None:
        """Count the findings by severity."""
        del step
        counts = Counter(f"{PREFIX}{finding.severity}s" for finding in findings)
        self.newest = {**self.newest, **counts}

    def close(self, *, failed: bool) -> None:
        """Leave later reports as they are."""
        del failed
        vars(self._worker).pop("report", None)


@tracker("ray")
def open_ray(target: str, run: Tracked, active: Any) -> _RayReport:
    """Add the numbers of rank 0 to its reports, whose metrics Ray Train keeps."""
    del run, active
    if target:
        raise TrackerError(f"ray={target}: expected no target, as trackers='ray'")
    return _RayReport()
