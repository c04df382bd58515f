"""DeepSpeed: ``with watch(engine):`` around the loop."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backlight.integrations.hosted import Hosted, HostedWatch, OnEnd, require
from backlight.session.settings import suggest_keywords

VERSION = require("deepspeed", "deepspeed")
"""The release of DeepSpeed that is here."""

if TYPE_CHECKING:
    from backlight.monitor import Samples


class EngineWatch(HostedWatch):
    """One watched loop, made by :func:`watch`."""

    def __init__(self, engine: Any, hosted: Hosted) -> None:
        super().__init__(hosted)
        self._engine = engine

    def _attach(self) -> None:
        name = Path(sys.argv[0] if sys.argv else "").stem or type(self._engine.module).__name__
        step = int(self._engine.global_steps)
        self._hosted.begin([self._engine], [self._engine.optimizer], name=name, step=step)

    def _detach(self) -> None:
        """Nothing: the engine is as it was."""


@suggest_keywords
def watch(
    engine: Any,
    *,
    run: str | os.PathLike[str] | None = None,
    samples: Samples | None = None,
    on_end: OnEnd | None = None,
    summary: bool = True,
    **settings: Any,
) -> EngineWatch:
    """Watch a loop of ``engine.backward`` and ``engine.step``; use the result as a context manager around it.

    Parameters
    ----------
    engine:
        What ``deepspeed.initialize`` returned first, after ``engine.load_checkpoint`` where there is one: the
        run goes on at its ``global_steps``.
    run, samples, on_end, summary, **settings:
        As for :class:`backlight.integrations.hosted.HostedCallback`. ``run`` is by default
        ``runs/<script>-<time>``.

    Returns
    -------
    EngineWatch
        Not yet attached.

    Raises
    ------
    TypeError
        If ``engine`` is no engine with an optimizer.
    ValueError
        If a setting is out of range.
    """
    if not hasattr(engine, "global_steps") or not hasattr(getattr(engine, "optimizer", None), "param_groups"):
        raise TypeError(
            f"deepspeed.watch: got {type(engine).__name__}, expected an engine with an optimizer; pass the "
            "first of what deepspeed.initialize returned"
        )
    hosted = Hosted("deepspeed.watch", run, settings, samples=samples, on_end=on_end, summary=summary)
    return EngineWatch(engine, hosted)
