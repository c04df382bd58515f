"""Names of scalars and arrays that a run does not have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backlight.report.source import Source
from run_builder import build_run


def test_unknown_scalar_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    scalars = {"loss": [1.0, 0.5], "total_norm": [2.0, 3.0], "lr/0/0": [0.1, 0.1]}
    run = build_run(tmp_path / "run", scalars=scalars, user={"accuracy": [0.1]})
    for name in ("clip/norm", "scaler/scale", "lr/0/1", "loss/1"):  # backlight records them in some runs
        assert not len(run.scalar(name).steps)
    assert not len(run.scalar("loss", "minimum").steps)
    for name, expected in (
        ("train_loss", "did you mean 'loss'"),
        ("Loss", "did you mean 'loss'"),
        ("totl_norm", "did you mean 'total_norm'"),
        ("lr", "did you mean 'lr/0/0'"),
        ("lr/0/O", "did you mean 'lr/0/0'"),
        ("gram/model/trace", "there are: loss, total_norm, lr/0/0"),
        ("accuracy", "it is recorded with source='user'"),
    ):
        for read in (run.scalar, run.spread):
            with pytest.raises(KeyError, match=f"no scalar is called '{name}'; {expected}"):
                read(name)
    assert run.scalar("accuracy", "user").values.tolist() == [0.1]
    logged = "no scalar that the script logged is called"
    with pytest.raises(KeyError, match=f"{logged} 'acuracy'; did you mean 'accuracy'"):
        run.scalar("acuracy", "user")
    with pytest.raises(KeyError, match=f"{logged} 'loss'; it is recorded with source='backlight'"):
        run.scalar("loss", "user")
    with pytest.raises(KeyError, match=r"no scalars have the source 'users'; did you mean 'user'"):
        run.scalar("accuracy", "users")
    assert not len(Source(run, ()).scalar("gram/model/trace").steps)


def test_unknown_array_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    run = build_run(
        tmp_path / "run",
        write=lambda w: w.array("gram/model/matrix", 0, np.eye(2), dims=("sample", "sample")),
    )
    for read in (run.array, run.array_info):
        with pytest.raises(KeyError, match=r"no array is called 'gram/matrix'; did you mean"):
            read("gram/matrix")
    steps, values = run.array("gram/model/matrix", rank=7)  # stored, and not by this rank
    assert not len(steps)
    assert values == []
    assert Source(run, ()).array("ntk/matrix")[1] == []
