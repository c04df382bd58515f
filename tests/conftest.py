"""One torch thread per worker, a fixed seed before every test, and a small heap to search."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    # A watch looks for models among all objects of the process; what was imported or left over before a file
    # of tests begins is out of that search, or each watch would cost as much as all libraries together.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # plugins that are imported for the summary may ask who refers to an object
