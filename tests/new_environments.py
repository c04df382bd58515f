"""Environments and clones as a new user has them, without downloads."""

from __future__ import annotations

import os
import shutil
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]

CLONED = (
    *("src", "docs", "examples", ".github", "Makefile"),
    *("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "CHANGELOG.md"),
)


def clone(folder: Path) -> Path:
    """Copy what the package and its release are made of, as a clone has it."""
    for name in CLONED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def environment_with_packages(folder: Path) -> Path:
    """Create an environment that finds the packages of this one; return its site-packages.

    Only backlight is missing: what pip installs into it finds torch and all other requirements.
    """
    venv.create(folder, symlinks=True)
    target = next((folder / "lib").glob("python*")) / "site-packages"
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    (target / "packages.pth").write_text("\n".join(packages) + "\n", encoding="utf-8")
    return target


def variables_of(environment: Path) -> dict[str, str]:
    """Return the variables of a shell in which an environment is activated, and pip downloads nothing."""
    kept = {name: os.environ[name] for name in os.environ if not name.startswith(("PYTHON", "PIP_"))}
    path = os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])
    return kept | {"PATH": path, "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "false", "COLUMNS": "200"}
