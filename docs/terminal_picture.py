"""Write docs/images/terminal.svg: what the terminal shows of a run with a finding.

    python docs/terminal_picture.py

The run is made now. Fonts are those of the viewer, so that the picture loads nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COMMAND = "backlight run --out runs/new-head examples/new_head.py"
COLUMNS = 88


def main() -> None:
    """Run the command and write the picture."""
    program = str(Path(sys.executable).with_name("backlight"))
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        done = subprocess.run(
            [program, *COMMAND.split()[1:]], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
        )  # fmt: skip
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, highlight=False)
    console.print(Text.assemble(("$ ", "bold green"), (COMMAND, "bold")))
    console.print(Text.from_ansi(done.stdout.rstrip()))
    svg = console.export_svg(title="backlight", theme=MONOKAI, unique_id="terminal")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    PICTURE.write_text(svg.replace("Fira Code", "ui-monospace, Menlo, Consolas"), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
