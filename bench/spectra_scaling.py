"""``backlight spectra`` on 1, 2 and 4 ranks over gloo, and its memory as the layers become more.

The example's GPT, freshly built, one torch thread per rank, in processes that torchrun starts. Seconds are
those of the whole measurement without starting Python and importing torch: gradients, exchange,
decompositions, writing; of several runs the median. Memory is how far the rank that rose highest rose above
what it held after the imports. All runs are compared to the bit. Ranks share the cores that there are: with
fewer free cores than ranks nothing can be gained.

    OMP_WAIT_POLICY=PASSIVE python bench/spectra_scaling.py [--replicates 16] [--repeat 3] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

RECIPE = Path(__file__).parents[1] / "examples" / "gpt_recipe.py"


def worker(out: str, settings: dict[str, int], replicates: int, budget: int) -> None:
    """Measure in this rank; rank 0 writes what all of them took."""
    import torch
    import torch.distributed as dist

    from backlight.diagnose.spectra.options import SpectraRequest
    from backlight.diagnose.spectra.run import measure_spectra
    from backlight.measure.spectra.measurement import spectral_echo

    torch.set_num_threads(1)
    spectral_echo(torch.randn(4, 64, 64))  # what is imported and allocated on first use
    size = int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
        dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    outcome = measure_spectra(
        SpectraRequest(
            recipe=RECIPE, settings=settings, replicates=replicates, budget=budget,
            exclude=["token", "position", "head"], out=Path(out) / "run",
        )
    )  # fmt: skip
    took = time.perf_counter() - begin
    rose = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    all_rose = [rose] * size
    if size > 1:
        dist.all_gather_object(all_rose, rose)
        dist.destroy_process_group()
    if outcome.rank == 0:
        row = {"seconds": took, "rose": max(all_rose), "layers": outcome.layers, "sweeps": outcome.sweeps}
        (Path(out) / "row.json").write_text(json.dumps(row), encoding="utf-8")


def measured(
    ranks: int, settings: dict[str, int], replicates: int, budget: int
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return what one run took, and the echo of every layer."""
    from backlight.store.read.run import open_run
    from backlight.store.spectra import layers, table

    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            __file__, "--worker", folder, json.dumps(settings), str(replicates), str(budget),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PET_LOG_DIR": folder}
        subprocess.run(command, env=environment, check=True)
        row = json.loads((Path(folder) / "row.json").read_text(encoding="utf-8"))
        run = open_run(Path(folder) / "run")
        echoes = {layer.parameter: table(run, 0, layer.parameter)["echo"] for layer in layers(run)}
    return row, echoes


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        out, settings, replicates, budget = sys.argv[2:]
        worker(out, json.loads(settings), int(replicates), int(budget))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicates", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model, once")
    options = parser.parse_args()
    count = 8 if options.quick else options.replicates
    settings = {"dim": 64 if options.quick else 256, "n_blocks": 2 if options.quick else 4, "seq": 32}
    repeat = 1 if options.quick else options.repeat
    console = Console()

    scaling = Table("ranks", "seconds", "times faster", "memory per rank, MB", "same to the bit")
    whole = 2 * 10**9
    alone: dict[str, np.ndarray] = {}
    first = 0.0
    for ranks in (1, 2, 4):
        rows, same = [], True
        for _ in range(repeat):
            row, echoes = measured(ranks, settings, count, whole)
            alone = alone or echoes
            same &= all(np.array_equal(alone[n], e, equal_nan=True) for n, e in echoes.items())
            rows.append(row)
        seconds = statistics.median(row["seconds"] for row in rows)
        first = first or seconds
        memory = max(row["rose"] for row in rows) / 1e6
        scaling.add_row(
            str(ranks), f"{seconds:.1f}", f"{first / seconds:.2f}", f"{memory:.0f}", "yes" if same else "NO"
        )
    scaling.title = f"{int(row['layers'])} layers, R = {count}, {os.cpu_count()} cores"

    memory_table = Table("layers", "replicates of all, MB", "sweeps", "memory per rank, MB")
    largest = count * settings["dim"] * 4 * settings["dim"] * 4
    budget = 4 * largest
    memory_table.title = f"2 ranks, --budget {budget / 1e6:.0f} MB, largest layer {largest / 1e6:.0f} MB"
    for blocks in (2, 8):
        row, _ = measured(2, {**settings, "n_blocks": blocks}, count, budget)
        everything = blocks * 12 * settings["dim"] ** 2 * 4 * count
        memory_table.add_row(
            str(int(row["layers"])), f"{everything / 1e6:.0f}", str(row["sweeps"]), f"{row['rose'] / 1e6:.0f}"
        )
    console.print(scaling)
    console.print(memory_table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
