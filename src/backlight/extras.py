"""Optional packages: the extra of this distribution that installs each, and the line that names it."""

from __future__ import annotations

import importlib.util

EXTRA_OF = {
    "torch": "torch", "pyarrow": "parquet",
    "h5py": "research", "scipy": "research", "yaml": "research", "sklearn": "research",
    "ruptures": "research", "matplotlib": "plots", "starlette": "live", "uvicorn": "live",
    "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "prometheus_client": "prometheus",
    "duckdb": "query", "pynvml": "gpu", "pandas": "frames", "polars": "frames", "mcp": "mcp",
}  # fmt: skip
"""Extra by the package that it installs."""


class MissingPackageError(ModuleNotFoundError):
    """An optional package is not installed; the message names what needs it, and the command."""

    def __init__(self, package: str, what: str = "") -> None:
        subject = f"{what}: " if what else ""
        line = f"{subject}needs {package}; pip install 'backlight[{EXTRA_OF[package]}]'"
        super().__init__(line, name=package)
        self.what = what


def require(*packages: str, what: str = "") -> None:
    """Raise a MissingPackageError for the first package that is not there; it names ``what`` needs it."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(package, what)
