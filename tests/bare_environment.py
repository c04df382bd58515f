"""Programs that can import no package but those named, and ``bench/gpu.py``, which names such packages."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement

BARE = """
import sys
allowed = set(sys.argv.pop(1).split(","))
class Bare:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        found = self.finder.find_spec(name, path, target)
        if name in allowed or "." in name or found is None:
            return found
        where = str(found.origin or list(found.submodule_search_locations))
        return None if f"site-packages/{name}" in where else found
sys.meta_path[:] = map(Bare, sys.meta_path)
import runpy
del sys.argv[0]
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program where nothing can be imported from site-packages but what is named first."""


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
