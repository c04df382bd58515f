"""Path of an example: in the package of a wheel, in ``examples/`` of a checkout."""

from __future__ import annotations

from pathlib import Path


def example_script(name: str) -> Path:
    """Return the path of an example script.

    Raises
    ------
    FileNotFoundError
        If neither the wheel nor a checkout has it.
    """
    package = Path(__file__).parent
    places = (package / "demo" / name, package.parents[2] / "examples" / name)
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        f"example {name}: not in {places[0].parent} nor {places[1].parent}; install backlight again"
    )
