"""Write the JSON schemas of commands to docs/schemas: ``python docs/write_schemas.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backlight.cli.schemas import ANSWERS, file_name, schema_of

FOLDER = Path(__file__).parent / "schemas"


def as_text(schema: dict[str, Any]) -> str:
    """Return what a file holds."""
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for command in ANSWERS:
        (FOLDER / file_name(command)).write_text(as_text(schema_of(command)))
