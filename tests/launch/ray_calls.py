"""Calls of the tests of tasks on Ray; ``python ray_calls.py FOLDER`` runs them and prints what they gave."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def square(folder: str, number: int) -> int:
    """Return the square; 2 fails at the first try, 3 always."""
    tried = Path(folder, f"tried-{number}")
    is_first = not tried.exists()
    tried.touch()
    if number == 3 or (number == 2 and is_first):
        raise ValueError(f"cannot square {number}")
    return number**2


def main(folder: str) -> None:
    from backlight.launch.ray_tasks import RayError, RayOptions, run_tasks
    from launch import ray_calls

    options = RayOptions.of(["cpus=1", "retries=1", "address=local"])
    found: dict[int, Any] = dict(run_tasks(ray_calls.square, [(folder, n) for n in range(4)], options))
    too_large = ""
    try:
        list(run_tasks(ray_calls.square, [(folder, 1)], RayOptions.of(["gpus=64", "address=local"])))
    except RayError as error:
        too_large = str(error)
    print(json.dumps({"found": {n: str(value) for n, value in found.items()}, "too_large": too_large}))


if __name__ == "__main__":
    main(sys.argv[1])
