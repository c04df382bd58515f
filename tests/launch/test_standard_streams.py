"""Standard streams that are closed, full or replaced: the exit code of a watched script is its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backlight.standard_error import write_text

TRAINING = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
open("done", "a").write("x")
"""

REDIRECTIONS = [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full"]
FIRST_LINES = [
    "import sys; sys.stdout = None", "import sys; sys.stdout = sys.stderr = None",
    "import sys; sys.stdout.close()", "import sys; sys.stderr.close()", "import os; os.close(2)",
    "import sys; sys.stderr = object()",
]  # fmt: skip
LAST_LINES = ["", "raise SystemExit(3)", "raise SystemExit('text')", "raise ValueError('text')"]

USUAL = {
    (">&- 2>&-", "", ""), (">/dev/full", "print('text')", ""),
    ("", "import sys; sys.stderr.close()", "raise ValueError('text')"),
}  # fmt: skip
CASES = USUAL | {
    case
    for last in LAST_LINES
    for case in [*((one, "", last) for one in REDIRECTIONS), *(("", one, last) for one in FIRST_LINES)]
}


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize(
    ("redirection", "first", "last"),
    [pytest.param(*case, marks=[] if case in USUAL else [pytest.mark.full]) for case in sorted(CASES)],
)
def test_exit_code_is_that_of_plain_python(redirection: str, first: str, last: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{first}\n{TRAINING}{last}\n")
    (tmp_path / "plain.py").write_text(f"{first}\n{last}\n")  # without torch, which takes seconds to import
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    watching = Path(sys.executable).with_name("backlight"), "run", "--monitors=health"
    commands = (sys.executable, "plain.py"), (*watching, "train.py")
    codes = [
        subprocess.run(
            ["/bin/bash", "-c", f'exec "$@" {redirection}', "-", *command],
            cwd=tmp_path, env=environment, check=False, capture_output=True,
        ).returncode
        for command in commands
    ]  # fmt: skip
    assert codes[0] == codes[1]
    assert (tmp_path / "done").read_text() == "x"


class Refusing(io.StringIO):
    def write(self, text: str) -> int:
        raise RuntimeError("no")


@pytest.mark.parametrize("stream", [None, object(), Refusing(), 3])
def test_stream_that_takes_no_text_gets_none(stream: Any) -> None:
    write_text("text", stream)


def test_full_device_keeps_nothing_that_is_written_later() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as stream:
        write_text("text", stream)


def test_text_follows_what_was_written_before(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w", encoding="ascii") as stream:
        stream.write("first ")
        write_text("✓ second", stream)
        stream.write(" third")
    assert (tmp_path / "file").read_text() == "first \\u2713 second third"
    text = io.StringIO()
    write_text("✓", text)
    assert text.getvalue() == "✓"
