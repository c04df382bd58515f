"""The thresholds of the grokking monitor: one frozen class, each field with its reason and its source.

Accuracies are shares of samples. A share of the way is (accuracy - chance) / (plateau - chance). Counts
are in logs, that is in steps at which an accuracy was logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from backlight.findings.limits import Limits, limit

_SHEET = "docs/formulas.md, section 4, grokking"
_CHOSEN = "chosen: the fast oracle is found, its nulls are not, see bench/grokking_nulls.py"


def _share(default: float, reason: str, source: str) -> Any:
    return limit(default, reason, source=source, low=0.0, high=1.0)


def _count(default: int, reason: str, source: str) -> Any:
    return limit(default, reason, source=source, low=1)


@dataclass(frozen=True)
class Thresholds(Limits):
    """Every number that the verdict on grokking and the other rules of this monitor compare with."""

    monitor: ClassVar[str] = "grokking"

    # The two times.
    train_accuracy: float = _share(0.99, "training accuracy from which a run has memorised", _SHEET)
    test_share: float = _share(
        0.95, "share of the way from chance to the plateau from which a run generalises", _SHEET
    )
    stay_logs: int = _count(5, "logs in a row that an accuracy must hold, so that a spike is no time", _SHEET)

    # What makes a delay grokking.
    delay_ratio: float = limit(
        2.0, "t_generalise / t_memorise from which the delay is grokking", source=_SHEET, low=1.0
    )
    delay_ratio_strong: float = limit(
        5.0, "t_generalise / t_memorise from which grokking is called strong", source=_SHEET, low=1.0
    )
    logs_between: int = _count(10, "logs between the two times: fewer do not show what happened", _SHEET)
    test_share_memorised: float = _share(
        0.5, "share of the way that the test accuracy may have gone when the run memorised", _SHEET
    )
    train_stays: float = _share(0.97, "training accuracy that must last between the two times", _SHEET)
    train_stays_share: float = _share(0.95, "share of the logs between at which it must", _SHEET)

    # The sweep: the verdict must not hang on where the lines are drawn.
    sweep_train_low: float = _share(
        0.9, "lowest training accuracy of the sweep; train_accuracy to it", _SHEET
    )
    sweep_test_low: float = _share(0.9, "lowest share of the way of the sweep; test_share to it", _SHEET)

    # What the data must be able to carry.
    plateau_minimum: float = _share(
        0.5, "a plateau below it (chance taken off) is not called generalisation", _CHOSEN
    )
    wilson_share: float = _share(
        0.8, "share of the way that the Wilson lower bound (95 %) of the plateau must reach", _CHOSEN
    )
    zero_logs: int = _count(
        5, "accuracies of exactly 0 in a row that look like a log filled where nothing was measured", _CHOSEN
    )
    zero_probability: float = _share(
        0.001, "chance of no hit at all in the test set below which an exact 0 is doubted", _CHOSEN
    )
    rising: float = _share(
        0.05,
        "rise of the test accuracy over the last fifth of the logs from which the end cut it off",
        _CHOSEN,
    )

    # A measure against its control.
    correlation: float = _share(
        0.7, "rank correlation with the test accuracy from which a measure is said to follow it", _CHOSEN
    )
    correlation_margin: float = _share(
        0.3, "rank correlation by which a measure must exceed that of the control's", _CHOSEN
    )
    lag_share: float = _share(0.25, "longest lead or lag tried, as a share of the logs", _CHOSEN)
