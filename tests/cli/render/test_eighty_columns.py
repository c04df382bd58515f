"""Every command that prints tables, on a terminal of 80 columns and with long names of modules."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from backlight.answer import Table, indexed
from backlight.cli.console import FACTS, Page
from backlight.records import Fingerprint
from backlight.text import told_apart
from backlight.user_code import SourceLine
from flight_dumps import dumped, entry
from flight_dumps import write as write_dump
from grokking_runs import Grok, write_grokking_run
from observed_processes import PY_SPY
from run_builder import build_steptime_run

from .eighty_columns import broken

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"

RECIPE = """
import torch
from torch import nn

class TransformerEncoderLayerWithNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query_key_value_projection = nn.Linear(dim, 3 * dim)
        self.feed_forward_network = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.query_key_value_projection(x).chunk(3, -1)
        return x + self.feed_forward_network(q + k.transpose(0, 1).contiguous().transpose(0, 1) * v)

class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        layers = (TransformerEncoderLayerWithNorm(dim) for _ in range(6))
        self.transformer_encoder_layers = nn.ModuleList(layers)
        self.classification_head = nn.Linear(dim, 10)

    def forward(self, x):
        for layer in self.transformer_encoder_layers:
            x = layer(x)
        return self.classification_head(x)

def build_model(dim=32):
    torch.manual_seed(0)
    return Encoder(dim)

def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)

def batches(rank, world_size, batch=8, dim=32):
    while True:
        yield torch.randn(batch, dim), torch.randint(10, (batch,))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""

# The same with layers cut from the loss, and with a NaN, in lines that are longer than the terminal.
CUT = RECIPE.replace(
    "x = layer(x)\n",
    "x = layer(x).detach() if layer is self.transformer_encoder_layers[3] and self.training else layer(x)\n",
)
NAN = RECIPE.replace(
    "self.feed_forward_network(", "self.feed_forward_network((q - q) / (q - q).square().sum().sqrt() + "
)

HANG = """
import threading

def the_function_that_waits_for_the_lock_of_the_data_loader(lock):
    with lock:
        print("ready", flush=True)
        lock.acquire()  # a lock that the same thread holds, with words behind it that make the line long

the_function_that_waits_for_the_lock_of_the_data_loader(threading.Lock())
"""

TRAIN = """
if __name__ == "__main__":
    model = build_model()
    optimizer = build_optimizer(model)
    for step, batch in zip(range(40), batches(0, 1)):
        loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("narrow")
    (found / "recipe.py").write_text(RECIPE, encoding="utf-8")
    for script, program in (
        ("train", RECIPE + TRAIN),
        ("cut", CUT + TRAIN),
        ("nan", NAN + TRAIN),
        ("hang", HANG),
    ):
        (found / f"{script}.py").write_text(program, encoding="utf-8")
    for seed, (name, factor) in enumerate([("first-run-of-the-encoder", 1.0), ("slow", 1.3), ("equal", 1.0)]):
        phases = {name: 0.02 * factor for name in ("data", "forward", "backward", "optimizer", "other")}
        build_steptime_run(found / name, phases, fingerprint=Fingerprint(script="train.py"), seed=seed)
    run = write_grokking_run(found / "an-oracle-of-grokking-with-a-long-name")
    random = Grok(control="random-labels", control_of=run.run_id, seed=3)
    write_grokking_run(found / "its-matched-control-with-random-labels", random)
    write_grokking_run(found / "late", Grok(generalises=1300, seed=1))
    shutil.copytree(EXAMPLES / "test_matrix", found / "matrix")
    (found / "dumps").mkdir()
    name = "/home/me/project/training/distributed/pretraining_of_the_encoder.py"
    frames = [{"filename": name, "line": 1212, "name": "synchronise_the_gradients_of_all_experts"}]
    second = entry(number=2, state="started", frames=frames)
    write_dump(found / "dumps", 0, dumped(entry(), second, world=3))
    write_dump(found / "dumps", 1, dumped(entry(), world=3))
    return found


def run(folder: Path, command: str) -> str:
    done = subprocess.run(
        [sys.executable, str(HERE / "eighty_columns.py"), *command.split()],
        check=False, cwd=folder, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    return done.stdout


COMMANDS = (
    "compare first-run-of-the-encoder slow", "compare first-run-of-the-encoder slow equal --full",
    "memory --full train.py", "ls .", "findings slow --full",
    "top slow --once", "attach --flight-recorder dumps", "test-matrix --check matrix/recompute.toml",
    "grok detect an-oracle-of-grokking-with-a-long-name",
    "compare an-oracle-of-grokking-with-a-long-name late --align",
)  # fmt: skip

MORE = (
    "memory train.py", "memory predict recipe.py --full --checkpointing --budget 100M",
    "memory predict recipe.py", "profile --timed 14 --traced 3 train.py",
    "profile --timed 14 --traced 3 --full train.py",
    "sweep recipe.py --fake --set dim=32,64,128 --set batch=4,8",
    "sweep recipe.py --set dim=32,64,128 --full", "gram recipe.py", "spectra recipe.py --replicates 4",
    "check --recompute train.py", "compare first-run-of-the-encoder slow --full", "query slow --tables",
    "why-no-grad cut.py", "why-no-grad train.py", "nan nan.py", "nan train.py",
    "check train.py", "check --steps 20 cut.py",
    "grok list", "grok run doshi --set training.steps=20 --out doshi",
    "test-matrix --out results matrix/recompute.toml",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", [*COMMANDS, *(pytest.param(c, marks=pytest.mark.full) for c in MORE)])
def test_no_table_or_line_breaks(folder: Path, command: str) -> None:
    printed = run(folder, command)
    if "--full" not in command and command.split(maxsplit=1)[0] in {"memory", "compare", "profile", "sweep"}:
        # One line of the verdict, at most ten facts, and what follows them; facts may take two lines.
        assert sum(line.startswith("  ") and line[2] != " " for line in printed.splitlines()) <= FACTS


@pytest.mark.full
def test_a_run_with_findings_in_the_terminal_fits(folder: Path) -> None:
    watch = [sys.executable, "-m", "backlight", "run", "--out", "watched", "cut.py"]
    subprocess.run(watch, check=True, cwd=folder, capture_output=True)
    assert "! no gradient  step 0  `…" in run(folder, "top watched --once")


@pytest.mark.full
@PY_SPY
def test_a_process_in_a_lock_fits(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "hang.py"], cwd=folder, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert "the main thread waits for a lock" in run(folder, f"attach {process.pid} --seconds 1")
        finally:
            process.kill()


@pytest.mark.slow
def test_json_keeps_the_source_line_whole(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "backlight", "why-no-grad", "--steps", "1", "--json", "cut.py"],
        check=False, cwd=folder, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert len(answer["not_trained"]) == 24
    (source,) = (line.strip() for line in CUT.splitlines() if "detach" in line)
    assert answer["facts"][0].endswith(source)


def test_path_outside_of_the_working_directory_is_absolute_and_direct() -> None:
    here = Path.cwd()
    assert str(SourceLine(f"{here}/../train.py", 3)) == f"{here.parent / 'train.py'}:3"
    assert str(SourceLine(f"{here}/sub/../train.py", 3)) == "train.py:3"


def test_a_number_stays_with_its_unit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    page = Page()
    for text in (
        "a step of the run takes 125.5 ms",
        "the launches of a step take < 0.1 %",
        "a run stays in 30 s",
    ):
        page.sentence(text)
    assert capsys.readouterr().out.splitlines() == [
        "a step of the run takes",
        "  125.5 ms",
        "the launches of a step take",
        "  < 0.1 %",
        "a run stays in 30 s",
    ]


def test_names_are_shortened_so_that_they_differ() -> None:
    layers = [f"transformer_encoder_layers.{n}.{part}_projection_of_it" for n in range(9) for part in "ab"]
    kernels = [f"void at::native::elementwise_kernel<{kind}, at::native::functor>" for kind in ("add", "mul")]
    tiles = [
        f"Cijk_Alik_Bljk_BBS_{sizes}_MI16x16x1_SN_LDSB0_WG32_8_1" for sizes in ("MT256x192", "MT256x256")
    ]
    for names in (layers, kernels, [*tiles, "attn_fwd", "triton_poi_fused_mul_silu_2"]):
        for width in (24, 30, 40):
            shown = told_apart(names, width)
            assert len(set(shown.values())) == len(names)
            assert max(map(len, shown.values())) <= width


def test_broken_tables_are_recognised() -> None:
    numbers = indexed(("name", *"abcdef"), numbers=range(1, 7))
    cut = Table(numbers[:2], [("a", "x" * 90)])
    assert any("wrapped" in reason for reason in broken(cut))
    (equal,) = broken(Table(numbers[:2], [("a" * n + "b" * (90 - n), "9" * 66) for n in range(10, 80, 5)]))
    assert "not told apart" in equal
    names = [("n" * 30 + letter + "m" * 30, *["1" * 9] * 6) for letter in "xy"]
    assert not list(broken(Table(numbers, names)))
    assert not list(broken(Table(numbers[:2], [("a" * 200, "1")])))
