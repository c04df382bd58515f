"""What a new user reads: scripts with one bug each, and their sound counterparts, under `backlight run`.

Each script runs twice in an empty directory: with plain Python, and through the installed console script with
default settings. The table shows whether exit code, standard output and saved weights are equal, the first
line of the summary, and the rules of the findings. A bug holds if one of the expected rules reports a warning
or an error; a sound script holds if there is neither. Scripts: `bench/first_day/` (`bug` is an argument), and
`cases/first-day/` of the directory given by --shared, by the variable SHARED, or `../shared`.

    python bench/first_day.py [--shared DIR] [--only gpt] [--jobs 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

OWN = Path(__file__).parent / "first_day"

TIMEOUT_S = 1800.0
"""Time until a script is interrupted as with Ctrl-C; scripts that hang have a time of their own."""

ENDING_S = 60.0
"""Time that an interrupted script has to end."""

TIMES = re.compile(r"\d+\.\d+s\b|'[a-z_]*(runtime|per_second)': '?[-+\d.e]+'?")
"""Times that scripts print, which differ from run to run."""

HEADLINE = re.compile(r"(✓|✕|!|i|\?|Incomplete\b|Interrupted\b) ?.*")
"""First line of the summary."""

SOUND: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A command line of a script, and the rules of which one is expected; none for a sound script."""

    script: str
    arguments: str = ""
    rules: tuple[str, ...] = SOUND
    is_counted: bool = True
    """False where both answers are acceptable, as for a choice that may be meant."""

    severities: tuple[str, ...] = ("error", "warning")
    ranks: int = 1
    first: str = ""
    """Arguments of a run of the script without backlight that comes before, as for a checkpoint."""

    options: tuple[str, ...] = ()
    hang_s: float = 0.0
    """Time after which a script that hangs is interrupted."""

    @property
    def name(self) -> str:
        """The script with its arguments."""
        return f"{self.script} {self.arguments}".strip()


NO_OPTIMIZER = ("no_update", "trained_tensors")
SEVERITIES = ("error", "warning", "info")
RESUMED = "--steps 80 --resume ckpt/last.pt"

SHARED_CASES = (
    Case("bert.py"),
    Case("bert.py", "frozen_encoder", is_counted=False),
    Case("bert.py", "frozen_all", ("no_gradient", "loss_not_falling")),
    Case("bert.py", "one_class", ("loss_input", "repeated_data", "loss_not_falling"), is_counted=False),
    Case("bert.py", "lr", ("large_update", "loss_not_falling", "spike", "exploding")),
    Case("bert.py", "lr_tiny", ("weights_unchanged", "no_update", "schedule", "loss_not_falling")),
    Case("bert.py", "clip", ("always_clipped",)),
    Case("bert.py", "optimizer_before", NO_OPTIMIZER),
    Case("bert.py", "softmax", ("loss_input",)),
    Case("cnn.py"),
    Case("cnn.py", "--bug raw_inputs", is_counted=False),
    Case("cnn.py", "--bug no_shuffle", is_counted=False),
    Case("cnn.py", "--bug modules_in_list", NO_OPTIMIZER),
    Case("cnn.py", "--bug detach", ("no_gradient",)),
    Case("cnn.py", "--bug softmax", ("loss_input",)),
    Case("cnn.py", "--bug eval_mode", ("module_modes",)),
    Case("cnn.py", "--bug wrong_target", ("loss_not_falling",)),
    Case("cnn.py", "--bug no_zero_grad", ("gradients_not_cleared",)),
    Case("gpt.py"),
    Case("gpt.py", "--dtype float16"),
    Case("gpt.py", RESUMED, first="--steps 40"),
    Case("gpt.py", f"--bug resume_no_opt {RESUMED}", ("not_restored",), first="--steps 40"),
    Case("gpt.py", "--bug same_batch", ("repeated_data",)),
    Case("gpt.py", "--bug no_grad_block", ("no_gradient",)),
    Case("gpt.py", "--bug lr_high", ("large_update", "spike", "exploding", "loss_not_falling")),
    Case("gpt.py", "--bug unfrozen_late", NO_OPTIMIZER),
    Case("gpt.py", "--bug nan", ("non_finite",)),
    Case("gpt.py", "--bug eval_forever", ("module_modes",)),
    Case("gpt.py", "--bug no_div", is_counted=False),
    Case("gpt.py", "--bug zero_in_accum", ("gradients_discarded",)),
    Case("gpt.py", "--bug clip_scaled --dtype float16", ("mixed_precision",)),
    Case("gpt.py", "--bug clip_tiny", ("always_clipped",)),
    Case("gpt.py", "--bug sched_twice", ("schedule",)),
    Case("ddp.py", ranks=2),
    Case("ddp.py", "skip", ("stall", "replicas_differ"), ranks=2, options=("--stall", "5"), hang_s=60),
    Case("ddp_hang.py", ranks=2),
    Case("ddp_hang.py", "skip", ("stall",), ranks=2, options=("--stall", "5"), hang_s=60),
    *(Case("disc2.py", mode, ("gradients_discarded",)) for mode in ("none", "clip", "amp", "clip-amp-eval")),
    Case("explode_min.py", "", ("module_modes",)),
    Case("finetune_bn.py"),
    Case("finetune_bn_long.py", options=("--stop-on", "error")),
    Case("hang.py", "", ("stall",), options=("--stall", "5"), hang_s=45),
    Case("leak.py", "", ("memory",)),
    Case("nan.py", "", ("non_finite",)),
    Case("slow.py", "data", ("bottleneck",), severities=SEVERITIES),
    Case("slow.py", "item", ("bottleneck",), severities=SEVERITIES, is_counted=False),
    Case("slow.py", "tiny", ("bottleneck",), severities=SEVERITIES, is_counted=False),
    Case("slow.py", "copy", ("bottleneck",), severities=SEVERITIES, is_counted=False),
    *(Case("unfreeze.py", mode, NO_OPTIMIZER) for mode in ("plain", "dead", "modelzero")),
    Case("unfreeze2.py", "", NO_OPTIMIZER),
)  # fmt: skip

BUGS = {
    "autoencoder.py": ("repeated_data",),
    "contrastive.py": ("no_gradient",),
    "distillation.py": ("module_modes",),
    "gan.py": ("no_gradient",),
    "lightning_module.py": NO_OPTIMIZER,
    "lora.py": ("no_gradient", "weights_unchanged", "no_update", "vanishing"),
    "mixup.py": ("schedule",),
    "multi_task.py": ("no_gradient",),
    "policy_gradient.py": ("gradients_not_cleared",),
    "segmentation.py": ("loss_input",),
    "tabular.py": ("loss_input",),
    "text_classifier.py": ("loss_input",),
}
"""Rules that find the bug of each own script."""

OWN_CASES = tuple(
    case for script, rules in BUGS.items() for case in (Case(script), Case(script, "bug", rules))
)


@dataclass
class Result:
    """What one case printed; ``rules`` by severity."""

    name: str
    expected: list[str]
    holds: bool | None
    exit_codes: tuple[int, int]
    is_equal: bool
    headline: str
    rules: dict[str, list[str]] = field(default_factory=dict)
    problem: str = ""


def execute(command: Sequence[str], folder: Path, seconds: float) -> tuple[int, str, str]:
    """Run a command, interrupted after some seconds; return its exit code, output and errors."""
    child = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1"},
    )  # fmt: skip
    for end in (signal.SIGINT, signal.SIGKILL, None):
        try:
            output, errors = child.communicate(timeout=seconds)
            return child.returncode, output, errors
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, end or signal.SIGKILL)
            seconds = ENDING_S
    raise RuntimeError(f"{' '.join(command)} does not end")


def weights(folder: Path) -> dict[str, str]:
    """Return a digest of each file that a script saved."""
    files = [path for path in folder.rglob("*.pt") if "runs" not in path.relative_to(folder).parts]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run(case: Case, scripts: Path, backlight: str) -> Result:
    """Run a case without and with backlight."""
    script = [str(scripts / case.script), *case.arguments.split()]
    launcher = [sys.executable]
    watched = [backlight, "run", *case.options]
    if case.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
        watched = [*launcher, "--no-python", *watched]
    traces = []
    with tempfile.TemporaryDirectory(prefix="first-day-", ignore_cleanup_errors=True) as base:
        for name, command in (("plain", launcher), ("watched", watched)):
            folder = Path(base, name)
            folder.mkdir()
            if case.first:
                execute([*launcher, script[0], *case.first.split()], folder, TIMEOUT_S)
            if name == "plain" and case.hang_s:
                traces.append((0, "", "", {}))
                continue
            trace = execute([*command, *script], folder, case.hang_s or TIMEOUT_S)
            traces.append((trace[0], TIMES.sub("", trace[1]), trace[2], weights(folder)))
        _, printed, errors = execute([backlight, "findings", "--json"], folder, TIMEOUT_S)
    (plain_code, plain_output, _, plain_weights), (code, output, summary, its_weights) = traces
    plain_code = code if case.hang_s else plain_code
    headline = next((line for line in summary.splitlines() if HEADLINE.fullmatch(line)), "")
    is_equal = bool(case.hang_s) or (plain_output, plain_weights) == (output, its_weights)
    result = Result(case.name, [*case.rules], False, (plain_code, code), is_equal, headline)
    try:
        findings: Any = json.loads(printed)["findings"]
    except (ValueError, KeyError):
        result.problem = (errors or summary).strip().rpartition("\n")[2]
        return result
    for finding in findings:
        rules = result.rules.setdefault(finding["severity"], [])
        rules += [finding["rule"]] if finding["rule"] not in rules else []
    named = {rule for severity in case.severities for rule in result.rules.get(severity, ())}
    alarms = {rule for severity in ("error", "warning") for rule in result.rules.get(severity, ())}
    result.holds = bool(named & set(case.rules)) if case.rules else not alarms
    if not case.is_counted:
        result.holds = None
    return result


def print_table(results: Sequence[Result], console: Console) -> None:
    """Print one row per case, and the totals."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = "script", "exit", "equal", "first line of the summary", *SEVERITIES, "expected", "holds"
    for column in columns:
        table.add_column(column, overflow="fold")
    for one in results:
        plain, code = one.exit_codes
        codes = str(code) if code == plain else f"{code}, not {plain}"
        rules = [", ".join(one.rules.get(severity, ())) for severity in SEVERITIES]
        holds = {True: "yes", False: "NO", None: "-"}[one.holds]
        expected = " or ".join(one.expected) or "silent"
        table.add_row(
            one.name,
            codes,
            "yes" if one.is_equal else "NO",
            one.problem or one.headline,
            *rules,
            expected,
            holds,
        )
    console.print(table)
    counted = [one for one in results if one.holds is not None]
    bugs, sound = ([one for one in counted if bool(one.expected) is is_bug] for is_bug in (True, False))
    alarms = Counter(rule for one in sound for key in ("error", "warning") for rule in one.rules.get(key, ()))
    console.print(
        f"total: {sum(one.holds or False for one in bugs)} of {len(bugs)} bugs named, "
        f"{sum(one.holds or False for one in sound)} of {len(sound)} sound scripts silent"
        f"{' (' + ', '.join(f'{rule} {n}' for rule, n in alarms.items()) + ')' if alarms else ''}; "
        f"output and weights equal in {sum(one.is_equal for one in results)} of {len(results)}; "
        f"{len(results) - len(counted)} not counted",
    )


def main() -> int:
    """Run the cases and print the table; 1 where something does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path(os.environ.get("SHARED", "../shared")))
    parser.add_argument("--only", default="", help="part of the names of cases to run")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results as JSON")
    options = parser.parse_args()
    backlight = shutil.which(
        "backlight", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    if backlight is None:
        parser.error("the console script `backlight` is not installed")
    console = Console(width=200, highlight=False, markup=False)
    # A shell starts what runs in the background with SIGINT ignored, and scripts inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shared = (options.shared / "cases" / "first-day").resolve()
    cases = [(case, OWN) for case in OWN_CASES]
    if shared.is_dir():
        cases = [(case, shared) for case in SHARED_CASES] + cases
    else:
        console.print(f"{shared}: no such directory; only the scripts in {OWN} run")
    chosen = [(case, scripts) for case, scripts in cases if options.only in case.name]

    def one(pair: tuple[Case, Path]) -> Result:
        result = run(*pair, backlight)
        sys.stderr.write(f"{result.name}: {result.holds} {result.problem or result.headline}\n")
        return result

    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(one, chosen))
    print_table(results, console)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return int(not all(one.holds is not False and one.is_equal for one in results))


if __name__ == "__main__":
    sys.exit(main())
