"""Rules on runtime info: threads, allocator, compiler."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import backlight
from backlight.findings.evaluate import evaluate_rules
from backlight.records import Severity
from injected_faults import GIB, KEPT, RECOMPILED


def test_threads_of_all_ranks_exceed_cores(stored: Any, evaluated: Any) -> None:
    facts = {"cores": 16, "threads": 16, "local_ranks": 8, "workers": 2}
    (found,) = evaluated(stored(runtime_info=facts), "bottleneck")
    assert [evidence.value for evidence in found.evidence] == [
        "threads 16, workers 2",
        "cores 16, local ranks 8",
    ]
    assert not evaluated(stored(runtime_info=facts | {"threads": 1, "workers": 1}), "bottleneck")
    for waited in (0.01, 0.2):
        busy = stored(runtime_info=facts | {"core_wait": waited})
        assert bool(evaluated(busy, "bottleneck")) == (waited == 0.2)
    one = {"cores": 2, "threads": 1, "local_ranks": 1, "workers": 4}
    assert not evaluated(stored(runtime_info=one), "bottleneck")
    # As on Colab and Kaggle: two cores, one device, workers. Without a measured wait nothing is known.
    device = {"cores": 2, "threads": 2, "local_ranks": 1, "workers": 4, "memory": {"where": "device"}}
    assert not evaluated(stored(runtime_info=device), "bottleneck")
    assert not evaluated(stored(runtime_info=device | {"core_wait": 0.01}), "bottleneck")
    assert evaluated(stored(runtime_info=device | {"core_wait": 0.2}), "bottleneck")
    alone = {"cores": 4, "threads": 4, "local_ranks": 1, "workers": 0}
    assert not evaluated(stored(runtime_info=alone), "bottleneck")


@pytest.mark.parametrize("ends_before_step", [True, False])
@pytest.mark.parametrize("left_on", [True, False])
def test_anomaly_detection_that_is_left_on(left_on: bool, ends_before_step: bool, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        torch.autograd.set_detect_anomaly(left_on and not ends_before_step, check_nan=False),
        warnings.catch_warnings(),
        backlight.watch(run=tmp_path / "run", every=1, monitors=("steptime",), quiet=True),
    ):
        warnings.simplefilter("ignore")  # torch warns of the mode
        for step in range(60):
            # The control looks into one step.
            with torch.autograd.set_detect_anomaly(left_on or step == 3, check_nan=False):
                optimizer.zero_grad()
                model(torch.ones(3, 4)).square().mean().backward()
                if not ends_before_step:
                    optimizer.step()
            if ends_before_step:
                optimizer.step()
    titles = [f.title for f in evaluate_rules(backlight.open_run(tmp_path / "run")) if f.rule == "bottleneck"]
    assert ("Anomaly detection is on: every step takes longer for it" in titles) == left_on


@pytest.mark.slow
def test_fragmentation_by_reserve_and_by_retries(stored: Any, evaluated: Any) -> None:
    apart = {"memory": {"reserved": 12 * GIB, "peak": 8 * GIB, "retries": 0}}
    (found,) = evaluated(stored(runtime_info=apart), "memory")
    assert found.severity is Severity.INFO
    assert [evidence.value for evidence in found.evidence] == [12 * GIB, 8 * GIB]
    again = {"memory": {"reserved": 12 * GIB, "peak": 11.9 * GIB, "retries": 3}}
    (other,) = evaluated(stored(runtime_info=again), "memory")
    assert other.severity is Severity.WARNING
    healthy = {"memory": {"reserved": 12 * GIB, "peak": 11 * GIB, "retries": 0}}
    assert not evaluated(stored(runtime_info=healthy), "memory")
    assert not evaluated(stored(runtime_info={"memory": {"peak": 8 * GIB}}), "memory")


@pytest.mark.slow
def test_graph_breaks_with_their_reasons(stored: Any, evaluated: Any) -> None:
    breaks = {"Tensor.item(): capture_scalar_outputs is off": 2}
    facts = {"compilation": {"graphs": 3, "graph_breaks": breaks}}
    (found,) = evaluated(stored(runtime_info=facts), "compilation")
    assert found.evidence[0].value == "2 x Tensor.item(): capture_scalar_outputs is off"
    for compilation in ({"graphs": 1, "graph_breaks": {}}, None):
        assert not evaluated(stored(runtime_info={"compilation": compilation}), "compilation")


def test_repeated_recompilations_are_found(stored: Any, evaluated: Any) -> None:
    (found,) = evaluated(stored(runtime_info={"compilation": {"recompiled": [RECOMPILED]}}), "compilation")
    assert found.evidence[0].value == 7
    assert found.subject.line == "model.py:10"
    usual = {"compilation": {"recompiled": [RECOMPILED | {"count": 1}]}}
    assert not evaluated(stored(runtime_info=usual), "compilation")


def test_skipped_cuda_graphs_with_their_reason(stored: Any, evaluated: Any) -> None:
    facts = {"compilation": {"cuda_graph_skips": 2, "cuda_graph_reasons": ["cpu device (arg0)"]}}
    (found,) = evaluated(stored(runtime_info=facts), "compilation")
    assert [evidence.value for evidence in found.evidence] == [2, "cpu device (arg0)"]
    assert not evaluated(stored(runtime_info={"compilation": {"cuda_graph_skips": 0}}), "compilation")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"until": 30}, False),  # an unrolled loop
        ({"until": 30, "since": 20}, False),
        ({"holder": None, "until": 400}, True),
    ],
)
def test_kept_graphs_of_a_stored_run(stored: Any, evaluated: Any, change: Any, found: bool) -> None:
    run = stored(events=[(59, "kept_graphs", KEPT | change)])
    findings = evaluated(run, "memory")
    assert [finding.severity for finding in findings] == [Severity.WARNING] * found
    if found:
        (one,) = findings
        assert one.subject.line == (None if "holder" in change else "train.py:11")
        assert "about 262 kB of memory a step" in one.detail
