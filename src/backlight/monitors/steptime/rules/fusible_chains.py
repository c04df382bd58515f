"""Rule ``fusible_chains``: elementwise operations one after the other that one kernel could do."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import ms, percent, plural, read_profile
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("fusible_chains", monitor="steptime", thresholds=("chain_share",))
def fusible_chains(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find chains of elementwise operations that together take a share of the step.

    Of a chain of n operations that each read and write a tensor, one kernel leaves a share of about 1/n.
    """
    profiled = read_profile(run)
    step = profiled.content.get("traced_step_ms") if profiled is not None else None
    chains = profiled.rows("chains") if profiled is not None else []
    if profiled is None or not step or not chains:
        return
    spent = [float(row["device_ms"] or row["host_ms"]) for row in chains]
    share = sum(spent) / float(step)
    if share <= limits.chain_share:
        return
    gain = sum(time * (1 - 1 / float(row["length"])) for row, time in zip(chains, spent, strict=True))
    worst = chains[spent.index(max(spent))]
    where = str(worst.get("module") or worst.get("phase") or "")
    yield Finding(
        rule="fusible_chains",
        severity=Severity.INFO,
        claim=(
            f"Chains of elementwise operations take {percent(share)} of a traced step; the longest time goes "
            "into "
            f"{' > '.join(worst['operators'])} in {where} ({plural(round(float(worst['calls'])), 'time')}, "
            f"{ms(max(spent))}). Expected gain: about {percent(gain / float(step))} of a step, if each chain "
            "became "
            "one kernel."
        ),
        subject=Subject(module=worst.get("module") or None, phase=worst.get("phase") or None),
        evidence=(
            profiled.evidence("chains", share, "of a traced step"),
            profiled.evidence(f"chains/{' > '.join(worst['operators'])}", max(spent), "ms"),
        ),
        next_check=(
            "Compile the module (torch.compile), which fuses such chains, or use a fused function "
            "(F.scaled_dot_product_attention, F.layer_norm, F.gelu instead of its formula)."
        ),
        refuted_if="the compiled module, checked for equal results, is not faster.",
    )
