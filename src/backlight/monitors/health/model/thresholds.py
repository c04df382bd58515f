"""The thresholds of the health monitor: one frozen class, each field with its reason and its source.

A field whose source is "chosen" has no literature behind it: it was set so that the injected faults of
the tests are found and their controls stay silent. Windows and counts are in recorded steps, which
are every step of the training or every N-th, as the cadence says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from backlight.findings.thresholds import Limits, limit

_SHEET = "docs/formulas.md, section 1, gradient health"
_CHOSEN = "chosen: injected faults found, controls silent, see the tests of the rule"
_FP16 = "IEEE 754 binary16: smallest normal number 2^-14, smallest subnormal 2^-24"


def _limit(default: Any, reason: str, source: str, *, low: float, high: float = math.inf) -> Any:
    return limit(default, reason, source=source, low=low, high=high)


@dataclass(frozen=True)
class Thresholds(Limits):
    """Every number that a rule or the health score of this monitor compares with.

    ``dataclasses.fields(Thresholds)`` lists them; ``metadata`` of each holds ``reason``, ``source``
    and the bounds ``low`` and ``high`` of an override.
    """

    monitor: ClassVar[str] = "health"

    # The health score of one step, and the masks that it rests on.
    penalty_vanishing: float = _limit(
        0.5, "health lost when every measured parameter vanishes: it may still learn, slowly", _SHEET, low=0.0
    )
    penalty_exploding: float = _limit(
        0.8,
        "health lost when every measured parameter explodes: one such step can ruin weights",
        _SHEET,
        low=0.0,
    )
    vanishing_rms: float = _limit(
        1e-8,
        "an rms below it moves no fp32 weight of ordinary size at ordinary learning rates",
        _SHEET,
        low=0.0,
    )
    vanishing_relative: float = _limit(
        1e-4,
        "an rms below this share of the median over parameters; alone, the absolute limit would also call "
        "a converged model vanishing",
        _SHEET,
        low=0.0,
        high=1.0,
    )
    exploding_factor: float = _limit(
        1e3, "an rms above this many times the parameter's own running median", _SHEET, low=1.0
    )
    exploding_clip_factor: float = _limit(
        10.0, "a total norm above this many times the clip norm in use", _SHEET, low=1.0
    )
    history_window: int = _limit(
        256,
        "recorded steps that a running median looks back on: long enough that a growth of 6 % per step "
        "outruns it by exploding_factor, short enough to forget the start of a training",
        "chosen: 1.06^128 = 1.7e3, and the median of a geometric growth lags by half the window",
        low=4,
    )
    history_refresh: int = _limit(
        16,
        "recorded steps between two computations of a running median (every step among the first 16): "
        "costs 1/16 and moves a median over 256 values little",
        _CHOSEN,
        low=1,
    )
    history_minimum: int = _limit(
        5,
        "finite values that a running median needs; a training that diverges may have ten steps to live",
        _CHOSEN,
        low=1,
    )

    # vanishing
    vanishing_window: int = _limit(
        20, "recorded steps over which a parameter must vanish: one batch is an accident", _CHOSEN, low=1
    )
    vanishing_share: float = _limit(
        0.9,
        "share of those steps at which it must vanish, since values near a limit flicker",
        _CHOSEN,
        low=0.0,
        high=1.0,
    )
    vanishing_spread: float = _limit(
        0.25,
        "share of the measured parameters above which the finding is an error",
        _CHOSEN,
        low=0.0,
        high=1.0,
    )

    # exploding
    exploding_steps: int = _limit(
        3,
        "recorded steps at which a parameter must explode; fewer are a spike, which has its own rule",
        _CHOSEN,
        low=1,
    )

    # zero_gradient
    zero_window: int = _limit(
        20,
        "recorded steps up to the end at which every value is zero; zero-initialised branches are alive "
        "after one or two steps",
        _CHOSEN,
        low=1,
    )

    # no_gradient
    no_gradient_steps: int = _limit(
        5, "recorded steps before a parameter without any gradient is called unused", _CHOSEN, low=1
    )

    # depth_slope
    depth_blocks: int = _limit(
        6, "comparable parameters along the depth: a slope over fewer points is a guess", _CHOSEN, low=3
    )
    depth_ratio: float = _limit(
        100.0,
        "ratio of rms between the first and the last of them that the fitted slope must reach; sound "
        "residual networks stay within about 10",
        _CHOSEN,
        low=1.0,
    )
    depth_r2: float = _limit(
        0.8, "share of the variance of log rms that the fitted line must explain", _CHOSEN, low=0.0, high=1.0
    )
    depth_agreement: float = _limit(
        0.8,
        "share of steps whose own slope reaches half of it with the same sign",
        _CHOSEN,
        low=0.0,
        high=1.0,
    )
    depth_steps: int = _limit(10, "recorded steps that the rule needs", _CHOSEN, low=1)

    # spike
    spike_window: int = _limit(
        64,
        "recorded steps of history that a value is compared with; short, since losses trend",
        _CHOSEN,
        low=8,
    )
    spike_minimum: int = _limit(
        30, "finite values of history needed; the first steps of a training are steep", _CHOSEN, low=4
    )
    spike_deviations: float = _limit(
        10.0,
        "robust standard deviations (1.4826 times the median absolute deviation) above the median; "
        "gradient noise has heavy tails, so that the 3 of a normal distribution would cry daily",
        "Hampel 1974 for median and MAD; the factor is chosen",
        low=1.0,
    )
    spike_norm_ratio: float = _limit(
        5.0,
        "a total norm must also exceed this many times its median: a smooth run has a MAD near 0, and "
        "recurrent nets leap by 4 in good health",
        _CHOSEN,
        low=1.0,
    )
    spike_norm_hard: float = _limit(
        10.0,
        "a leap of the norm alone is a warning from this ratio on; a lesser one that the loss does not "
        "follow is a remark, since sound runs have them now and then",
        _CHOSEN,
        low=1.0,
    )
    spike_loss_ratio: float = _limit(
        1.5, "a loss must also exceed its median by this factor, for the same reason", _CHOSEN, low=1.0
    )
    spike_gap: int = _limit(
        5, "recorded steps between two outliers that still belong to one spike", _CHOSEN, low=1
    )
    spike_findings: int = _limit(
        5, "largest spikes that get a finding of their own; each states how many there were", _CHOSEN, low=1
    )

    # accumulating
    accumulating_steps: int = _limit(
        12, "first recorded steps of an attempt that the fit takes, and then twice as many", _CHOSEN, low=5
    )
    accumulating_growth: float = _limit(
        4.0,
        "factor by which the total norm must have grown since the gradients were last zero",
        _CHOSEN,
        low=1.0,
    )
    accumulating_power_low: float = _limit(
        0.4,
        "lowest exponent of growth with the number of steps; sums of pure noise grow as its root, 0.5",
        _CHOSEN,
        low=0.0,
    )
    accumulating_power_high: float = _limit(
        1.3,
        "highest exponent; sums of equal gradients grow linearly, 1.0, and faster is something else",
        _CHOSEN,
        low=0.0,
    )
    accumulating_r2: float = _limit(
        0.93,
        "share of the variance of log norm that the power law must explain",
        "360 small trainings, sick and sound: at 0.93 none of the sound fits, at 0.85 three do",
        low=0.0,
        high=1.0,
    )
    accumulating_share: float = _limit(
        0.8,
        "share of the parameters that must grow so: what forgets to zero forgets all",
        _CHOSEN,
        low=0.0,
        high=1.0,
    )

    # always_clipped
    clipped_share: float = _limit(
        0.95, "share of the settled steps at which clipping was active", _CHOSEN, low=0.0, high=1.0
    )
    clipped_steps: int = _limit(50, "settled steps that the rule needs", _CHOSEN, low=1)
    clipped_settle: float = _limit(
        0.2, "first share of the run that is left out: early gradients are large", _CHOSEN, low=0.0, high=0.9
    )
    clipped_hard: float = _limit(
        0.1,
        "median factor below which it is a warning: a step is then shortened more than tenfold",
        _SHEET,
        low=0.0,
        high=1.0,
    )

    # no_update
    no_update_window: int = _limit(
        10,
        "recorded steps up to the end without any change of the weight; a warm-up may begin at rate 0",
        _CHOSEN,
        low=1,
    )

    # large_update
    update_ratio: float = _limit(
        0.1,
        "norm of the step over norm of the weight; 1e-3 is usual, at 0.1 a weight is replaced in ten steps",
        "the rule of thumb of 1e-3 is from Karpathy's CS231n notes; the factor of 100 is chosen",
        low=0.0,
    )
    update_ratio_once: float = _limit(
        1.0,
        "median of that ratio over the weight matrices in any one step, also the first: the step is as "
        "long as the weight; Adam at its usual rates stays below 0.2",
        _CHOSEN,
        low=0.0,
    )
    update_steps: int = _limit(20, "last recorded steps at which the ratio is judged", _CHOSEN, low=1)
    update_share: float = _limit(
        0.9, "share of those steps at which the ratio must exceed the limit", _CHOSEN, low=0.0, high=1.0
    )
    update_settle: int = _limit(
        30, "first steps of the training left out: optimizers start with their largest steps", _CHOSEN, low=0
    )
    update_settle_zero: int = _limit(
        120,
        "the same for weights that start at zero: theirs is a ratio of 1/t, or 1/sqrt(t) where gradients "
        "are noise, which falls below 0.1 after 100 steps",
        "random walk from zero: the norm after t steps is sqrt(t) times one step",
        low=0,
    )

    # underflow
    underflow_zero_share: float = _limit(
        0.1, "share of values of a gradient that are exactly zero", _CHOSEN, low=0.0, high=1.0
    )
    underflow_magnitude: float = _limit(
        2.0**-20,
        "rms of the other values, times the loss scale: normally distributed values of which a tenth "
        "rounds to zero have four times the smallest subnormal, heavy tails four times more",
        _FP16,
        low=0.0,
    )
    underflow_window: int = _limit(20, "last recorded steps that the medians are taken over", _CHOSEN, low=1)

    # replicas_differ, ranks_out_of_step
    apart_steps: int = _limit(
        2,
        "recorded steps at which ranks must be apart: what is different once may be a step that one of them "
        "was just writing",
        _CHOSEN,
        low=1,
    )

    # scaler_skips
    skips_calibration: int = _limit(
        50,
        "first steps in which skipping is the search for a scale: from 2^16 it takes at most 17 skips, "
        "from 2^32 33",
        "torch.amp.GradScaler: init_scale 65536, halved at each skip",
        low=0,
    )
    skips_settled: int = _limit(
        10, "steps in a row without a skip that end the search earlier", _CHOSEN, low=1
    )
    skips_share: float = _limit(
        0.05,
        "share of skipped steps after the search; a sound scaler skips about one in 2000",
        "torch.amp.GradScaler: growth_interval 2000; the factor of 100 is chosen",
        low=0.0,
        high=1.0,
    )
    skips_steps: int = _limit(50, "steps after the search that the share needs", _CHOSEN, low=1)
    skips_stuck: int = _limit(
        20,
        "skips in a row up to the end of the run: nothing is learned any more, and 2^16 is used up",
        _CHOSEN,
        low=2,
    )

    # group_ratio
    group_ratio_low: float = _limit(
        1e-2,
        "rms of one group over rms of the other; parts of a sound model stay within about 30",
        _CHOSEN,
        low=0.0,
    )
    group_ratio_high: float = _limit(1e2, "the same limit from the other side", _CHOSEN, low=0.0)
    group_window: int = _limit(20, "last recorded steps at which the ratio is judged", _CHOSEN, low=1)
    group_share: float = _limit(
        0.9, "share of those steps at which the ratio must lie outside", _CHOSEN, low=0.0, high=1.0
    )
