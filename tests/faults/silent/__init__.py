"""Errors of a training loop that crash nothing, and loops without an error that come close to one."""

import importlib
import pkgutil

from faults.silent.loop import CONTROLS, FAULTS

__all__ = ["CONTROLS", "FAULTS"]

for subject in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{subject.name}")
