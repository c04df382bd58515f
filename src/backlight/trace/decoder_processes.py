"""Processes that decode chunks of a trace.

They are started as programs of their own rather than through :mod:`multiprocessing`, which would run the
user's script again where it has no ``__main__`` guard. The data in the pipes is pickled; none of it reaches
a file.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import IO, Any, Self, cast

import msgspec
import numpy as np

from backlight.trace.decoder import Columns
from backlight.trace.events import COLUMNS, Column

_LENGTH = 8


class WorkersError(Exception):
    """A chunk could not be decoded in another process; the reader continues alone and finds the reason."""


class Workers:
    """A few decoding processes, each with its own vocabularies; a chunk goes to the next free one."""

    def __init__(self, count: int) -> None:
        self.failure: WorkersError | None = None
        self._queue: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._slots = threading.Semaphore(2 * count)  # so that reading does not run far ahead
        self._parts: dict[int, tuple[int, dict[str, Column]]] = {}
        self._words: dict[int, dict[str, list[str]]] = {}
        self._submitted = 0
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # any error there shows when this process reads alone
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            for _ in range(count)
        ]
        self._threads = [
            threading.Thread(target=self._feed, args=(number, process), daemon=True)
            for number, process in enumerate(self._processes)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for _ in self._threads:
            self._queue.put(None)
        if exception[0] is not None:
            for process in self._processes:
                process.kill()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.wait()

    def submit(self, text: bytes) -> None:
        """Queue an array of events for decoding."""
        self._slots.acquire()
        self._queue.put((self._submitted, text))
        self._submitted += 1

    def join(
        self, last: dict[str, Column], words: dict[str, list[str]]
    ) -> tuple[Iterator[dict[str, Column]], dict[str, list[str]]]:
        """Wait for all chunks; return them in order, followed by ``last``, in common codes."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        if self.failure:
            raise WorkersError(str(self.failure))
        known: dict[str, dict[str, int]] = {name: {} for name in words}
        maps = {number: _mapped(other, known) for number, other in sorted(self._words.items())}
        own = _mapped(words, known)

        def in_order() -> Iterator[dict[str, Column]]:
            for index in range(self._submitted):
                number, part = self._parts.pop(index)
                yield _recoded(part, maps[number])
            yield _recoded(last, own)

        return in_order(), {name: list(codes) for name, codes in known.items()}

    def _feed(self, number: int, process: subprocess.Popen[bytes]) -> None:
        pipe, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        try:
            while (job := self._queue.get()) is not None:
                index, text = job
                if self.failure is None:
                    _send(pipe, text)
                    self._parts[index] = (number, self._answer(answers))
                self._slots.release()
            if self.failure is None:
                _send(pipe, b"")
                self._words[number] = self._answer(answers)
        except (OSError, EOFError, WorkersError) as error:
            self.failure = (
                error
                if isinstance(error, WorkersError)
                else WorkersError(f"a decoding process ended ({error})")
            )
            while self._queue.get() is not None:
                self._slots.release()
            self._slots.release()
        finally:
            for end in (pipe, answers):
                with contextlib.suppress(OSError):  # its process has ended
                    end.close()

    @staticmethod
    def _answer(answers: IO[bytes]) -> Any:
        answer = pickle.loads(_receive(answers))
        if isinstance(answer, str):
            raise WorkersError(answer)
        return answer


def _mapped(other: dict[str, list[str]], known: dict[str, dict[str, int]]) -> dict[str, Column]:
    """Return, per coded column, the common code of each code; the last is for MISSING."""
    maps = {}
    for name, words in other.items():
        codes = known[name]
        to = [codes.setdefault(word, len(codes)) for word in words]
        maps[name] = np.array([*to, -1], dtype=COLUMNS[name].dtype)
    return maps


def _recoded(part: dict[str, Column], maps: dict[str, Column]) -> dict[str, Column]:
    for name, to in maps.items():
        if name in part:
            part[name] = to[part[name]]
    return part


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH, "little"))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    length = int.from_bytes(_exactly(pipe, _LENGTH), "little")
    return _exactly(pipe, length)


def _exactly(pipe: IO[bytes], length: int) -> bytes:
    data = pipe.read(length)
    if len(data) != length:
        raise EOFError("its pipe closed")
    return data


def serve() -> None:
    """Decode what comes through standard input until an empty chunk asks for the vocabularies."""
    columns = Columns()
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    while text := _receive(source):
        try:
            answer: Any = columns.of_text(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            answer = f"a chunk is not as usual ({error})"
        _send(answers, pickle.dumps(answer, protocol=5))
    _send(answers, pickle.dumps(columns.words(), protocol=5))
