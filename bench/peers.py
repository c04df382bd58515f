"""What other tools report of the same faults: named, hinted, silent, false, processor time, weights.

Each script in `bench/peers/` holds one fault. Lines that end in ``# BUG`` are left out of its control, and
lines that start with ``# CONTROL:`` are only there. `bench/peers.toml` lists the tools: package and version,
the command, or the lines that its documentation asks for, which are inserted at SETUP, STEP, STEPPED and END.
For each script it holds the words of the output that name the fault, or hint at it: chosen by reading every
output. `bench/peers_counted.json` holds what was counted, with the words that decided.

- named: the output says what is wrong, or shows the line that is
- hinted: it points to the part of the script that is wrong, or to the symptom, among other candidates
- other: it warns of something else
- false: it warns about the control

Each tool gets an environment of its own, which borrows torch from this one.

    python bench/peers.py --install
    python bench/peers.py --only torchtest2,guardtower --scripts head_replaced --show
    python bench/peers.py --cost
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
FOLDER = HERE / "peers"
COST_SCRIPT = "steady"
LIMIT_S = 120.0
WORDS = 60
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "160", "NO_COLOR": "1"}
# Inserted into every script, watched or not: the processor time of the loop and a hash of the weights.
BEGIN = "import time as _time; _began = _time.process_time()"
FINISH = (
    "_seconds = _time.process_time() - _began",
    "import hashlib as _hashlib",
    "_bytes = b''.join(v.detach().numpy().tobytes() for v in model.state_dict().values())",
    "print(f'LOOP {_seconds:.4f} {_hashlib.sha256(_bytes).hexdigest()[:16]}', flush=True)",
)
# One process imports torch and the tool; each script runs in a fork of it.
FORKS = """
import importlib, json, os, runpy, sys, warnings
import torch
module, jobs = sys.argv[1], json.loads(sys.argv[2])
if module:
    importlib.import_module(module)
for script, out, limit in jobs:
    child = os.fork()
    if child == 0:
        import signal
        signal.alarm(limit)
        target = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, 1); os.dup2(target, 2)
        os.chdir(os.path.dirname(script))
        code = 0
        try:
            runpy.run_path(script, run_name='__main__')
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 1
        sys.stdout.flush(); sys.stderr.flush()
        os._exit(code)
    os.waitpid(child, 0)
"""


def variant(name: str, control: bool, lines: dict[str, list[str]], measured: bool) -> str:
    """Return the source of a script or of its control, with lines inserted at its anchors."""
    written = []
    for line in (FOLDER / f"{name}.py").read_text().splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if line.strip() in ("# SETUP", "# STEP", "# STEPPED", "# END"):
            anchor = line.strip()[2:]
            inserted = list(lines.get(anchor, []))
            if measured:
                inserted = {"SETUP": [BEGIN, *inserted], "END": [*inserted, *FINISH]}.get(anchor, inserted)
            written += [indent + each for each in inserted]
        elif line.endswith("  # BUG"):
            written += [] if control else [line.removesuffix("  # BUG")]
        elif line.strip().startswith("# CONTROL: "):
            written += [indent + line.strip().removeprefix("# CONTROL: ")] if control else []
        else:
            written.append(line)
    return "\n".join(written) + "\n"


def install(tool: dict[str, Any], environments: Path) -> Path:
    """Make the environment of a tool, unless it exists; return its folder of programs."""
    folder = environments / str(tool["name"])
    programs = folder / "bin"
    if "package" not in tool:
        return Path(sys.executable).parent
    if not (folder / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        packages = subprocess.run(
            [programs / "python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        # Last in the order of imports: what the tool brings itself wins.
        Path(packages.stdout.strip(), "zz_base.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        # The package itself also where this environment has it: only then are its programs written.
        for options in (["--no-deps", "--ignore-installed"], []):
            subprocess.run(
                [sys.executable, "-m", "pip", "--python", programs / "python", "install", "-q",
                 "--disable-pip-version-check", *options, *tool["package"]], check=True,
            )  # fmt: skip
        (folder / ".installed").touch()
    return programs


def execute(command: list[str], folder: Path, programs: Path, limit_s: float = LIMIT_S) -> str:
    """Run a command; return what it printed. One that does not end is interrupted, then killed."""
    environment = {**os.environ, **ENVIRONMENT, "PATH": f"{programs}:{os.environ['PATH']}"}
    child = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            return child.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, number)
            limit_s = 20.0
    return child.communicate()[0]


def scripts_of(tool: dict[str, Any], names: list[str]) -> list[str]:
    """Return those of the scripts that a tool is made for."""
    return [
        name for name in names if name in tool.get("scripts", names) and name not in tool.get("without", [])
    ]


def run_scripts(tool: dict[str, Any], names: list[str], environments: Path, outputs: Path) -> None:
    """Run a tool on scripts and their controls; what it printed is kept in files."""
    programs = install(tool, environments)
    jobs = []
    for name in scripts_of(tool, names):
        for control in (False, True):
            folder = outputs / str(tool["name"]) / (name + ("_control" if control else ""))
            folder.mkdir(parents=True, exist_ok=True)
            is_static = tool.get("static", False)
            (folder / "train.py").write_text(
                variant(name, control, tool.get("lines", {}), measured=not is_static)
            )
            (folder / "good.py").write_text(variant(name, True, {}, measured=False))
            if "command" not in tool:
                jobs.append((str(folder / "train.py"), str(folder / "output.txt"), int(LIMIT_S)))
                continue
            limit_s = tool.get("limit_s", LIMIT_S)
            (folder / "output.txt").write_text(
                execute(["bash", "-c", tool["command"]], folder, programs, limit_s)
            )
    if jobs:
        arguments = ["-c", FORKS, tool.get("module", ""), json.dumps(jobs)]
        print(execute(["python", *arguments], outputs, programs, LIMIT_S * len(jobs)), end="")


def ended(printed: str) -> tuple[float, str] | None:
    """Return processor seconds of the loop and hash of the weights, where the script reached its end."""
    line = re.search(r"LOOP (\S+) (\S+)", printed)
    return (float(line[1]), line[2]) if line else None


def level(tool: dict[str, Any], name: str, printed: str) -> tuple[str, str]:
    """Return how well an output names the fault of a script, and the words that decide it."""
    for each in ("named", "hinted"):
        words = re.search(tool.get(each, {}).get(name, "$^"), printed)
        if words:
            return each, words[0][:WORDS]
    if re.search(tool["alarm"], printed):
        return "other", ""
    return "silent" if tool.get("static") or ended(printed) else "failed", ""


def evaluate(tool: dict[str, Any], names: list[str], outputs: Path) -> dict[str, dict[str, Any]]:
    """Return level, alarm on the control, and equality of weights for each script."""
    rows = {}
    for name in scripts_of(tool, names):
        text = {
            control: (
                outputs / str(tool["name"]) / (name + ("_control" if control else "")) / "output.txt"
            ).read_text()
            for control in (False, True)
        }
        plain = outputs / "unwatched" / name / "output.txt"
        weights, without = ended(text[False]), ended(plain.read_text()) if plain.exists() else None
        reached, words = level(tool, name, text[False])
        rows[name] = {
            "level": reached,
            "words": words,
            "false": bool(re.search(tool["alarm"], text[True])),
            "equal": weights[1] == without[1] if weights and without else None,
        }
    return rows


def cell_text(cell: dict[str, Any] | None) -> str:
    """Return a cell of the table: empty where a tool was not run on a script."""
    if cell is None:
        return ""
    notes = [
        cell["level"],
        "false" if cell["false"] else "",
        "weights differ" if cell["equal"] is False else "",
    ]
    return ", ".join(note for note in notes if note)


def cost(tools: list[dict[str, Any]], rounds: int, environments: Path, outputs: Path) -> None:
    """Print the processor time of the loop against that of the unwatched loop, interleaved."""
    seconds: dict[str, list[float]] = {}
    timed = [tool for tool in tools if not tool.get("static") and tool.get("is_timed", True)]
    for _ in range(rounds):
        for tool in timed:
            folder = outputs / str(tool["name"]) / COST_SCRIPT
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "train.py").write_text(
                variant(COST_SCRIPT, False, tool.get("lines", {}), measured=True)
            )
            command = ["bash", "-c", tool.get("command", "python train.py")]
            reached = ended(execute(command, folder, install(tool, environments)))
            if reached:
                seconds.setdefault(tool["name"], []).append(reached[0])
    for name, taken in seconds.items():
        ratios = [watched / plain for watched, plain in zip(taken, seconds["unwatched"], strict=False)]
        print(
            f"{name:16} {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True
        )


def write_counted(path: Path, tools: list[dict[str, Any]], results: dict[str, dict[str, Any]]) -> None:
    """Write what was counted as JSON, one line for each tool and script."""
    entries: dict[str, Any] = {"date": time.strftime("%Y-%m-%d")}
    for tool in tools:
        entries[tool["name"]] = {
            "package": tool.get("package", []),
            "lines": sum(map(len, tool.get("lines", {}).values())),
        }
        entries |= {f"{tool['name']}: {name}": cell for name, cell in results[tool["name"]].items()}
    rows = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in entries.items()]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def main() -> None:
    """Run the tools, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", type=Path, default=Path("build/peers/environments"))
    parser.add_argument("--outputs", type=Path, default=Path("build/peers/outputs"))
    parser.add_argument("--only", help="names of tools, with commas")
    parser.add_argument("--scripts", help="names of scripts, with commas")
    parser.add_argument("--install", action="store_true", help="make the environments, and run nothing")
    parser.add_argument("--evaluate", action="store_true", help="evaluate what was printed before")
    parser.add_argument("--counted", type=Path, help="write what is counted to this JSON file")
    parser.add_argument("--cost", type=int, default=0, metavar="ROUNDS", help="measure processor time")
    parser.add_argument("--show", action="store_true", help="print every output")
    options = parser.parse_args()
    environments, outputs = options.environments.absolute(), options.outputs.absolute()
    data = tomllib.loads((HERE / "peers.toml").read_text())
    wanted = options.only.split(",") if options.only else None
    tools = [tool for tool in data["tool"] if wanted is None or tool["name"] in wanted]
    names = options.scripts.split(",") if options.scripts else data["scripts"]
    if options.install or options.cost:
        for tool in tools:
            install(tool, environments)
        if options.cost:
            cost(tools, options.cost, environments, outputs)
        return
    table = Table("script", *(tool["name"] for tool in tools))
    results = {}
    for tool in tools:
        began = time.monotonic()
        if not options.evaluate:
            run_scripts(tool, names, environments, outputs)
            print(tool["name"], f"{time.monotonic() - began:.0f} s", flush=True)
        results[tool["name"]] = evaluate(tool, names, outputs)
        if options.show:
            for file in sorted((outputs / tool["name"]).glob("*/output.txt")):
                if file.parent.name.removesuffix("_control") in names:
                    print(f"--- {tool['name']} {file.parent.name}\n{file.read_text()}", flush=True)
    for name in names:
        table.add_row(name, *(cell_text(results[tool["name"]].get(name)) for tool in tools))
    if options.counted:
        write_counted(options.counted, tools, results)
    Console(width=max(120, 16 * len(tools) + 24)).print(table)


if __name__ == "__main__":
    main()
