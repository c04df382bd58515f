"""What `backlight run` prints while the script runs, through the installed console script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
import torch
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
while step < 5 or not Path("seen").exists():
    optimizer.zero_grad()
    loss = model(torch.ones(1, 3)).sum() * (float("nan") if step == 3 else 1.0)
    loss.backward()
    optimizer.step()
    if step < 5:
        print("step", step, end="\\r")
        print("of the script", file=sys.stderr)
    step += 1
"""
START = b"backlight: recording in run; live page: backlight open run\n"


@pytest.mark.parametrize("options", [(), ("--quiet",)], ids=["lines", "quiet"])
def test_lines_on_stderr_while_the_script_runs(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    seen = tmp_path / "seen"
    if options:
        seen.touch()
    lines = []
    with subprocess.Popen(
        [Path(sys.executable).with_name("backlight"), "run", "-o", "run", *options, "train.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        for line in process.stderr:
            lines.append(line)
            if line.startswith(b"backlight: error: "):
                seen.touch()
        assert process.stdout.read() == b"".join(b"step %d\r" % n for n in range(5))
    assert process.returncode == 0
    own = [line for line in lines if line != b"of the script\n"]
    assert len(lines) - len(own) == 5
    if options:
        assert own == []
        return
    assert lines[0] == START
    assert own[1].endswith(b" (non_finite)\n")
    assert own[2] == b"run\n"  # the findings at the end
