"""Seeded mutations of bytes, JSON, databases and HDF5 files, from flipped bits to hostile values."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sqlite3
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from backlight.store.format.manifest import seal
from backlight.store.format.schema import ROWS, TABLES, checksum

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63 - 1, -(2**63), 10**30, 1e308, float("nan"), float("inf"), "", "x" * 9_999,
    "\x1b[2J\u202e", "../../etc/passwd", "\ud800", "1e999", [], {}, [[]], {"a": {"b": [None]}},
)  # fmt: skip
"""Values that no field expects."""


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return ``data`` with up to four changes: bits, bytes, numbers, blocks, or its length."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.choice((0, 1, 127, 128, 255))
            case 2:
                width = rng.choice((2, 4, 8))
                number = rng.choice((0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1)))
                out[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
            case 3:
                del out[at : at + rng.choice((1, 8, 512, len(out)))]
            case 4:
                start = rng.randrange(len(out) + 1)
                out[at:at] = out[start : start + rng.choice((1, 16, 4096))]
            case 5:
                out[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
            case _:
                size = rng.choice((8, 64, 1024))
                out[at : at + size] = bytes(min(size, max(len(out) - at, 0)))
    return bytes(out)


WORDS = (
    "-1", "0", "1e999", "nan", "true", '""', "'", '"x"', "[]", "[[1]]", "{}", "9" * 400, '"../../etc/passwd"',
    "(", "*", "null", ";", "--", "select", "x" * 300, "\x1b[2J",
)  # fmt: skip
"""Words that a text of settings, a plan or a statement may hold in the wrong place."""


def journal(victim: Path) -> bytes:
    """Return a rollback journal that names a file as its super-journal, which SQLite deletes."""
    name, magic = os.fsencode(victim), bytes.fromhex("d9d505f920a163d7")
    return b"\1" * 512 + b"\xff" * 4 + name + struct.pack(">II", len(name), sum(name)) + magic


def mutate_words(text: bytes, rng: random.Random) -> bytes:
    """Return a text with up to three words replaced, removed, repeated or swapped, or mutated bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(text, rng)
    words = re.findall(r"\w+|\s+|[^\w\s]", text.decode("utf-8"))
    for _ in range(rng.randint(1, 3)):
        at, other = rng.randrange(len(words)), rng.randrange(len(words))
        match rng.randrange(4):
            case 0:
                words[at] = rng.choice(WORDS)
            case 1 if len(words) > 1:
                del words[at]
            case 2:
                words[at] *= rng.choice((2, 1000))
            case _:
                words[at], words[other] = words[other], words[at]
    return "".join(words).encode()


def mutate_json(text: bytes, rng: random.Random) -> bytes:
    """Return a JSON document with one node replaced, removed or nested deeply, or with mutated bytes."""
    if rng.random() < 0.25:
        return mutate_bytes(text, rng)
    document = json.loads(text)
    nodes: list[tuple[Any, Any]] = []
    pending = [document]
    while pending:
        node = pending.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        nodes += [(node, key) for key in keys]
        pending += [node[key] for key in keys if isinstance(node[key], (dict, list))]
    node, key = rng.choice(nodes)
    match rng.randrange(5):
        case 0:
            del node[key]
        case 1:
            node[key] = "DEEP"
            depth = rng.choice((10, 900, 100_000))
            nested = "[" * depth + "]" * depth
            return json.dumps(document).replace('"DEEP"', nested, 1).encode()
        case 2 if isinstance(node, list):
            node += [node[key]] * 1000
        case _:
            node[key] = rng.choice(HOSTILE)
    return json.dumps(document).encode()


def mutate_document(path: Path, rng: random.Random, *, forge: bool = False) -> None:
    """Change a JSON file; ``forge``: with a checksum that fits, where it is still a document."""
    data = mutate_json(path.read_bytes(), rng)
    if forge:
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            document = json.loads(data)
            document.pop("crc", None)
            data = seal(json.dumps(document))
    path.write_bytes(data)


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    """Return ``data`` with one bit flipped, of a byte that holds something: most of a database is zeros."""
    out = bytearray(data)
    out[rng.choice([at for at, byte in enumerate(out) if byte])] ^= 1 << rng.randrange(8)
    return bytes(out)


def mutate_database(path: Path, rng: random.Random, *, forge: bool = False) -> None:
    """Change a bit or bytes of a SQLite file, or one value of it, or its schema.

    ``forge``: a value or the schema alone, with checksums that fit.
    """
    if not forge and rng.random() < 0.7:
        mutate = flip_bit if rng.random() < 0.5 else mutate_bytes
        path.write_bytes(mutate(path.read_bytes(), rng))
        return
    values = [
        value for value in HOSTILE if not isinstance(value, (list, dict)) and value not in (10**30, "\ud800")
    ]
    values += [b"", b"\xff" * 64, mutate_json(b'{"a": [1, 2, {"b": null}]}', rng).decode("utf-8", "replace")]
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        tables = [
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        table = rng.choice(tables)
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        with contextlib.suppress(sqlite3.Error):  # a constraint of the table
            match rng.randrange(6):
                case 0:
                    connection.execute(f"DROP TABLE {table}")
                case 1:
                    connection.execute(f"DELETE FROM {table} WHERE rowid % 2 = 0")
                case 2:
                    connection.execute(f"ALTER TABLE {table} ADD COLUMN more TEXT")
                case _:
                    where = (
                        "" if rng.random() < 0.3 else " WHERE rowid = (SELECT max(rowid) FROM " + table + ")"
                    )
                    change = f"UPDATE {table} SET {rng.choice(columns)} = ?{where}"
                    connection.execute(change, (rng.choice(values),))
        if forge:
            set_checksums(connection)


def set_checksums(connection: sqlite3.Connection) -> None:
    """Give the rows the checksums that fit, where they can have any."""
    real = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
    for table in ROWS:
        if real.get(table) != TABLES[table]:
            continue
        with contextlib.suppress(sqlite3.Error):  # the table is damaged
            for row in connection.execute(f"SELECT * FROM {table}").fetchall():
                with contextlib.suppress(struct.error, AttributeError, TypeError):  # types of no valid row
                    crc = checksum(table, row[:-1])
                    connection.execute(f"UPDATE {table} SET crc = ? WHERE rowid = ?", (crc, row[0]))


def mutate_hdf5(path: Path, rng: random.Random) -> None:
    """Change bytes of an HDF5 file, or one attribute, dataset or link of it."""
    if rng.random() < 0.6:
        path.write_bytes(mutate_bytes(path.read_bytes(), rng))
        return
    with h5py.File(path, "a") as file:
        group = file[rng.choice(list(file))]
        match rng.randrange(5):
            case 0:
                group.attrs[rng.choice(list(group.attrs))] = rng.choice((7, -1.5, "x", b"\xff", "[" * 5000))
            case 1:
                del group.attrs[rng.choice(list(group.attrs))]
            case 2:
                del group["values"]
                zeros = np.zeros((len(group["steps"]), rng.choice((10, 10**6))), np.float32)
                group.create_dataset("values", data=zeros, compression="gzip", chunks=True)
            case 3:
                del group["values"]
                group["values"] = h5py.SoftLink(rng.choice(("/", "/a0", "/nothing")))
            case _:
                del group["steps"]
                group.create_dataset("steps", data=rng.choice(([], [1.5], ["a"], [2**62], [[0]])))
