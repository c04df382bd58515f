"""Marks of tests that build the simulated accelerator."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import torch
from packaging.version import Version

NEEDS_SIMULATION = [
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None or sys.platform != "linux",
        reason="the simulated accelerator needs Linux and a C++ compiler (g++, or CXX)",
    ),
    pytest.mark.skipif(
        Version(torch.__version__) < Version("2.12"),
        reason="the simulated accelerator has functions that no back-end of torch 2.11 has",
    ),
]
