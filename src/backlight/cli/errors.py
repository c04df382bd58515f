"""Errors that a command reports as one line with exit code 2."""

from __future__ import annotations

from backlight.registry import UnknownNameError
from backlight.store.errors import StoreError

REFUSALS: tuple[type[Exception], ...] = (
    ValueError,
    OSError,
    StoreError,
    UnknownNameError,
    ModuleNotFoundError,
)
"""Errors whose message names what, where, expected, got and the fix."""

_EXTRAS = {
    "torch": "torch",
    "pyarrow": "parquet",
    "msgspec": "trace",
    "matplotlib": "plots",
    "submitit": "slurm",
    "starlette": "live",
    "uvicorn": "live",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "prometheus_client": "prometheus",
    "duckdb": "query",
    "pandas": "frames",
    "polars": "frames",
}


def message(error: Exception) -> str:
    """Return the line for ``error``; for a missing package, how to install it."""
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return f"{error.name} is not installed here: pip install 'backlight[{_EXTRAS[error.name]}]'"
    return str(error) or type(error).__name__
