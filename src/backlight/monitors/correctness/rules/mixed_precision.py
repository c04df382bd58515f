"""Rule ``mixed_precision``: the loss scale and autocast do not act where they should."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from backlight.findings import phrases
from backlight.findings.limits import Limits
from backlight.monitors.correctness.model.facts import Fact, findings_by_kind, observed
from backlight.records import Finding
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count


@rule("mixed_precision", monitor="correctness")
def mixed_precision(run: Run, _limits: Limits) -> Iterator[Finding]:
    """Find scaled gradients that are clipped or used as they are, and autocast that changes no product."""
    yield from findings_by_kind(run, "mixed_precision")


class ClippedBeforeUnscale(Fact, rule="mixed_precision", kind="clipped_before_unscale"):
    """Gradients were clipped to ``limit`` while they contained the loss scale."""

    clipping: str
    limit: float
    scale: float

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            "Gradients are clipped before they are unscaled",
            f"At step {self.step} gradients were clipped to {phrases.number(self.limit)} while they "
            f"contained the loss scale {phrases.number(self.scale)}. The limit on the true gradients was "
            f"{phrases.number(self.limit / self.scale)}.",
            evidence=(self.scale, "loss scale"),
            fix="Call `scaler.unscale_(optimizer)` before clipping.",
            refuted_if="the script divides the gradients by the scale itself before it clips them.",
        )


class ScalerBypassed(Fact, rule="mixed_precision", kind="scaler_bypassed"):
    """An optimizer used gradients with the loss scale in them."""

    optimizer: str
    scale: float

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.optimizer} takes steps with scaled gradients",
            f"At {observed(facts)} the loss was multiplied by the scale {phrases.number(self.scale)}, and "
            f"{self.optimizer} took the gradients as they were, without the scaler. They are too large by "
            "that factor, and a step with infinite values is not skipped.",
            evidence=(self.scale, "loss scale"),
            fix="Call `scaler.step(optimizer)` and `scaler.update()` in place of `optimizer.step()`.",
            refuted_if="the script divides the gradients by the scale itself.",
        )


class AutocastWithoutEffect(Fact, rule="mixed_precision", kind="autocast_without_effect"):
    """Autocast was entered, and all matrix products below the loss are in fp32: ``inside`` of its region."""

    device: str
    dtype: str
    inside: int

    def _finding(self, facts: Sequence[Self]) -> Finding:
        products = (
            f"so are all {count(self.inside, 'product')} in it."
            if self.inside
            else "none of them was computed in it."
        )
        return self.finding(
            f"Autocast to {self.dtype} has no effect on what is trained",
            f"At step {self.step} autocast ({self.device}, {self.dtype}) was entered, and the matrix "
            f"products below the loss are in float32: {products} Training is as slow, and takes as much "
            "memory, as without autocast.",
            evidence=(self.inside, "products inside"),
            fix=(
                "Compare the device type of autocast with that of the model, and look for "
                "`autocast(enabled=False)` and fp64 inputs inside."
                if self.inside
                else "Call the model inside of `with torch.autocast(...)`, not only the loss function."
            ),
            refuted_if="the output of the model's layers has the type of autocast.",
        )
