"""Facts of a training run that contradict what its author must have meant."""

from __future__ import annotations

from backlight.capture.hub import HUB
from backlight.monitor import Monitor, RunHandle
from backlight.monitors.correctness.instrument.check import CHECKS, Schedule
from backlight.monitors.correctness.model.facts import Observed, encode


class CorrectnessMonitor(Monitor):
    """Compares what the process holds at the first steps, and then at growing intervals."""

    name = "correctness"
    after = ("stalls",)  # a wait for a device at the end is no stall
    records = "contradictions in the training loop"

    def attach(self, run: RunHandle) -> None:
        """Start every check."""
        self._run, self._schedule = run, Schedule()
        checks = [check for _, check in CHECKS.items() if run.world_size > 1 or not check.needs_ranks]
        self._checks = [check(run, self._schedule) for check in checks]
        run.listen(self._schedule.loaded)
        for check in self._checks:
            run.listen(check)
        run.follow_forwards()

    def detach(self, error: BaseException | None) -> None:
        """Wait for what is still on a device, and record how many steps were observed."""
        for check in self._checks:
            check.forget()
        self._schedule.copies.settle(wait=True)
        if self._schedule.observed:
            observed = Observed(step=0, steps=self._schedule.observed)
            self._run.notifier.event(observed.event, encode(observed))

    def next_step(self, step: int) -> int:
        """Return the next step that is near an observation."""
        return self._schedule.next_step(step)

    def on_step_start(self, step: int) -> None:
        """Decide whether the step is observed; between observations only some checks listen."""
        was_near = self._schedule.near
        self._schedule.begin(step)
        self._schedule.copies.settle(wait=False)
        if self._schedule.near == was_near:
            return
        for check in self._checks:
            if check.steps == "windows" and self._schedule.near:
                self._run.listen(check)
            elif check.steps != "all":
                HUB.remove(check)
                check.forget()
