"""Data sets in place of downloads: a file that is there is taken, whatever its checksum.

First on ``PYTHONPATH`` of a program that `bench/healthy.py` runs; the program itself stays as it is.
"""

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path

TARGET = "torchvision.datasets.utils"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != TARGET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.check_integrity = lambda file, md5=None: Path(file).is_file()

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
