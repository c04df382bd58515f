"""What a command can be refused for, as one line and exit code 2."""

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
"""Errors whose message tells what, where, expected, got and the way out."""

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


def told(error: Exception) -> str:
    """Return the one line for ``error``; for a missing package, how to install it."""
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return f"{error.name} is not installed here: pip install 'backlight[{_EXTRAS[error.name]}]'"
    return str(error) or type(error).__name__
