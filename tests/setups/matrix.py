"""The matrix of monitors and setups: expected results, and how its cells are run.

python matrix.py FOLDER CELLS    under torchrun: runs cells (a JSON list of [monitor, setup]) on this rank
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from setups.cells import CHECKS, IN_PART, TESTED, Outcome, measure
from setups.training_setups import OTHERS, SETUPS

Cell = tuple[str, str]
"""A monitor (or ``identical``) and a setup."""

ALL: tuple[Cell, ...] = tuple((monitor, setup) for setup in SETUPS for monitor in CHECKS)

_IN_PART = (
    r"^up.weight: sharded: no rank has a whole gradient of it before it is reduced \| down.weight: sharded"
)
_GATHERED = (
    r"without grokking=\{'gather': True\}: .*sharded over processes \(DTensor\); measure an unsharded copy"
)

EXPECTED: dict[Cell, tuple[str, str]] = {
    ("grokking", "FSDP2"): (TESTED, _GATHERED),
    ("grokking", "TP"): (TESTED, _GATHERED),
    ("grokking", "FSDP2 x TP"): (TESTED, _GATHERED),
    ("activations", "TP"): (IN_PART, "^activations of the class AsyncCollectiveTensor: "),
    ("activations", "FSDP2 x TP"): (IN_PART, "^activations of the class AsyncCollectiveTensor: "),
    ("activations", "compile"): (IN_PART, r"^activations inside `Net`: it is compiled or scripted"),
    ("activations", "checkpointing, re-entrant"): (
        IN_PART,
        r"^gradients at outputs of layers inside of re-entr",
    ),
    ("spectra", "TP"): (IN_PART, _IN_PART),
    ("spectra", "FSDP2 x TP"): (IN_PART, _IN_PART),
}
"""Expected word, and a pattern of the reported reason, of the cells that are not fully measured."""

SECONDS = 240.0
"""Timeout of a launch of several ranks."""


def expected(cell: Cell) -> tuple[str, str]:
    """Return the expected word of a cell and the pattern of its reported reason."""
    return EXPECTED.get(cell, (TESTED, "^$"))


def launch(cells: Sequence[Cell], folder: Path) -> dict[Cell, Outcome]:
    """Run cells that need the same number of ranks in one launch of torchrun.

    Raises
    ------
    AssertionError
        If a cell failed, with its traceback.
    """
    (size,) = {{**SETUPS, **OTHERS}[setup].ranks for _, setup in cells}
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += [__file__, str(folder), json.dumps(list(cells))]
    tests = str(Path(__file__).parents[1])
    paths = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    results = folder / "outcomes.json"
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1500:]
    return {
        (monitor, setup): Outcome(word, reason)
        for monitor, setup, word, reason in json.loads(results.read_text())
    }


def main() -> None:
    """Run cells on this rank; the first rank writes the results."""
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    folder, cells = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    out = []
    for number, (monitor, setup) in enumerate(cells):
        try:
            outcome = measure(monitor, setup, folder / str(number))
        except BaseException:  # noqa: BLE001 - the other ranks must not wait
            print(f"{setup} x {monitor} on rank {dist.get_rank()}:\n{traceback.format_exc()}", flush=True)
            os._exit(1)
        out.append([monitor, setup, outcome.word, outcome.reason])
    if dist.get_rank() == 0:
        (folder / "outcomes.json").write_text(json.dumps(out))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
