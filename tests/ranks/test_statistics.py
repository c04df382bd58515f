"""Joined statistics equal those of one process on the whole batch, for every sharding."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.correctness.model.facts import facts_by_kind
from backlight.store.read.run import Run, open_run
from ranks.launching import HERE, torchrun
from ranks.network import Whole

PARTIAL = {"block.norm.weight", "block.norm.bias"}
"""Gradients that tensor parallelism leaves unreduced in the setup ``sequence``."""

PIPELINES_ABORT = Version(torch.__version__) < Version("2.10")
"""Over gloo a pipeline of torch 2.9 ends in ``gloo::EnforceNotMet``, watched or not."""

DIAGONAL = (*((w, 2) for w in ("ddp_no_sync", "fsdp_clipped", "flat", "sequence", "pipeline")),)
REST = (
    *((w, 2) for w in ("ddp", "ddp_static", "ddp_clipped", "ddp_join", "fsdp", "fsdp_kept", "fsdp_whole")),
    *(
        (w, 2)
        for w in ("fsdp_accumulated", "tensor", "pipeline_1f1b", "fsdp_float32", "flat_clipped_float32")
    ),
    *((w, 4) for w in ("ddp", "fsdp", "fsdp_clipped", "flat", "hybrid", "fsdp_tensor")),
)
PIPELINES = {"pipeline", "pipeline_1f1b"}
"""Setups whose losses nothing divides by the number of microbatches."""


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run every setup that the selected tests need, with one launch per number of ranks."""
    requested: dict[int, dict[str, None]] = {}
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and item.fspath == request.fspath and "setup" in callspec.params:
            if PIPELINES_ABORT and "pipeline" in callspec.params["setup"]:
                continue
            requested.setdefault(callspec.params["ranks"], {})[callspec.params["setup"]] = None
    launched: dict[int, Path] = {}

    def folder(setup: str, ranks: int) -> Path:
        if PIPELINES_ABORT and "pipeline" in setup:
            pytest.skip("pipelines of this release of torch abort over gloo, watched or not")
        if ranks not in launched:
            launched[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
            torchrun(ranks, HERE / "training_run.py", launched[ranks], ",".join(requested[ranks]))
        return launched[ranks] / setup

    return folder


@functools.cache
def whole(tied: bool, single: bool = False) -> Whole:
    return Whole(tied=tied, dtype=torch.float32 if single else torch.float64).run()


def expected_of(setup: str) -> Whole:
    return whole(not any(w in setup for w in ("tensor", "sequence", "pipeline")), "float32" in setup)


def joined(run: Run, series: str, column: str, name: str) -> dict[int, float]:
    frame = run.frame(series, column)
    p = frame.names.index(name)
    return {int(s): float(frame.values[i, p]) for i, s in enumerate(frame.steps) if frame.measured[i, p]}


@pytest.mark.parametrize(
    ("setup", "ranks"), [*DIAGONAL, *(pytest.param(*one, marks=pytest.mark.full) for one in REST)]
)
def test_joined_statistics_equal_those_of_the_whole_batch(setup: str, ranks: int, folders: Any) -> None:
    path = folders(setup, ranks)
    results = [json.loads((path.parent / f"{setup}-{r}.json").read_text()) for r in range(ranks)]
    assert [one["same"] for one in results] == [True] * ranks
    assert [one["warnings"] for one in results] == [[]] * ranks
    for one in results:
        plain, watched = one["collectives"]
        assert plain == watched > 0
    run, expected = open_run(path), expected_of(setup)
    missing = {n for n, _ in expected.model.named_parameters()} ^ set(run.frame("gradient", "norm").names)
    assert missing <= {"unused.weight", "unused.bias"}  # in no stage of a pipeline
    tolerance = 2e-5 if "float32" in setup else 1e-9
    compared = 0
    # When rank 1 has no batch left, only the other ranks contribute to the gradient.
    steps = range(len(expected.at) - (setup == "ddp_join"))
    for step in steps:
        for (series, column, name), value in expected.at[step].items():
            found = joined(run, series, column, name)
            if setup == "sequence" and series == "gradient" and name in PARTIAL:
                assert not found
                continue
            # A sum with cancellation is rounded relative to its terms.
            size = expected.at[step]["gradient", "norm", name] if column in {"sum", "mean"} else 0.0
            assert found[step] == pytest.approx(value, rel=tolerance, abs=tolerance * size), (column, name)
            compared += 1
    assert compared > 60 * len(steps)
    total = run.scalar("total_norm")
    if setup == "sequence":
        assert not len(total.steps)
    else:
        np.testing.assert_allclose(total.values[: len(steps)], expected.total[: len(steps)], rtol=tolerance)
    if setup not in PIPELINES:
        losses = run.spread("loss").values[: len(steps)].T.tolist()
        logged = [one["losses"][: len(steps)] for one in results]
        assert losses == [pytest.approx(values, rel=1e-6) for values in logged]
        loss = run.scalar("loss").values[: len(steps)]
        np.testing.assert_allclose(loss, expected.loss[: len(steps)], rtol=tolerance)
    if "pipeline" not in setup:  # of which rank 0 has one stage
        elements = sum(p.numel() for p in expected.model.parameters())
        fingerprint = run.fingerprint()
        assert fingerprint is not None
        assert fingerprint.parameter_count == elements
        # Sharding does not change the identity of a model, so runs of two setups are comparable.
        assert set(fingerprint.modules) == {(n, type(m).__name__) for n, m in expected.model.named_modules()}
    if "clipped" in setup:
        np.testing.assert_allclose(run.scalar("clip/norm").values, expected.total, rtol=tolerance)
        assert set(run.scalar("clip/factor").values) == {1.0}
    assert not facts_by_kind(run, "repeated_data")
    assert not [finding for finding in evaluate_rules(run) if finding.rule == "repeated_data"]
    if setup == "sequence":
        unmeasured = [e.payload for e in run.events("unmeasured")]
        assert all(name in unmeasured[0]["what"] for name in PARTIAL)
        assert "partial sum" in unmeasured[0]["reason"]


@pytest.mark.full
@pytest.mark.parametrize(("setup", "ranks"), [("fsdp", 4)])
def test_empty_shard_is_recorded_without_elements(setup: str, ranks: int, folders: Any) -> None:
    run = open_run(folders(setup, ranks))
    sizes = [run.frame("gradient", "numel", rank=r) for r in range(ranks)]
    p = sizes[0].names.index("gate")
    assert [int(frame.values[0, p]) for frame in sizes] == [1, 1, 1, 0]
    assert {r.name: r.numel for r in run.parameters()}["gate"] == 3
