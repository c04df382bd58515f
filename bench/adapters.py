"""What watching adds under TRL, in a notebook and in a test under pytest, and what `backlight mcp` adds.

Blocks of steps interleaved in one process: plain, watched, plain once more (the control). Figures are medians
over the rounds of the ratio to the first of the round, of the processor time of all threads. Each watched
block is a run of its own with the settings of its adapter: pytest's records every step. For mcp,
``diagnose_process`` observes the watched block from another process.

    OMP_NUM_THREADS=1 python bench/adapters.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ARMS = ("plain", "watched", "control")

LOOP = """
import contextlib, json, sys, time
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
STEPS, ROUNDS = {steps}, {rounds}
layers = [part for _ in range(6) for part in (nn.Linear(256, 256), nn.GELU())]
model = nn.Sequential(*layers, nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))

def block():
    began = time.process_time()
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return time.process_time() - began

block()
"""

PYTEST = """
import pytest
FOUND = []
@pytest.mark.parametrize("number", range(3 * ROUNDS))
def test_block(backlight_watch, number):
    with backlight_watch(model, optimizer) if number % 3 == 1 else contextlib.nullcontext():
        FOUND.append(block())
def test_all():
    open("seconds.json", "w").write(json.dumps(FOUND))
"""

TRL = """
import json, logging, sys, tempfile, time
sys.path.insert(0, sys.argv[1])
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer
from backlight.integrations.huggingface import BacklightCallback
from with_trl import WORDS, build_tokenizer
torch.set_num_threads(1)
STEPS, ROUNDS = {steps}, {rounds}
sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4)
data = Dataset.from_dict({{"text": ["what is it the cat sat", "who is it the dog ran"] * 100}})

def block(folder, is_watched):
    torch.manual_seed(0)
    llama = LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, bos_token_id=1, **sizes)
    arguments = SFTConfig(
        folder, max_steps=STEPS, per_device_train_batch_size=8, report_to="none", save_strategy="no",
        use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=STEPS,
    )
    trainer = SFTTrainer(
        LlamaForCausalLM(llama), arguments, train_dataset=data, processing_class=build_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=[BacklightCallback(run=folder + "/run", summary=False)] if is_watched else [],
    )
    began = time.process_time()
    trainer.train()
    return time.process_time() - began

found = []
for number in range(1 + 3 * ROUNDS):
    with tempfile.TemporaryDirectory() as folder:
        found.append(block(folder, number % 3 == 2))
open("seconds.json", "w").write(json.dumps(found[1:]))
"""


def run(folder: Path, source: str, *command: str) -> list[float]:
    """Write a program, run it, and return the seconds of its blocks."""
    (folder / "test_program.py").write_text(source)
    subprocess.run([sys.executable, *command], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    seconds: list[float] = json.loads((folder / "seconds.json").read_text())
    return seconds


def under_pytest(folder: Path, steps: int, rounds: int) -> list[float]:
    """Return the seconds of blocks under the plugin."""
    source = LOOP.format(steps=steps, rounds=rounds) + PYTEST
    return run(folder, source, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_program.py")


def under_trl(folder: Path, steps: int, rounds: int) -> list[float]:
    """Return the seconds of SFT with adapters."""
    examples = str(Path(__file__).parents[1] / "examples")
    return run(folder, TRL.format(steps=steps, rounds=rounds), "test_program.py", examples)


def in_a_notebook(folder: Path, steps: int, rounds: int) -> list[float]:
    """Return the seconds of cells of a real kernel."""
    import nbclient
    import nbformat

    cells = [LOOP.format(steps=steps, rounds=rounds) + "\nfound = []", "%load_ext backlight"]
    for number in range(rounds):
        watched = f"%%backlight --run runs/{number}\n"
        cells += [f"{head}found.append(block())" for head in ("", watched, "")]
    cells.append("print(json.dumps(found))")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": folder}}
    nbclient.NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=resources).execute()
    seconds: list[float] = json.loads(notebook.cells[-1].outputs[-1]["text"])
    return seconds


def observed_by_mcp(folder: Path, steps: int, rounds: int) -> list[float]:
    """Return the seconds of blocks of a process, of which every second of three is observed."""
    import mcp

    from backlight.analysis.mcp_server import build_server

    program = folder / "train.py"
    loop = "\nfor line in sys.stdin:\n    print(block(), flush=True)\n"
    program.write_text(LOOP.format(steps=steps, rounds=rounds) + loop)
    (folder / "runs").mkdir()
    child = subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert child.stdin is not None
    assert child.stdout is not None

    async def ask() -> list[float]:
        found = []
        async with mcp.Client(build_server(folder / "runs")) as client:
            for number in range(3 * rounds):
                child.stdin.write("go\n")
                if number % 3 == 1:
                    answer = await client.call_tool("diagnose_process", {"pid": child.pid, "seconds": 1.0})
                    assert not answer.is_error, answer.content
                found.append(float(await asyncio.to_thread(child.stdout.readline)))
        return found

    try:
        return asyncio.run(ask())
    finally:
        child.stdin.close()
        child.wait()


ADAPTERS: dict[str, tuple[Callable[[Path, int, int], list[float]], int]] = {
    "trl": (under_trl, 200),
    "notebook": (in_a_notebook, 1000),
    "pytest": (under_pytest, 1000),
    "mcp": (observed_by_mcp, 1000),
}
"""What runs the blocks, and the steps of one."""


def ratios(seconds: list[float]) -> Iterator[tuple[str, list[float]]]:
    """Yield of watched and control the ratios to the plain block of the same round."""
    for at, arm in enumerate(ARMS[1:], start=1):
        yield arm, [seconds[n + at] / seconds[n] for n in range(0, len(seconds), len(ARMS))]


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=ADAPTERS, default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=None, help="of a block, instead of those of the adapter")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name, (measured, steps) in ADAPTERS.items():
        if options.only in {None, name}:
            with tempfile.TemporaryDirectory() as folder:
                seconds = measured(Path(folder), options.steps or steps, options.rounds)
            for arm, values in ratios(seconds):
                low, middle, high = statistics.quantiles(values, n=4)
                print(f"{name:8} {arm:8} {middle:.3f} (quartiles {low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
