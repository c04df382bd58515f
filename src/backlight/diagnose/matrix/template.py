"""The plan that ``--init`` writes: checkpointing x ranks x backend x branch, with a tree to walk."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from backlight.diagnose.matrix.plan_errors import PlanError

_PLAN = """\
# A matrix of controlled cases. Run it:    backlight matrix {file}
# Check it without running anything:       backlight matrix {file} --check

name = "why does {script} not move"
time_limit = 120.0        # seconds, for each case
design = "one-at-a-time"  # the base, each factor alone; or "product" (all of them), or "listed" ([cases.*])

[base]
script = {script_text}
arguments = {arguments}
# interpreter = "../other-venv"           # another Python or environment; a case may have its own
# environment = {{ OMP_NUM_THREADS = "1" }}
# run_options = ["--stall", "30"]         # options of `backlight run`
# watch = false                           # plain Python: less evidence, nothing of backlight in the process
# progress = 'step (\\d+)/(\\d+)'           # how progress shows in the output: where it is, where it ends
# success = 'training finished'           # what the output of a finished case holds

# A factor has levels; the first is the base. A level says what it changes: arguments, environment, unset,
# edits, interpreter, directory, branch, ranks, script, and by `shows` what its output then holds.
[factors.checkpointing]
off = {{}}
on = {{ arguments = ["--checkpoint"] }}     # <- how your script turns it on

[factors.ranks]
one = {{ ranks = 1 }}
two = {{ ranks = 2 }}

[factors.backend]
default = {{}}
math = {{ arguments = ["--backend", "math"] }}    # <- the backend of attention or communication

[factors.branch]
here = {{}}
other = {{ branch = "HEAD" }}               # <- a branch, tag or commit; its files are taken from git

# [cases.other-environment]              # a case of its own; its control differs in one factor
# control = "base"
# interpreter = "../other-venv"

# Answers to `case`: {verdicts}.
# Answers to `compare` (a case with its control): causes, cures, changes, none. DID_NOT_FINISH and UNKNOWN,
# or a knob without effect, leave what hangs below a question open.
[tree.base]
ask = "How does the base case end?"
case = "base"
on = {{ PASS = "checkpointing", SLOW = "slow", "BLOCKED|SPIN|LONG_OP" = "hangs", CRASH = "crashes" }}

[tree.checkpointing]
ask = "Does checkpointing bring it about?"
compare = "checkpointing=on"
on = {{ causes = "because-of-checkpointing", none = "not-checkpointing" }}

[tree.slow]
conclusion = "it is slow, not hung"
[[tree.slow.actions]]
do = "profile a step instead of looking for a hang"

[tree.hangs]
conclusion = "it hangs without any of the factors"

[tree.crashes]
conclusion = "it crashes without any of the factors"

[tree.because-of-checkpointing]
conclusion = "activation checkpointing is what it takes"

[tree.not-checkpointing]
conclusion = "activation checkpointing makes no difference"
"""

_VERDICTS = "PASS, SLOW, BLOCKED, SPIN, LONG_OP, PHASE, DEAD, STOPPED, MISMATCH, CRASH"


def write_plan(path: Path, command: Sequence[str] = ()) -> Path:
    """Write a plan for ``command`` (a script and its arguments), which a reader then fits to it.

    Raises
    ------
    PlanError
        If the file exists already, or cannot be written.
    """
    words = [word for word in command if word != "--"]
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    script, *arguments = words or ["train.py"]
    text = _PLAN.format(
        file=path.name, script=script.replace('"', "'"), verdicts=_VERDICTS,
        script_text=json.dumps(os.path.relpath(script, path.absolute().parent) if words else script),
        arguments=json.dumps(arguments),
    )  # fmt: skip
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise PlanError(f"{path}: exists already; --init overwrites nothing, choose another name") from None
    except OSError as error:
        raise PlanError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def refuse_script(words: Sequence[str]) -> None:
    """Refuse a script where none is taken: a plan names its own.

    Raises
    ------
    PlanError
        If there is one.
    """
    if words:
        raise PlanError(
            f"unexpected {words[0]!r}: a script is only taken with --init, the plan names its own"
        )
