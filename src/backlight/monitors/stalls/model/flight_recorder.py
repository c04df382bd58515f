"""Collectives as torch's flight recorder keeps them, of a live process or in dumps. No torch.

The recorder is a ring buffer in each process. Every collective that a process group was given is in it, also
those that native code issues (the reducer of DDP), with its number in the group and whether it has completed.
"""

from __future__ import annotations

import ast
import io
import itertools
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from backlight import untrusted_files
from backlight.monitors.stalls.model.stacks import Frame, ThreadStack, phase_of, user_frame
from backlight.records import Phase

MAX_DUMP_BYTES = 256 * 1024 * 1024
"""Size of a dump beyond which it is refused: the largest buffers take a tenth of it."""

MAX_ENTRIES = 20_000
"""Latest entries of a dump that are read."""

MAX_SIZES = 8
"""Tensors of a collective whose sizes a text holds."""

_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle))?$")

_BACKWARD_HOOKS = frozenset({"pre_backward", "post_backward", "_root_post_backward_final_callback"})

Sizes = tuple[tuple[int, ...], ...]


class DumpError(ValueError):
    """A file that is not a dump of the flight recorder."""


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective that a rank has issued."""

    group: str  # name of the process group
    ranks: tuple[int, ...]  # of the group; empty where they are not known
    number: int  # counts the collectives of the group
    operation: str  # such as `all_reduce`
    inputs: Sizes = ()
    outputs: Sizes = ()
    dtypes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # of inputs and outputs
    started: bool = False  # on the device; gloo does not report it
    completed: bool = False
    created_ns: int = 0  # since the epoch
    backend: str = ""
    line: str = ""  # the user's line that issued it, where the stack is known
    label: str = ""  # description of the group
    phase: Phase | None = None  # in which it was issued, where the stack shows one
    parameters: str = ""  # whose gradients or shards it carries, in words

    @property
    def is_point_to_point(self) -> bool:
        """Whether it is between two ranks, which share no number of the group."""
        return self.operation.startswith(("send", "recv"))

    @property
    def text(self) -> str:
        """The call in words: ``all_reduce(4x4 float32) #12 of group tp [0, 1]``."""
        return f"{self.operation}({self.tensors}) #{self.number}{self.group_words}"

    @property
    def issued(self) -> str:
        """Phase, parameters and line of its issue: ``, issued in backward for bucket 1 of 2 (a) at x:3``."""
        phase = f" in {self.phase}" if self.phase is not None else ""
        parts = f"{phase}{self.parameters and f' for {self.parameters}'}{self.line and f' at {self.line}'}"
        return parts and f", issued{parts}"

    @property
    def tensors(self) -> str:
        """Sizes and types of the inputs, or of the outputs where there are none."""
        sizes, dtypes = (self.inputs, self.dtypes[0]) if any(self.inputs) else (self.outputs, self.dtypes[1])
        names = itertools.chain(dtypes, itertools.repeat(dtypes[-1] if dtypes else ""))
        named = zip(sizes, names, strict=False)
        parts = [f"{'x'.join(map(str, size)) or 'scalar'} {_dtype(dtype)}".strip() for size, dtype in named]
        return ", ".join(parts[:MAX_SIZES]) + (", ..." if len(parts) > MAX_SIZES else "")

    @property
    def group_words(self) -> str:
        """The group, where it is not that of all ranks."""
        if self.label == "default_pg":
            return ""
        name = self.label if self.label not in {"", "undefined"} else self.group
        return f" of group {name}{f' {list(self.ranks[:8])}' if self.ranks else ''}"


@dataclass(frozen=True)
class Dump:
    """The recorded collectives of one rank, oldest first; ``is_whole``: none has been overwritten."""

    rank: int
    records: tuple[CollectiveRecord, ...]
    is_whole: bool = True


# Parsing


def parse_dump(rank: int, data: Any, groups: Mapping[str, Iterable[int]] | None = None) -> Dump:
    """Return a dump from plain containers; ``groups`` are ranks by name where the dump lacks them.

    Raises
    ------
    DumpError
        If it has not the structure of a dump.
    """
    try:
        entries = list(data["entries"])[-MAX_ENTRIES:]
        members = {**_groups(data.get("pg_config")), **{k: tuple(v) for k, v in (groups or {}).items()}}
        records = tuple(_record(entry, members) for entry in entries)
        first = int(entries[0].get("record_id", 0)) if entries else 0
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DumpError(f"expected `entries` of torch's flight recorder, got {reason}") from None
    return Dump(rank, records, is_whole=first == 0 and len(data["entries"]) <= MAX_ENTRIES)


def _groups(config: Any) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, group in (config or {}).items():
        ranks = group["ranks"]
        if isinstance(ranks, str):
            ranks = ast.literal_eval(ranks) if ranks.strip("[]0123456789, ") == "" else ()
        found[str(name)] = tuple(map(int, ranks))
    return found


def _record(entry: Mapping[str, Any], members: Mapping[str, tuple[int, ...]]) -> CollectiveRecord:
    name, label = map(str, entry["process_group"])
    backend, _, operation = str(entry["profiling_name"]).rpartition(":")
    state = str(entry["state"])
    frames = tuple(
        Frame(str(f["filename"]), int(f["line"]), str(f["name"])) for f in entry.get("frames") or ()
    )
    stack = ThreadStack(0, frames)
    user = user_frame(stack) if frames else None
    return CollectiveRecord(
        group=name,
        ranks=members.get(name, ()),
        number=int(entry["collective_seq_id"]),
        operation=operation,
        inputs=_sizes(entry["input_sizes"]),
        outputs=_sizes(entry["output_sizes"]),
        dtypes=(_dtypes(entry.get("input_dtypes")), _dtypes(entry.get("output_dtypes"))),
        started=state == "started" or bool(entry.get("time_discovered_started_ns")),
        completed=state == "completed" or bool(entry.get("retired")),
        created_ns=int(entry.get("time_created_ns") or 0),
        backend=backend,
        line=str(user) if user is not None else "",
        label=label,
        phase=_phase_of(stack),
    )


def _phase_of(stack: ThreadStack) -> Phase | None:
    """Return the phase of a stack, which begins in the hooks of FSDP2 on a thread of the engine."""
    in_hook = any("fsdp/" in f.file and f.function in _BACKWARD_HOOKS for f in stack.frames)
    return Phase.BACKWARD if in_hook else phase_of(stack)


def _sizes(value: Any) -> Sizes:
    return tuple(tuple(int(n) for n in size) for size in value)


def _dtypes(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(map(str, value or ()))


_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip


def _dtype(name: str) -> str:
    return _DTYPES.get(name, name.removeprefix("torch."))


# Files


class _PlainUnpickler(pickle._Unpickler):
    """Reads containers, numbers and strings; a pickle that names any class or function is refused.

    The version in Python, since that in C reserves memory for an index that the file gives.
    """

    def find_class(self, module: str, name: str) -> NoReturn:
        raise DumpError(f"refused: it names {module}.{name}; a dump holds only plain containers and numbers")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise DumpError(
            "refused: it refers to objects outside; a dump holds only plain containers and numbers"
        )


def read_dump(path: Path, rank: int) -> Dump:
    """Read the dump of one rank, JSON or pickle; nothing in the file is executed.

    Raises
    ------
    DumpError
        If the file is not a dump, or names a class.
    OSError
        If it cannot be read.
    """
    raw = untrusted_files.read(path, MAX_DUMP_BYTES, links=True)
    try:
        is_json = raw[:1] in {b"{", b" ", b"\n"}
        return parse_dump(rank, json.loads(raw) if is_json else _PlainUnpickler(io.BytesIO(raw)).load())
    except DumpError as error:
        raise DumpError(f"{path}: {error}") from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything
        reason = f"{type(error).__name__}: {error}"
        raise DumpError(
            f"{path}: expected a dump of the flight recorder (JSON or pickle), got {reason}"
        ) from None


def read_dumps(directory: Path) -> dict[int, Dump]:
    """Read the dumps of a directory by rank: names of files end in it, as in ``nccl_trace_rank_3``.

    Raises
    ------
    DumpError
        If there is none, two files are of one rank, or one of them is not a dump.
    OSError
        If the directory cannot be read.
    """
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        match = _RANK.search(path.name)
        if match is None or not path.is_file():
            continue
        rank = int(match[1])
        if rank in found:
            raise DumpError(
                f"{directory}: {found[rank].name} and {path.name} are both of rank {rank}; expected one file "
                "per rank. Move the dumps of one job into a directory of their own"
            )
        found[rank] = path
    if not found:
        raise DumpError(
            f"{directory}: no dump of the flight recorder; expected one file per rank whose name ends in the "
            "rank, such as nccl_trace_rank_0 (TORCH_NCCL_DEBUG_INFO_TEMP_FILE, TORCH_FR_DUMP_TEMP_FILE)"
        )
    return {rank: read_dump(path, rank) for rank, path in sorted(found.items())}
