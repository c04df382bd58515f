"""Statistics against one `_foreach_norm`, the Gram matrix against `vmap`, spectra against `torch.linalg`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from check import Check

from backlight.measure.spectra.measurement import spectral_echo
from backlight.measure.stats.statistics import statistics

EXPECTED = (
    "statistics take at most 10 times one _foreach_norm, and norms equal it within 1e-5; eigenvalues are "
    "within 1e-3 of those of vmap in float64, echoes within 0.005 of full decompositions"
)
MOST = 10


def timed(check: Check, methods: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each method, interleaved."""
    from bench import measure

    return measure.timed(methods, repeats, check.synchronize)


def compare_statistics(check: Check) -> None:
    """Measure gradients of the shapes of GPT-2."""
    from bench import measure

    shapes = check.choose(measure.gpt2_small, lambda: measure.million()[2:10])()
    tensors = [torch.randn(shape, device=check.kind).mul_(1e-3) for shape in shapes]
    methods = {
        measure.FOREACH: lambda: torch._foreach_norm(tensors),
        "all statistics": lambda: statistics(tensors),
    }
    found = timed(check, methods, check.choose(20, 3))
    for name, milliseconds in found.items():
        check.figure(f"{name}, ms", f"{milliseconds:.3f}")
    ratio = found["all statistics"] / found[measure.FOREACH]
    holds = ratio <= MOST or check.simulated is not None
    check.expect(
        f"all statistics over {measure.FOREACH}", f"{ratio:.2f}", f"at most {MOST}, on a GPU", holds=holds
    )
    norms = np.array([float(norm) for norm in torch._foreach_norm(tensors)])
    off = float(np.abs(statistics(tensors).arrays()[0][:, 0] / norms - 1).max())
    check.expect("norms, largest difference", f"{off:.1e}", "at most 1e-5", holds=off <= 1e-5)


def compare_gram(check: Check) -> None:
    """Compare the largest eigenvalues, in time and in value."""
    from bench import gram

    settings = check.choose([gram.mlp(128), gram.gpt(16, 32)], [gram.mlp(16)])
    for setting in settings:
        model = setting.model.to(check.kind)
        batch = (setting.batch[0].to(check.kind), setting.batch[1].to(check.kind))
        methods = {
            "backlight": lambda m=model, b=batch: gram.backlight_eigenvalues(m, b),
            "vmap": lambda m=model, b=batch: gram.with_vmap(m, b),
        }
        found = timed(check, methods, check.choose(5, 1))
        check.figure(f"{setting.name}, ms", ", ".join(f"{name} {ms:.1f}" for name, ms in found.items()))
        exact = gram.with_vmap(
            model.double(), (batch[0].double() if batch[0].is_floating_point() else batch[0], batch[1])
        ).cpu()
        values = gram.backlight_eigenvalues(model.float(), batch).to(exact)
        off = float(((values - exact).abs() / exact[0]).max())
        check.expect(f"{setting.name}, largest difference", f"{off:.1e}", "at most 1e-3", holds=off <= 1e-3)


def compare_spectra(check: Check) -> None:
    """Compare the echo with that of full decompositions of all replicates."""
    from bench import spectra

    p, q, count = check.choose((512, 1024, 8), (96, 160, 5))
    G = spectra.replicates(p, q, count).to(check.kind)
    begin = time.perf_counter()
    found = spectral_echo(G)
    seconds = {"backlight": time.perf_counter() - begin}
    if check.simulated is None:  # which lacks the kernel
        begin = time.perf_counter()
        for matrix in G:
            torch.linalg.svd(matrix, full_matrices=False)
        check.synchronize()
        seconds["a torch.linalg.svd of each"] = time.perf_counter() - begin
    k = found.identifiable
    exact = spectra.full_echo(G.cpu(), k)
    check.figure(f"{count} replicates of {p} x {q}, s", ", ".join(f"{n} {s:.2f}" for n, s in seconds.items()))
    off = float(np.abs(found.echo[:k] - exact).max())
    check.expect("directions found", k, "some", holds=k > 0)
    check.expect("echo, largest difference", f"{off:.1e}", "at most 5e-3", holds=off <= 5e-3)


def main(check: Check) -> None:
    """Compare all three."""
    warnings.simplefilter("ignore")
    compare_statistics(check)
    compare_gram(check)
    compare_spectra(check)


if __name__ == "__main__":
    Check.run(main, EXPECTED)
