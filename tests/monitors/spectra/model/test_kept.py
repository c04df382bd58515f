"""What optimizers keep of a gradient: against the true gradient, and against the spiked model."""

from pathlib import Path

import pytest
import torch

from backlight.measure.spectra.measurement import spectral_echo
from backlight.measure.spectra.shrinkage import predict, threshold
from backlight.monitors.spectra.model.echo_records import layer_histories, record_layer
from backlight.monitors.spectra.model.kept import Kept, kept_of, kept_table
from backlight.store.read.run import open_run
from backlight.store.spectra import Layer, tables
from backlight.store.write.writer import RunWriter
from spectra_runs import record

P, Q, R = 60, 40, 24


def spikes(strengths: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a gradient ``[p, q]`` in units of the threshold, and its replicates ``[R, p, q]``."""
    draws = torch.Generator().manual_seed(1)
    U, V = (torch.linalg.qr(torch.randn(n, len(strengths), generator=draws))[0] for n in (P, Q))
    G = (U * torch.tensor(strengths) * threshold(1.0, P, Q)) @ V.T
    return G, G + torch.randn(R, P, Q, generator=draws)


def measured(path: Path, replicates: torch.Tensor) -> tuple[Kept, ...]:
    layer = Layer("layer.weight", "layer", (P, Q), "", P, Q)
    with RunWriter.create(path) as writer:
        record_layer(writer, layer)
        result = spectral_echo(replicates, layer=layer.parameter, method="svd", null_draws=2)
        record(writer, 0, layer.parameter, result, batch=8)
    run = open_run(path)
    return kept_of(layer_histories(run), [tables(run, layer.parameter)])


def squared_cosine(steps: torch.Tensor, G: torch.Tensor) -> float:
    """Return the squared mean cosine of steps ``[R, p, q]`` with a gradient, in float64."""
    inner = (steps.double() * G.double()).sum((1, 2))
    return float((inner / (steps.double().norm(dim=(1, 2)) * G.double().norm())).mean() ** 2)


@pytest.mark.parametrize("strengths", [(3.0,), (4.0, 3.0, 2.0), (1.6, 1.4)], ids=str)
def test_shares_are_those_of_the_true_gradient(tmp_path: Path, strengths: tuple[float, ...]) -> None:
    G, replicates = spikes(strengths)
    (row,) = measured(tmp_path / "run", replicates)
    U, values, Vh = torch.linalg.svd(replicates.double(), full_matrices=False)
    ranked = [squared_cosine((U[..., :k] * values[:, None, :k]) @ Vh[:, :k], G) for k in range(1, Q + 1)]
    assert row.whole == pytest.approx(squared_cosine(replicates, G), abs=0.03)
    assert row.first == pytest.approx(ranked[0], abs=0.05)
    assert row.ranked == pytest.approx(ranked[row.rank - 1], abs=0.05)
    assert row.ranked == pytest.approx(max(ranked), abs=0.05)
    assert row.orthogonal == pytest.approx(squared_cosine(U @ Vh, G), abs=0.03)


def test_one_spike_is_kept_as_the_spiked_model_expects(tmp_path: Path) -> None:
    (row,) = measured(tmp_path / "run", spikes((3.0,))[1])
    spike = predict(3.0 * threshold(1.0, P, Q), 1.0, P, Q)
    assert row.first == pytest.approx(float(spike.echo) ** 2, abs=0.05)
    assert row.rank == 1
    assert row.best == "rank 1"


def test_gradient_without_noise_is_best_as_it_is(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)
    G = torch.randn(P, Q, generator=draws)
    (row,) = measured(tmp_path / "run", G + 1e-3 * torch.randn(R, P, Q, generator=draws))
    assert row.whole == pytest.approx(1, abs=1e-4)
    assert row.ranked == pytest.approx(1, abs=1e-3)
    sizes = torch.linalg.svdvals(G.double())
    assert row.orthogonal == pytest.approx(float(sizes.sum() ** 2 / (Q * (sizes**2).sum())), abs=1e-3)


def test_noise_keeps_nothing(tmp_path: Path) -> None:
    assert measured(tmp_path / "run", spikes((0.0,))[1]) == ()


@pytest.mark.parametrize("seed", range(6))
def test_few_replicates_of_noise_state_nothing(tmp_path: Path, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    assert measured(tmp_path / "run", torch.randn(8, P, Q, generator=draws)) == ()


def test_table_has_the_batch_next_to_what_is_kept(tmp_path: Path) -> None:
    table = kept_table(measured(tmp_path / "run", spikes((3.0,))[1]), 10)
    (cells,) = table.cells(10)
    titles = [column.title for column in table.columns]
    assert titles[:4] == ["layer", "as it is", "rank 1", "best rank"]
    assert cells[titles.index("keeps most")] == "rank 1"
    low, high = map(float, cells[titles.index("95 %")].split("-"))
    assert low < float(cells[titles.index("noise = signal at")]) < high
