"""Names of parameters must not depend on models that earlier tests of the same process left behind."""

import gc

import pytest

from backlight.capture.hub import HUB
from backlight.capture.modules import SeenModules


@pytest.fixture(autouse=True)
def _no_models_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(HUB, "seen", SeenModules())
