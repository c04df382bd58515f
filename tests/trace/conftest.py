"""Fixture of the trace tests: the analysis of a trace that a builder made."""

from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.trace.analysis import RankAnalysis, analyse
from backlight.trace.reader import read_trace
from synthetic_traces import TraceBuilder


@pytest.fixture
def analysed(tmp_path: Path) -> Callable[[TraceBuilder], RankAnalysis]:
    """Analyse the trace of one rank."""

    def analysed(builder: TraceBuilder) -> RankAnalysis:
        return analyse([read_trace(builder.write(tmp_path / "made.json"))]).traces[0]

    return analysed
