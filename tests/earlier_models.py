"""Names of parameters must not depend on models that earlier tests of the same process left behind."""

import gc
import weakref
from collections.abc import Iterator

import pytest
from torch import nn

from backlight.capture.hub import HUB
from backlight.capture.modules import SeenModules


class LaterModules(SeenModules):
    """Modules of the process but for those that are there already, which a scan would find."""

    def __init__(self) -> None:
        super().__init__()
        there = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
        self._earlier = {id(module): weakref.ref(module) for module in there}

    def _meet(self, module: nn.Module) -> None:
        earlier = self._earlier.get(id(module))
        if earlier is None or earlier() is not module:
            super()._meet(module)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """What is there already is looked through once a file, not once a test: torch alone is a lot."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_models_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(HUB, "seen", LaterModules())
