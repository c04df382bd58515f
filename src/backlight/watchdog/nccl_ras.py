"""State of communicators as the RAS service of NCCL (2.24 and later) reports it. No torch.

The service listens on ``localhost:28028``, or on ``NCCL_RAS_ADDR``. It answers in lines of text: a handshake,
and a status with the sections `Errors` and `Warnings`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from backlight import clock

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
_RANK = re.compile(r"^Rank (\d+)\b")


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
    found: list[Problem] = []
    for line in filter(None, map(str.strip, section.splitlines())):
        begin = _PROBLEM.match(line)
        if begin is not None:
            found.append(Problem(f"{begin[1]} ({begin[2]})", begin[3], ()))
            continue
        if not found:
            found.append(Problem("", "", ()))
        last = found[-1]
        rank = _RANK.match(line)
        ranks = (*last.ranks, int(rank[1])) if rank is not None else last.ranks
        found[-1] = Problem(last.communicator, last.status, (*last.lines, line), ranks)
    return found
