"""Run a script with fixed seeds until it has taken some optimizer steps, and write a digest of its weights.

python ended.py STEPS FILE SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import hashlib
import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    """Run the script; the process ends inside the last step."""
    steps, file = int(sys.argv[1]), Path(sys.argv[2])
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    used: dict[int, torch.optim.Optimizer] = {}
    taken = 0

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal taken
        used[id(optimizer)] = optimizer
        taken += 1
        if taken == steps:
            found = hashlib.blake2b()
            for one in used.values():
                for parameter in (p for group in one.param_groups for p in group["params"]):
                    found.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
            file.write_text(found.hexdigest())
            os._exit(0)

    register_optimizer_step_post_hook(after)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
