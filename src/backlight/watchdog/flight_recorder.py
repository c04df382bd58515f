"""Collectives as torch's flight recorder keeps them, of a live process or in dumps. No torch.

The recorder is a ring buffer in each process. Every collective that a process group was given is in it, also
those that native code issues (the reducer of DDP), with its number in the group and whether it has completed.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from backlight import clock, untrusted_files
from backlight.records import Phase
from backlight.watchdog.collectives import CollectiveRecord, Dump, Sizes
from backlight.watchdog.stacks import Frame, ThreadStack, phase_of, user_frame

# State of communicators as the RAS service of NCCL (2.24 and later) reports it. No torch.
#
# The service listens on ``localhost:28028``, or on ``NCCL_RAS_ADDR``. It answers in lines of text: a
# handshake, and a status with the sections `Errors` and `Warnings`.

ADDRESS = ("localhost", 28028)

CONNECT_TIMEOUT_S = 1.0

ANSWER_S = 5
"""Seconds that NCCL may wait for its other processes."""

TIMEOUT_S = 12.0
"""Time in which the whole answer must have come."""

MAX_BYTES = 1 << 20

_VERSION = re.compile(r"NCCL version (\S+)")
_HEADING = re.compile(r"^(\w[\w .]*?)\.*(?: \([\d.]+s\))?\n=+$", re.MULTILINE)
_PROBLEM = re.compile(r"^#?(\S+) \((\w+)\) (\w+)$")
_RAS_RANK = re.compile(r"^Rank (\d+)\b")


@dataclass(frozen=True)
class Problem:
    """One entry of the sections `Errors` and `Warnings`; ``ranks`` are of the communicator."""

    communicator: str
    status: str  # such as MISMATCH
    lines: tuple[str, ...]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class RasStatus:
    """What the service reports."""

    version: str
    problems: tuple[Problem, ...]


def read_ras(environment: Mapping[str, str]) -> RasStatus | None:
    """Return what the service of a job reports, None where none answers.

    ``environment`` is that of a rank.
    """
    if environment.get("NCCL_RAS_ENABLE") == "0":
        return None
    host, _, port = environment.get("NCCL_RAS_ADDR", "").rpartition(":")
    address = (host.strip("[]"), int(port)) if host and port.isdigit() else ADDRESS
    try:
        with socket.create_connection(address, CONNECT_TIMEOUT_S) as connection:
            answer = _ask(connection)
    except (OSError, UnicodeDecodeError):
        return None
    return parse_ras(answer)


def _ask(connection: socket.socket) -> str:
    """Return the status, an empty text where the other end is no such service."""
    deadline = clock.monotonic() + TIMEOUT_S
    with connection.makefile("rb") as lines:
        connection.sendall(b"CLIENT PROTOCOL 2\n")
        if not lines.readline(256).upper().startswith(b"SERVER PROTOCOL "):
            return ""
        connection.sendall(b"TIMEOUT %d\n" % ANSWER_S)
        if lines.readline(256).strip().upper() != b"OK":
            return ""
        connection.settimeout(ANSWER_S + CONNECT_TIMEOUT_S)
        connection.sendall(b"VERBOSE STATUS\n")
        content = bytearray()
        while len(content) < MAX_BYTES and clock.monotonic() < deadline:
            chunk = lines.read1(65536)
            if not chunk:
                break
            content += chunk
    return content.decode("utf-8")


def parse_ras(text: str) -> RasStatus | None:
    """Return a status from its text, None for any other text."""
    version = _VERSION.search(text)
    if version is None:
        return None
    headings = list(_HEADING.finditer(text))
    problems: list[Problem] = []
    for heading, after in zip(headings, [*headings[1:], None], strict=True):
        if heading[1].strip() in {"Errors", "Warnings"}:
            problems += _problems(text[heading.end() : after.start() if after is not None else len(text)])
    return RasStatus(version[1], tuple(problems))


def _problems(section: str) -> list[Problem]:
    problems: list[Problem] = []
    for line in filter(None, map(str.strip, section.splitlines())):
        begin = _PROBLEM.match(line)
        if begin is not None:
            problems.append(Problem(f"{begin[1]} ({begin[2]})", begin[3], ()))
            continue
        if not problems:
            problems.append(Problem("", "", ()))
        last = problems[-1]
        rank = _RAS_RANK.match(line)
        ranks = (*last.ranks, int(rank[1])) if rank is not None else last.ranks
        problems[-1] = Problem(last.communicator, last.status, (*last.lines, line), ranks)
    return problems


T = TypeVar("T")

MAX_DUMP_BYTES = 256 * 1024 * 1024
"""Size of a dump beyond which it is refused: the largest buffers take a tenth of it."""

MAX_ENTRIES = 20_000
"""Latest entries of a dump that are read."""

MAX_TEXT = 4096
"""Characters of a name, path or error of a dump."""

MAX_RANKS = 4_000_000
"""Ranks of all groups of a dump."""

MAX_FRAMES, MAX_TENSORS, MAX_DIMS = 256, 4096, 64
"""Lines of a stack, tensors of a collective and axes of a tensor that are read."""

_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle))?$")

_ENDS = re.compile(r"\d{1,9}(?:->|<-)(\d{1,9})")

_BACKWARD_HOOKS = frozenset({"pre_backward", "post_backward", "_root_post_backward_final_callback"})


class DumpError(ValueError):
    """A file that is not a dump of the flight recorder."""


# Parsing


def parse_dump(rank: int, data: Any, groups: Mapping[str, Iterable[int]] | None = None) -> Dump:
    """Return a dump from plain containers; ``groups`` are ranks by name where the dump lacks them.

    Raises
    ------
    DumpError
        If it has not the structure of a dump.
    """
    try:
        once = _Once()
        entries = _list(data["entries"], MAX_DUMP_BYTES)[-MAX_ENTRIES:]
        members = {**_groups(data.get("pg_config")), **{k: tuple(v) for k, v in (groups or {}).items()}}
        records = _in_batches([_record(entry, members, once) for entry in entries])
        first = _number(entries[0].get("record_id", 0)) if entries else 0
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:MAX_TEXT]
        raise DumpError(f"expected `entries` of torch's flight recorder, got {reason}") from None
    return Dump(rank, records, is_whole=first == 0 and len(data["entries"]) <= MAX_ENTRIES)


def _in_batches(records: Sequence[CollectiveRecord]) -> tuple[CollectiveRecord, ...]:
    """Give the calls of a batch the state of the entry that ends it: torch follows that one only."""
    records_with_ends = list(records)
    for place, end in enumerate(records):
        if not end.operation.endswith("coalesced"):
            continue
        for at in range(place - 1, -1, -1):
            call = records[at]
            is_of_it = (call.group, call.is_point_to_point, call.number) == (
                end.group, end.is_point_to_point, end.number,
            )  # fmt: skip
            if not is_of_it or call.operation.endswith("coalesced"):
                break
            records_with_ends[at] = replace(call, started=end.started, completed=end.completed, batch=place)
    return tuple(records_with_ends)


def _groups(config: Any) -> dict[str, tuple[int, ...]]:
    groups = {}
    left = MAX_RANKS
    for name, group in (config or {}).items():
        ranks = group["ranks"]
        if isinstance(ranks, str):
            numbers = ranks.strip("[] ") if ranks.strip("[]0123456789, ") == "" else ""
            ranks = [word for word in numbers.split(",") if word.strip()]
        left -= len(ranks)
        if left < 0:
            raise ValueError(f"more than {MAX_RANKS} ranks in its groups")
        groups[_text(name)] = tuple(map(_number, ranks))
    return groups


# A pickle of a few bytes may hold one list a billion times: types and sizes come before any use.


def _text(value: Any) -> str:
    """Return a text or a plain number as a text of bounded length."""
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if value is None or isinstance(value, (int, float)):
        return str(value)
    raise TypeError(f"expected a text, got {type(value).__name__}")


def _number(value: Any) -> int:
    if isinstance(value, (int, float, str)):
        return int(value)
    raise TypeError(f"expected a number, got {type(value).__name__}")


class _Once:
    """Converts each object of a dump once, so that what one object takes is not multiplied."""

    def __init__(self) -> None:
        self._converted: dict[tuple[Any, int], Any] = {}

    def __call__(self, convert: Callable[..., T], value: Any, *more: Any) -> T:
        key = convert, id(value)
        if key not in self._converted:
            self._converted[key] = convert(value, *more)
        converted: T = self._converted[key]
        return converted


def _list(value: Any, most: int) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"expected a list, got {type(value).__name__}")
    return value[:most]


def _record(
    entry: Mapping[str, Any], members: Mapping[str, tuple[int, ...]], once: _Once
) -> CollectiveRecord:
    name, label = map(_text, _list(entry["process_group"], 3))
    backend, _, named = _text(entry["profiling_name"]).rpartition(":")
    operation, _, ends = named.partition(" ")
    ranks = members.get(name, ())
    is_paired = bool(entry.get("is_p2p")) or operation in {"send", "recv"}
    state = _text(entry["state"])
    frames = once(_frames, entry.get("frames") or ())
    stack = ThreadStack(0, frames)
    user = user_frame(stack) if frames else None
    return CollectiveRecord(
        group=name,
        ranks=ranks,
        number=_number(entry["p2p_seq_id" if is_paired else "collective_seq_id"]),
        operation=operation,
        inputs=once(_sizes, entry["input_sizes"], once),
        outputs=once(_sizes, entry["output_sizes"], once),
        dtypes=(_dtypes(entry.get("input_dtypes")), _dtypes(entry.get("output_dtypes"))),
        started=state == "started" or bool(entry.get("time_discovered_started_ns")),
        completed=state == "completed" or bool(entry.get("retired")),
        created_ns=_number(entry.get("time_created_ns") or 0),
        backend=backend,
        line=str(user) if user is not None else "",
        label=label,
        phase=_phase_of(stack),
        is_point_to_point=is_paired,
        peer=_peer(operation, ends, ranks),
    )


def _peer(operation: str, ends: str, ranks: Sequence[int]) -> int | None:
    """Return the other rank of ``send 0->1`` or ``recv 0<-1``, whose numbers are places in the group."""
    match = _ENDS.fullmatch(ends)
    if operation not in {"send", "recv"} or match is None:
        return None
    place = int(match[1])
    return ranks[place] if place < len(ranks) else place


def _phase_of(stack: ThreadStack) -> Phase | None:
    """Return the phase of a stack, which begins in the hooks of FSDP2 on a thread of the engine."""
    in_hook = any("fsdp/" in f.file and f.function in _BACKWARD_HOOKS for f in stack.frames)
    return Phase.BACKWARD if in_hook else phase_of(stack)


def _sizes(value: Any, once: _Once) -> Sizes:
    return tuple(once(_size, size) for size in _list(value, MAX_TENSORS))


def _size(value: Any) -> tuple[int, ...]:
    return tuple(map(_number, _list(value, MAX_DIMS)))


def _frames(value: Any) -> tuple[Frame, ...]:
    return tuple(
        Frame(_text(f["filename"]), _number(f["line"]), _text(f["name"])) for f in _list(value, MAX_FRAMES)
    )


def _dtypes(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, [value] if isinstance(value, str) else _list(value or (), MAX_TENSORS)))


# Files


_PickleReader: Any = pickle._Unpickler
_KEYED = {pickle.SETITEM[0]: -2, pickle.SETITEMS[0]: 0, pickle.DICT[0]: 0}
_SETS = (pickle.EMPTY_SET[0], pickle.ADDITEMS[0], pickle.FROZENSET[0])


def _refuse_set(_: Any) -> NoReturn:
    raise DumpError("refused: it holds a set; a dump holds only plain containers and numbers")


def _with_plain_keys(opcode: int, first: int) -> Callable[[Any], None]:
    """Return the reader of an opcode for keys that are texts or numbers: the hash of tuples may never end."""
    read = _PickleReader.dispatch[opcode]

    def checked(reader: Any) -> None:
        if not all(isinstance(key, (str, int)) for key in reader.stack[first::2]):
            raise DumpError("refused: a key is neither a text nor a number")
        read(reader)

    return checked


class _PlainUnpickler(_PickleReader):  # type: ignore[misc]
    """Reads containers, numbers and strings; a pickle that names any class or function is refused.

    The version in Python, since that in C reserves memory for an index that the file gives.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **_PickleReader.dispatch,
        **{opcode: _with_plain_keys(opcode, first) for opcode, first in _KEYED.items()},
        **dict.fromkeys(_SETS, _refuse_set),
    }

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
        reason = f"{type(error).__name__}: {error}"[:MAX_TEXT]
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
    paths: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        match = _RANK.search(path.name)
        if match is None or not path.is_file():
            continue
        rank = int(match[1])
        if rank in paths:
            raise DumpError(
                f"{directory}: {paths[rank].name} and {path.name} are both of rank {rank}; expected one file "
                "per rank. Move the dumps of one job into a directory of their own"
            )
        paths[rank] = path
    if not paths:
        raise DumpError(
            f"{directory}: no dump of the flight recorder; expected one file per rank whose name ends in the "
            "rank, such as nccl_trace_rank_0 (TORCH_NCCL_DEBUG_INFO_TEMP_FILE, TORCH_FR_DUMP_TEMP_FILE)"
        )
    return {rank: read_dump(path, rank) for rank, path in sorted(paths.items())}
