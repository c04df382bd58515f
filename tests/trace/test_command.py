"""The command ``backlight trace``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backlight.cli import app as application
from processes import run_captured
from synthetic_traces import TraceBuilder


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_info:
        application.main(["trace", *map(str, arguments)])
    captured = capsys.readouterr()
    return int(exit_info.value.code or 0), captured.out, captured.err


@pytest.fixture
def made(tmp_path: Path) -> list[Path]:
    paths = []
    for rank in (0, 1):
        builder = TraceBuilder(rank)
        for step in (3, 4):
            builder.step(step, step * 1000, 900)
            builder.operator("aten::[bold]mm", step * 1000 + 5, 20)
            builder.kernel("ampere_sgemm", step * 1000 + 10, step * 1000 + 20, 300 + 50 * rank)
            builder.kernel(
                "ncclDevKernel_AllReduce", step * 1000 + 30, step * 1000 + 400 + 50 * rank, 200 - 50 * rank
            )
        paths.append(builder.write(tmp_path / f"rank-{rank}.json.gz"))
    return paths


def test_command_prints_tables(made: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, *made, "--full")
    assert code == 0
    expected = (
        "aten::[bold]mm",
        "ampere_sgemm",
        "critical path",
        "host-bound",
        "rank 1 comes last in 2 of 2 steps",
    )
    assert [text for text in expected if text not in out] == []
    code, out, _ = call(capsys, made[0], "--step", "4", "--rows", "1", "--full")
    assert code == 0
    assert "comes last" not in out
    assert "1 more" in out


@pytest.mark.slow
def test_command_prints_a_verdict_first(made: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, made[0])
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("rank 0: step 900 \N{MICRO SIGN}s, device idle 44.4 %: mostly ")
    assert sum(line.startswith("  ") for line in lines) <= 10
    assert "Tables: --full. All rows: --json." in lines
    assert "ampere_sgemm" not in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "pid", [2**63 - 1, 2**63, 2**64, -(2**63), -1, 1e300, "\u00b2", "9" * 5000, "", None, []]
)
@pytest.mark.parametrize("where", ["pid", "tid", "device", "stream", "correlation"])
def test_any_number_of_a_kernel_is_read(
    pid: object, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = TraceBuilder(0)
    for step in (3, 4):
        builder.step(step, step * 1000, 900)
        builder.kernel("sgemm", step * 1000 + 10, step * 1000 + 20, 300)
    path = builder.write(tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    for event in trace["traceEvents"]:
        if event.get("name") == "sgemm":
            (event if where in event else event["args"])[where] = pid
    path.write_text(json.dumps(trace))
    code, out, _ = call(capsys, path, "--full")
    assert code == 0
    assert "sgemm" in out


@pytest.mark.slow
def test_command_prints_json(made: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, *made, "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["unit"] == "ns"
    assert [trace["rank"] for trace in answer["traces"]] == [0, 1]
    assert answer["traces"][1]["steps"][0]["busy"] == 500_000
    assert answer["ranks"]["steps"][0]["waited"] == {"0": 50_000, "1": 0}


@pytest.mark.slow
def test_command_writes_page(made: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in (".html", ".md"):
        code, _, errors = call(capsys, made[0], "--out", tmp_path / f"page{suffix}")
        assert code == 0
        assert f"page{suffix}" in errors
        text = (tmp_path / f"page{suffix}").read_text()
        assert "ampere_sgemm" in text.replace("\\_", "_")
        assert ("</html>" in text) == (suffix == ".html")
        assert not re.search(r"""(src|href)=["']?https?:""", text)
    code, _, errors = call(capsys, made[0], "--out", tmp_path / "page.pdf")
    assert code == 2
    assert "expected a file that ends in .html or .md" in errors


@pytest.mark.slow
def test_cache_option(made: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, first, _ = call(capsys, made[0], "--json", "--cache")
    assert made[0].with_name("rank-0.json.gz.backlight.parquet").is_file()
    _, again, _ = call(capsys, made[0], "--json")
    assert first == again


@pytest.mark.slow
def test_refusal_is_one_line(tmp_path: Path, made: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(made[0].read_bytes()[:-50])
    for arguments, expected in (
        ([cut], "truncated"),
        ([tmp_path / "none.json"], f"backlight: {tmp_path / 'none.json'}: No such file or directory"),
        ([made[0], made[0]], "is of rank 0"),
        ([made[0], "--step", "9"], "has no step 9"),
    ):
        code, out, errors = call(capsys, *arguments)
        assert code == 2
        assert out == ""
        assert expected in errors
        assert errors.count("\n") == 1


@pytest.mark.slow
def test_engine_needs_no_torch(made: list[Path]) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from backlight.cli.app import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as exit_info:\n    sys.exit(exit_info.code)\n"
    )
    done = run_captured([sys.executable, "-c", code, "trace", str(made[0]), "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["traces"][0]["rank"] == 0


PROGRAM = """
import sys
import torch

def load():
    return torch.randn(16, 32).double().float()

def run():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=4, repeat=1),
        record_shapes=True,
        with_stack=True,
    ) as profiler:
        for _ in range(5):
            batch = load()
            torch.nn.functional.mse_loss(model(batch), torch.zeros(16, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(sys.argv[1])

run()
"""


@pytest.mark.slow
def test_trace_of_installed_profiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, program = tmp_path / "own.json", tmp_path / "program.py"
    program.write_text(PROGRAM)
    # In its own process: the profiler's Python stacks can crash under the deep stack of a test runner.
    subprocess.run([sys.executable, str(program), str(path)], check=True, capture_output=True)
    code, out, errors = call(capsys, path, "--json")
    assert code == 0, errors
    trace = json.loads(out)["traces"][0]
    assert trace["events"] == len(json.loads(path.read_text())["traceEvents"])
    assert len(trace["steps"]) == 4
    phases = {row["name"] for row in trace["phases"]}
    assert {"forward", "loss", "backward", "optimizer"} <= phases
    calls = {(row["name"], row["phase"]): row["calls"] for row in trace["operators"]}
    assert calls["aten::addmm", "forward"] == 8
    assert ("aten::addmm", "AddmmBackward0", 8) in {
        (pair["forward"], pair["backward"], pair["calls"]) for pair in trace["pairs"]
    }
    casts = [copy for copy in trace["copies"] if (copy["source"], copy["target"]) == ("double", "float")]
    (injected,) = [copy for copy in casts if copy["line"].endswith("program.py:5 (load)")]
    assert (injected["calls"], injected["elements"]) == (4, 4 * 16 * 32)
