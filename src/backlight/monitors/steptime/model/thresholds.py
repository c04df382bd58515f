"""The thresholds of the steptime monitor: one frozen class, each field with its reason. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from backlight.findings.limits import Limits, limit

_CHOSEN = "chosen: injected faults found, controls silent, see the tests of the rule"
_SHEET = "docs/formulas.md, section 6, step time and memory"


@dataclass(frozen=True)
class Thresholds(Limits):
    """Every number that a rule of this monitor compares with.

    ``metadata`` of each field holds its ``reason``, ``source`` and the bounds of an override.
    """

    monitor: ClassVar[str] = "steptime"

    steady_steps: int = limit(
        20, "steady steps that a rule on phase times needs: fewer are an accident", source=_CHOSEN, low=4
    )

    # data_bound
    data_share: float = limit(
        0.1, "share of a steady step spent waiting for data", source=_SHEET, low=0.0, high=1.0
    )
    data_match: float = limit(
        0.5,
        "share of the wait that a cached batch must win back before data is called the cause",
        source=_CHOSEN,
        low=0.0,
        high=1.0,
    )

    # launch_bound
    launch_idle: float = limit(
        0.2, "share of a step in which the device stands still", source=_CHOSEN, low=0.0, high=1.0
    )
    launch_host: float = limit(
        0.5,
        "share of that idle time in which the device waits for the host to launch",
        source=_CHOSEN,
        low=0.0,
        high=1.0,
    )

    # copy_heavy
    copy_share: float = limit(
        0.05,
        "share of a step that copies from one line take: a well-kept model casts and lays out in about 1 %",
        source=_CHOSEN,
        low=0.0,
        high=1.0,
    )

    # logits_materialised
    logits_share: float = limit(
        0.2,
        "share of the peak of memory that logits and their copies take",
        source=_CHOSEN,
        low=0.0,
        high=1.0,
    )
    logits_bytes: float = limit(
        2.0**26, "bytes below which nobody would rewrite a loss (64 MiB)", source=_CHOSEN, low=0.0
    )

    # slow_optimizer
    optimizer_share: float = limit(
        0.1,
        "share of a step in the optimizer; a fused update of a usual model takes 1 to 5 %",
        source=_CHOSEN,
        low=0.0,
        high=1.0,
    )

    optimizer_floor: float = limit(
        1e-3,
        "seconds in the optimizer below which nothing is gained: a step of a toy is bound by Python's calls",
        source=_CHOSEN,
        low=0.0,
        high=10.0,
    )

    # recompute
    recompute_share: float = limit(
        0.05, "share of a step spent on computing forwards again", source=_CHOSEN, low=0.0, high=1.0
    )
    recompute_memory: float = limit(
        0.6,
        "share of the memory below which the peak leaves room for what checkpointing saves",
        source=_CHOSEN,
        low=0.0,
        high=1.0,
    )

    # thread_oversubscription
    threads_per_core: float = limit(
        1.25, "threads that compute on one machine, over its cores", source=_CHOSEN, low=1.0
    )

    # memory_fragmentation
    fragmentation_share: float = limit(
        0.25,
        "share of the memory taken from the device that was in no use at the peak",
        source=_CHOSEN,
        low=0.0,
        high=1.0,
    )
    fragmentation_bytes: float = limit(
        2.0**28, "bytes below which that share means nothing (256 MiB)", source=_CHOSEN, low=0.0
    )

    # outlier_steps
    outlier_factor: float = limit(
        2.0, "a step that takes this many times the median", source=_CHOSEN, low=1.0
    )
    outlier_deviations: float = limit(
        10.0,
        "robust standard deviations (1.4826 times the median absolute deviation) above the median",
        source="Hampel 1974 for median and MAD; the factor is chosen",
        low=1.0,
    )
    outlier_floor: float = limit(
        0.05,
        "seconds above the median below which a step is none: a busy machine pauses anybody for tens of ms",
        source=_CHOSEN,
        low=0.0,
    )
    outlier_loss: float = limit(
        0.02, "share of the training's time that outliers cost beyond the median", source=_CHOSEN, high=1.0
    )

    # exposed_communication
    exposed_share: float = limit(
        0.1,
        "share of a step in which the device communicates and computes nothing",
        source=_CHOSEN,
        low=0.0,
        high=1.0,
    )

    # straggler
    straggler_share: float = limit(
        0.1,
        "share of a step that a rank works longer than the median of the ranks",
        source=_CHOSEN,
        low=0.0,
        high=1.0,
    )

    # graph_breaks, recompilations
    graph_breaks: int = limit(1, "breaks of compiled graphs from which they are told", source=_CHOSEN, low=1)
    recompilations: int = limit(
        3,
        "compilations of one function beyond its first: one is usual, when a shape turns out to be dynamic",
        source="torch._dynamo: automatic_dynamic_shapes compiles a second time; the limit is chosen",
        low=1,
    )
