"""Size of the base install: backlight and its requirements in a new environment, without extras.

pip installs the checkout and compiles bytecode as for any user. The limit holds without numpy, which an
environment that trains has already.

    python bench/install_size.py
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]

MAX_MB = 60.0


def sizes(folder: Path) -> dict[str, float]:
    """Return the size of each distribution in MB, of the files that pip lists for it."""
    found = {}
    for distribution in importlib.metadata.distributions(path=[str(folder)]):
        files = [Path(str(file.locate())) for file in distribution.files or ()]
        size = sum(file.stat().st_size for file in files if file.is_file())
        found[distribution.metadata["Name"]] = size / 1e6
    return found


def main() -> int:
    """Install, print the sizes and return 1 where they are above the limit."""
    with tempfile.TemporaryDirectory(prefix="install-size-") as name:
        venv.create(name, symlinks=True)
        python = Path(name, "bin", "python")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        subprocess.run([*pip, str(ROOT)], check=True)
        found = sizes(next(Path(name, "lib").glob("python*")) / "site-packages")
    for package, size in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{package:<20}{size:6.1f} MB")
    total = sum(found.values())
    others = total - found["numpy"]
    print(f"total: {total:.0f} MB; without numpy: {others:.1f} MB of {MAX_MB:.0f} MB")
    return int(others > MAX_MB)


if __name__ == "__main__":
    sys.exit(main())
