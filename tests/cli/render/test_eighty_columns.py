"""Every command that prints tables, on a terminal of 80 columns and with long names of modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from backlight.cli.console import FACTS, make_table
from backlight.records import Fingerprint
from backlight.text import told_apart
from monitors.steptime.rules.conftest import write as write_times

from .eighty_columns import broken

HERE = Path(__file__).parent

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
    (found / "train.py").write_text(RECIPE + TRAIN, encoding="utf-8")
    for seed, (name, factor) in enumerate([("first-run-of-the-encoder", 1.0), ("slow", 1.3), ("equal", 1.0)]):
        phases = {name: 0.02 * factor for name in ("data", "forward", "backward", "optimizer", "other")}
        write_times(found / name, phases, fingerprint=Fingerprint(script="train.py"), seed=seed)
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
)  # fmt: skip

MORE = (
    "memory train.py", "memory --fake recipe.py --full --checkpointing --budget 100M",
    "memory --fake recipe.py", "profile --timed 14 --traced 3 train.py",
    "profile --timed 14 --traced 3 --full train.py",
    "sweep recipe.py --fake --set dim=32,64,128 --set batch=4,8",
    "sweep recipe.py --set dim=32,64,128 --full", "gram recipe.py", "spectra recipe.py --replicates 4",
    "checkpointing train.py", "compare first-run-of-the-encoder slow --full", "query slow --tables",
)  # fmt: skip


@pytest.mark.parametrize("command", [*COMMANDS, *(pytest.param(c, marks=pytest.mark.full) for c in MORE)])
def test_no_table_or_line_breaks(folder: Path, command: str) -> None:
    printed = run(folder, command)
    if "--full" not in command and command.split(maxsplit=1)[0] in {"memory", "compare", "profile", "sweep"}:
        # One line of the verdict, at most ten facts, and what follows them; facts may take two lines.
        assert sum(line.startswith("  ") and line[2] != " " for line in printed.splitlines()) <= FACTS


def test_names_are_shortened_so_that_they_differ() -> None:
    layers = [f"transformer_encoder_layers.{n}.{part}_projection_of_it" for n in range(9) for part in "ab"]
    kernels = [f"void at::native::elementwise_kernel<{kind}, at::native::functor>" for kind in ("add", "mul")]
    for names in (layers, kernels):
        for width in (24, 30, 40):
            shown = told_apart(names, width)
            assert len(set(shown.values())) == len(names)
            assert max(map(len, shown.values())) <= width


def test_broken_tables_are_recognised() -> None:
    wide = Table("name", "note", box=None)
    wide.add_row("a", "one two " * 20)
    assert any("wrapped" in reason for reason in broken(wide))
    cut = make_table("name", "value")
    cut.add_row("a", "x" * 90)
    assert list(broken(cut))
    equal = make_table("name", *"abcdef")
    for letter in "xy":
        equal.add_row("n" * 30 + letter + "m" * 30, *["1" * 9] * 6)
    assert not list(broken(equal))
    narrow = make_table("name", "value")
    narrow.add_row("a" * 200, "1")
    assert not list(broken(narrow))
    assert Console(width=80).measure(narrow).maximum <= 80
