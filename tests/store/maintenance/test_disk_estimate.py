from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backlight.records import ParameterRecord
from backlight.store.maintenance.disk_estimate import estimate
from backlight.store.write.writer import RunWriter


@pytest.mark.parametrize(("parameters", "steps", "every"), [(150, 2000, 1), (20, 4000, 10), (1500, 100, 1)])
def test_the_estimate_is_a_bound_that_is_near(
    tmp_path: Path, parameters: int, steps: int, every: int
) -> None:
    source = np.random.default_rng(0)
    writer = RunWriter.create(tmp_path / "run")
    table = writer.parameter_table(
        tuple(ParameterRecord(f"p{i}", (i,), "float32", "cpu", i) for i in range(parameters))
    )
    for step in range(steps):
        if step % every == 0:
            ints = source.integers(2**40, 2**62, (parameters, 5))
            writer.append("gradient", step, table, source.standard_normal((parameters, 3)), ints)
        writer.scalars(step, {f"s{i}": source.random() for i in range(4)})
    writer.close()
    size = sum(p.stat().st_size for p in (tmp_path / "run").rglob("*") if p.is_file())
    said = estimate(parameters, 8, every, steps, scalars=4)
    assert 0.6 * said < size <= said


def test_it_grows_with_everything() -> None:
    base = estimate(100, 8, 10, 10_000)
    assert estimate(200, 8, 10, 10_000) > base
    assert estimate(100, 65, 10, 10_000) > base
    assert estimate(100, 8, 5, 10_000) > base
    assert estimate(100, 8, 10, 20_000) > base
    assert estimate(0, 8, 10, 0) > 0


@pytest.mark.parametrize("arguments", [(-1, 8, 1, 1), (1, 8, 0, 1), (1, -1, 1, 1), (1, 1, 1, -1)])
def test_nonsense_is_refused(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected none negative and every at least 1"):
        estimate(*arguments)
