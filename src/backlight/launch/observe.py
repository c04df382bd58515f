"""Run a script under an observer that explains, for the first steps of its training only.

For ``why-no-grad``, ``nan`` and ``checkpointing``: they look deeper than ``run`` may, slow the script
down, and end it when they know enough. Nothing is stored.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from backlight.capture.training_stop import StopTraining
from backlight.launch.script import launch


def end_script() -> None:
    """End the script cleanly from within; its own ``finally`` blocks run."""
    raise StopTraining(0)


def explain(
    observer: AbstractContextManager[object],
    target: str,
    arguments: list[str],
    *,
    module: bool,
    quiet: bool,
    compiled: bool = False,
) -> int:
    """Run ``target`` under ``observer`` and return its exit code; ``quiet`` moves its output to stderr."""
    aside = _output_aside() if quiet else contextlib.nullcontext()
    with aside, contextlib.nullcontext() if compiled else _uncompiled():
        code = launch(observer, target, arguments, module=module)
        sys.stdout.flush()
    return code


@contextlib.contextmanager
def _output_aside() -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Switch ``torch.compile`` off: what runs inside a compiled graph has neither lines nor operations."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    loaded: Any = sys.modules.get("torch._dynamo.config")
    if loaded is not None:
        kept, loaded.disable = loaded.disable, True
    # An uncompiled wrapper still warns of our hooks.
    warnings.filterwarnings("ignore", message=r".*when there are global hooks on modules")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TORCHDYNAMO_DISABLE", None)
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before
        if loaded is not None:
            loaded.disable = kept
