"""Mutated inputs of every kind: answered or refused in one line, in bounded time and memory."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

import pytest

from fuzz.targets import TARGETS, answer, write_seeds
from processes import run_captured

TIMEOUT_S = 5.0
"""CPU time of one input."""

MEMORY_BYTES = 500 * 2**20
"""Address space that one input may add."""

NUM_INPUTS = 30
"""Inputs of each kind in `make test`."""

MAX_INPUTS = 850
"""Inputs of each kind in `make test-full`: more than 10,000 of all."""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "seeds"
    folder.mkdir()
    return write_seeds(folder)


def _expire(*_: object) -> NoReturn:
    raise BaseException(f"more than {TIMEOUT_S:g} s")  # what answers may catch is an Exception


def _in_child(name: str, seeds: Path, numbers: range, log: Path) -> None:
    """Answer inputs in this process and write one line of JSON for each."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, _expire)
    folder = seeds.parent / f"input-{name}"
    with log.open("a") as out:
        try:
            TARGETS[name].warm_up(seeds, folder)
        except Exception:  # noqa: BLE001 - a seed that is refused makes all inputs worthless
            out.write(json.dumps({"input": "seed", "problem": traceback.format_exc()}) + "\n")
            return
        for number in numbers:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * os.sysconf("SC_PAGESIZE") + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            signal.setitimer(signal.ITIMER_PROF, TIMEOUT_S)
            try:
                said, problem = answer(name, seeds, folder, number), ""
            except BaseException:  # noqa: BLE001 - each is a finding
                said, problem = "", traceback.format_exc()
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            out.write(json.dumps({"input": number, "said": said, "problem": problem}) + "\n")
            out.flush()


def fuzz(name: str, seeds: Path, numbers: range) -> list[str]:
    """Answer inputs in a forked process, and return what was said to each; every problem is a failure."""
    log = seeds.parent / f"{name}-{numbers.start}.jsonl"
    child = os.fork()
    if not child:
        try:
            _in_child(name, seeds, numbers, log)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    found = [json.loads(line) for line in log.read_text().splitlines()]
    problems = [f"{name} {one['input']}: {one['problem']}" for one in found if one["problem"]]
    assert not problems, f"{len(problems)} of {len(found)} inputs:\n" + "\n".join(problems[:3])
    assert (status, len(found)) == (0, len(numbers)), f"{name} {len(found)} ended the process: {status}"
    return [one["said"] for one in found]


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs(name: str, seeds: Path) -> None:
    fuzz(name, seeds, range(NUM_INPUTS))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TARGETS)
def test_ten_thousand_mutated_inputs(name: str, seeds: Path) -> None:
    said = fuzz(name, seeds, range(NUM_INPUTS, MAX_INPUTS))
    # Otherwise the inputs are too broken to get anywhere; the checksum of a manifest refuses nearly all.
    assert sum(line == "answered" for line in said) > len(said) // 50 or name == "manifest"


@pytest.mark.parametrize("number", range(4))
def test_console_script(number: int, seeds: Path, tmp_path: Path) -> None:
    """What a user types: exit code 0 or 2, one line, no traceback, nothing that acts on the terminal."""
    name = ("database", "manifest", "hdf5", "document")[number]
    target = TARGETS[name]
    path = tmp_path / target.seed
    shutil.copytree(seeds / target.seed, path)
    target.mutate(path, random.Random(number))
    done = run_captured([sys.executable, "-m", "backlight", "findings", str(path)])
    assert done.returncode in {0, 2}, done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or len(done.stderr.splitlines()) == 1
