"""What is fuzzed: how each kind of input is made, mutated and answered, and which values must not change."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from backlight.analysis import sql
from backlight.analysis.report import write_bundle, write_markdown
from backlight.cli.app import REFUSALS
from backlight.diagnose.test_matrix.plan import read_plan
from backlight.findings.evaluate import findings_of
from backlight.launch.recipe import refuse_script
from backlight.series import SERIES
from backlight.session.settings import Settings
from backlight.store.format.names import MANIFEST
from backlight.store.read.run import Run, open_run
from backlight.store.read.run_list import list_runs
from backlight.store.read.snapshot import SIDE_FILES
from backlight.store.write.compact import compact, merge_hosts
from backlight.store.write.writer import RunWriter
from backlight.trace.reader import read_trace
from fuzz import mutation
from report.synthetic import Plan, write_run
from run_builder import build_run

DATABASE, DOCUMENT = "attempt-000/rank-00000.db", "attempt-000/rank-00000.json"
CANARY = "canary"
"""Tree of a user to which links and side files lead, and that no input changes."""

STATEMENTS = (
    "select parameter, max(norm) from gradient group by all order by 2 desc limit 3",
    "select * from scalars where value > 0 limit 5",
    "select step, count(*) over (partition by attempt) from steps limit 5",
    "select rule, severity from findings",
)
PLAN = b"""
[base]
command = ["{python}", "train.py", "--lr", "1"]
environment = {SEED = "1"}
[factors.lr]
high = {}
low = { arguments = ["--lr=0.1"] }
[cases.one]
levels = { lr = "low" }
"""
SETTINGS = b"""
monitors = ["health"]
every = 10
[groups]
host = "encoder.*"
[thresholds.health]
vanishing_rms = 1e-9
"""
RECIPE = b"""
import torch
def build_model():
    return torch.nn.Linear(2, 2)
def batches(rank, world_size):
    yield 1
"""


def write_arrays(writer: RunWriter, arrays: Sequence[np.ndarray]) -> None:
    for step, values in enumerate(arrays):
        writer.array("w", step, values, dims=("a", "b"))


def write_seeds(folder: Path) -> Path:
    """Write one healthy input of each kind."""
    write_run(folder / "run", Plan())
    arrays = [np.random.default_rng(step).normal(size=(8, 700)) for step in range(6)]
    write = partial(write_arrays, arrays=arrays)
    build_run(folder / "arrays", run_id="fuzz", scalars={"loss": range(6)}, write=write)
    for rank, name in enumerate(("host0", "host1")):
        run = build_run(
            folder / f"rank{rank}", rank=rank, world_size=2, run_id="fuzz", join_timeout=0.05,
            scalars={"loss": range(6)},
            write=partial(write_arrays, arrays=[np.full((2, 3), float(rank))] * 6),
        )  # fmt: skip
        run.path.rename(folder / name)
    shutil.copytree(folder / "host1", folder / CANARY / "run")
    for name in ("private.txt", ".x.tmp", "rank-00000.db", "rank-00000-000000.h5"):
        (folder / CANARY / name).write_text("private")
    (folder / "plan.toml").write_bytes(PLAN)
    (folder / "settings.toml").write_bytes(SETTINGS)
    (folder / "recipe.py").write_bytes(RECIPE)
    events = [
        {"ph": "X", "cat": "cpu_op", "name": f"aten::op{n % 5}", "pid": 1, "tid": 1, "ts": 10.5 * n, "dur": 9,
         "args": {"External id": n, "Input Dims": [[2, 3], []]}}
        for n in range(200)
    ]  # fmt: skip
    (folder / "trace.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    (folder / "trace.json.gz").write_bytes(gzip.compress((folder / "trace.json").read_bytes()))
    return folder


@dataclass(frozen=True)
class Target:
    """A kind of input: ``mutate`` changes a copy of ``seed``, ``answer`` reads it."""

    seed: str
    mutate: Callable[[Path, random.Random], None]
    answer: Callable[[Path], Any]

    def copy(self, seeds: Path, folder: Path) -> Path:
        """Copy the seed into ``folder`` and return where it is."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        copy = shutil.copytree if (seeds / self.seed).is_dir() else shutil.copyfile
        return Path(copy(seeds / self.seed, folder / self.seed))

    def warm_up(self, seeds: Path, folder: Path) -> None:
        """Answer the seed as it is, or raise: what is imported for it is no memory of an input."""
        path = self.copy(seeds, folder)
        if self.answer is _query:
            path.write_text(STATEMENTS[3])
        self.answer(path)


def _bytes(path: Path, rng: random.Random) -> None:
    path.write_bytes(mutation.mutate_bytes(path.read_bytes(), rng))


def _words(path: Path, rng: random.Random) -> None:
    path.write_bytes(mutation.mutate_words(path.read_bytes(), rng))


def _json(name: str, *, flip: bool = False) -> Callable[[Path, random.Random], None]:
    def mutate(path: Path, rng: random.Random) -> None:
        file = path / name if name else path
        if flip and rng.random() < 0.5:
            file.write_bytes(mutation.flip_bit(file.read_bytes(), rng))
        else:
            mutation.mutate_document(file, rng)

    return mutate


def _database(path: Path, rng: random.Random) -> None:
    mutation.mutate_database(path / DATABASE, rng)


def _forged(path: Path, rng: random.Random) -> None:
    """Change a database, the manifest or a rank document, with checksums that fit."""
    if rng.random() < 0.4:
        mutation.mutate_database(path / DATABASE, rng, forge=True)
    else:
        mutation.mutate_document(path / rng.choice((MANIFEST, DOCUMENT)), rng, forge=True)


def _hdf5(path: Path, rng: random.Random) -> None:
    mutation.mutate_hdf5(next((path / "attempt-000/arrays").glob("*.h5")), rng)


def _gzip(path: Path, rng: random.Random) -> None:
    if rng.random() < 0.3:
        _bytes(path, rng)
    else:
        text = mutation.mutate_json(gzip.decompress(path.read_bytes()), rng)
        path.write_bytes(gzip.compress(text + b" " * rng.choice((0, 10**7))))


def read_run(path: Path) -> Run:
    """Read all of a run, as the commands do."""
    list_runs(path.parent)
    run = open_run(path)
    for source in ("backlight", "user"):
        for name in run.scalar_names(source):
            run.scalar(name, source)
    for array in run.array_names():
        run.array(array)
    findings_of(run)
    return run


Steps = dict[int, Any]


def _values(run: Run) -> dict[str, Steps]:
    """Return everything that a run holds, by name, and by step or number."""
    found: dict[str, Steps] = {}
    for name in run.array_names():
        steps, values = run.array(name)
        found[f"array {name}"] = dict(zip(steps.tolist(), map(np.ndarray.tobytes, values), strict=True))
    for series in (name for name in SERIES if run.has(name)):
        found[f"steps {series}"] = dict.fromkeys(run.series_steps(series).tolist())
        for column in (*SERIES[series].columns, *SERIES[series].derived):
            frame = run.frame(series, column.name)
            for values_S, measured_S, name in zip(frame.values.T, frame.measured.T, frame.names, strict=True):
                logged = zip(frame.steps.tolist(), values_S, measured_S, strict=True)
                found[f"{series} {column.name} {name}"] = {
                    step: np.float64(value).tobytes() for step, value, measured in logged if measured
                }
    for source in ("backlight", "user"):
        for name in run.scalar_names(source):
            scalar = run.scalar(name, source)
            found[f"{source} {name}"] = {
                step: np.float64(value).tobytes()
                for step, value in zip(scalar.steps.tolist(), scalar.values, strict=True)
            }
    found["parameters"] = {i: repr(record) for i, record in enumerate(run.parameters())}
    found["findings"] = {hash(repr(finding)): None for finding in run.stored_findings()}
    found["events"] = {hash(repr(event)): None for event in run.events()}
    found["last step"] = {run.last_step(): None}
    stated = (run.name, run.run_id, run.monitors, run.groups, run.overrides, run.attempts)
    found["manifest"] = {i: repr(value) for i, value in enumerate(stated)}
    found["fingerprint"] = {} if run.fingerprint() is None else {0: repr(run.fingerprint())}
    return found


_healthy: dict[str, dict[str, Steps]] = {}
"""What the seeds hold, by name."""


def same_values(path: Path) -> None:
    """Every returned value is that of the healthy run; where one is missing, the run states a loss."""
    if path.name not in _healthy:
        _healthy[path.name] = _values(open_run(path.parent.parent / "seeds" / path.name))
    expected = _healthy[path.name]
    run = read_run(path)
    found = _values(run)
    if not run.losses:
        assert found.keys() == expected.keys(), "something is missing without a statement"
    for name, steps in found.items():
        if not run.losses:
            assert steps == expected[name], f"{name}: changed without a statement"
        if name not in {"parameters", "last step"}:  # what is lost moves the numbers of the others
            assert steps.items() <= expected.get(name, steps).items(), f"{name}: changed"


def _query(path: Path) -> None:
    statement = path.read_bytes().decode("utf-8", "replace")
    with sql.query(open_run(path.parent.parent / "seeds" / "run"), statement) as answer:
        for _row in zip(answer.rows(), range(50), strict=False):
            pass


def _mutate_sql(path: Path, rng: random.Random) -> None:
    path.write_bytes(mutation.mutate_words(rng.choice(STATEMENTS).encode(), rng))


def _report(path: Path) -> None:
    write_markdown(path, path.parent / "out.md")
    write_bundle(path, path.parent / "out.zip")


def _join(path: Path) -> None:
    whole = path.parent / "host0"
    shutil.copytree(path.parent.parent / "seeds" / "host0", whole)
    merge_hosts(whole, [path])


def _any_file(path: Path, rng: random.Random) -> None:
    """Change any file of a run, or exchange two."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    one, other = rng.choice(files), rng.choice(files)
    match rng.randrange(5):
        case 0:
            shutil.copyfile(one, other) if one != other else one.unlink()
        case 1:
            one.unlink()
            one.symlink_to(rng.choice(("/dev/zero", "/etc/hostname", str(path))))
        case _ if one.suffix == ".json":
            one.write_bytes(mutation.mutate_json(one.read_bytes(), rng))
        case _ if one.suffix == ".db":
            mutation.mutate_database(one, rng)
        case _:
            _bytes(one, rng)


def _side_files(path: Path, rng: random.Random) -> None:
    """Plant up to three side files of SQLite, links or second names, which lead to the canary."""
    canary = path.parent.parent / "seeds" / CANARY
    attempt = path / "attempt-000"
    databases = sorted(p.name for p in attempt.glob("*.db"))
    for _ in range(rng.randint(1, 3)):
        name = rng.choice((
            *(rng.choice(databases) + suffix for suffix in SIDE_FILES), *databases, "arrays", "evidence",
            "columns-000000", "rank-00000.json", "rank-00001.json", "rank-00001.db", "rank-00000.000000.db",
            "watchdog-x.db", "watchdog-x.db-journal", "evidence/a.txt", "arrays/rank-00000-000009.h5",
            ".a.tmp", "../attempt-001", "../.a.tmp", "../manifest.json",
        ))  # fmt: skip
        planted = attempt / name
        if planted.parent.is_symlink() or planted.parent.is_file():
            continue
        planted.parent.mkdir(exist_ok=True)
        if planted.is_dir() and not planted.is_symlink():
            shutil.rmtree(planted)
        planted.unlink(missing_ok=True)
        victim = rng.choice(sorted(canary.rglob("*")))
        match rng.randrange(6):
            case 0:
                planted.symlink_to(victim)
            case 1 if victim.is_file():
                planted.hardlink_to(victim)
            case 2:
                planted.write_bytes(rng.randbytes(rng.choice((0, 32, 5000))))
            case 3:
                planted.write_bytes(mutation.mutate_bytes(mutation.journal(victim), rng))
            case _:
                planted.write_bytes(mutation.journal(victim))
                if name.endswith("-journal"):
                    planted.with_name(planted.name.removesuffix("journal") + "wal").touch()


def _change(path: Path) -> None:
    """Read, report and compact a run; a refusal of one does not keep the others from it."""
    for step in (read_run, _report, compact):
        try:
            step(path)
        except REFUSALS:
            if step is compact:
                raise


def _join_and_change(path: Path) -> None:
    try:
        _join(path)
    finally:
        compact(path.parent / "host0")


TARGETS = {
    "database": Target("run", _database, same_values),
    "forged": Target("run", _forged, read_run),
    "hdf5": Target("arrays", _hdf5, same_values),
    "manifest": Target("run", _json(MANIFEST, flip=True), same_values),
    "document": Target("run", _json(DOCUMENT, flip=True), same_values),
    "sql": Target("plan.toml", _mutate_sql, _query),
    "trace": Target("trace.json", _json(""), read_trace),
    "gzip": Target("trace.json.gz", _gzip, read_trace),
    "plan": Target("plan.toml", _words, read_plan),
    "settings": Target("settings.toml", _words, lambda path: Settings.read(path, {})),
    "recipe": Target("recipe.py", _words, refuse_script),
    "join": Target("host1", _any_file, _join),
    "side files": Target("run", _side_files, _change),
    "joined side files": Target("host1", _side_files, _join_and_change),
    "bundle": Target("arrays", _any_file, _report),
}
"""Kinds of input by name."""


def _state(folder: Path) -> dict[Path, tuple[int, int, bytes]]:
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {
        path: (about.st_mode, about.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path, about in found.items()
    }


def answer(name: str, seeds: Path, folder: Path, seed: int) -> str:
    """Mutate a copy of a seed in ``folder`` and answer it; return ``answered``, or the line of a refusal."""
    target, line = TARGETS[name], "answered"
    path = target.copy(seeds, folder)
    target.mutate(path, random.Random(f"{name} {seed}"))
    before = _state(seeds / CANARY)
    try:
        target.answer(path)
    except REFUSALS as error:
        line = str(error)
    assert _state(seeds / CANARY) == before, "a file outside of the input was changed"
    assert line, "a refusal without a word"
    assert "\n" not in line or name == "recipe", f"several lines: {line!r}"  # there it shows a recipe
    return line
