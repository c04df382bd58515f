"""Programs that can import no package but those named, and ``bench/gpu.py``, which names such packages."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement

BARE = """
import sys
allowed = {allowed!r}
class Bare:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):  # versions of distributions
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        found = self.finder.find_spec(name, path, target)
        if name in allowed or "." in name or found is None:
            return found
        where = str(found.origin or list(found.submodule_search_locations))
        return None if f"site-packages/{{name}}" in where else found
sys.meta_path[:] = map(Bare, sys.meta_path)
"""


def bare_environment(folder: Path, bench: ModuleType) -> dict[str, str]:
    """Return the environment of ``bench/gpu.py`` in which a process, and those that it starts, find no more.

    Python imports ``sitecustomize`` from ``folder`` as it starts.
    """
    allowed = sorted(installed_by(bench.WHEELS))
    (folder / "sitecustomize.py").write_text(BARE.format(allowed=allowed), encoding="utf-8")
    found: dict[str, str] = bench.environment()
    found["PYTHONPATH"] = f"{folder}{os.pathsep}{found['PYTHONPATH']}"
    return found | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def installed_by(wheels: Iterable[str]) -> set[str]:
    """Return the top-level modules that distributions and their requirements install."""
    modules: set[str] = set()
    todo, done = list(wheels), set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another platform
            continue
        modules |= {Path(str(file)).parts[0].removesuffix(".py") for file in distribution.files or ()}
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return modules


def gpu_bench() -> ModuleType:
    """Import ``bench/gpu.py``."""
    file = Path(__file__).parents[1] / "bench" / "gpu.py"
    spec = importlib.util.spec_from_file_location("gpu_bench", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
