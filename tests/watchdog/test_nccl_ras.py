"""The RAS service of NCCL, on answers of the form that its documentation shows, served on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from backlight.watchdog.flight_recorder import parse_ras, read_ras

HEAD = """NCCL version 2.24.3 compiled with CUDA 12.5
CUDA runtime version 12050, driver version 12040

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH

"""
HEALTHY = f"{HEAD}Errors\n======\n\nWarnings\n========\n\n"
LATE = f"""{HEAD}Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  31 ranks have launched up to operation 6650
  1 ranks have launched up to operation 6649
  Rank 3 -- GPU 3 managed by process 483072 on node 127.0.0.1

"""
DEAD = f"""{HEAD}Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 127.0.0.1 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 job process

Warnings
========

"""


class Service(threading.Thread):
    """Answers one client after the other as the service does."""

    def __init__(self, answer: str, handshake: bytes = b"SERVER PROTOCOL 2\n") -> None:
        super().__init__(daemon=True)
        self.answer, self.handshake = answer, handshake
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.received: list[bytes] = []

    @property
    def environment(self) -> dict[str, str]:
        return {"NCCL_RAS_ADDR": f"127.0.0.1:{self.listener.getsockname()[1]}"}

    def run(self) -> None:
        with contextlib.suppress(OSError):  # no client came, or it has left
            self._answer()

    def _answer(self) -> None:
        connection, _ = self.listener.accept()
        with connection, connection.makefile("rb") as lines:
            for reply in (self.handshake, b"OK\n", self.answer.encode()):
                line = lines.readline()
                if not line:
                    return
                self.received.append(line)
                connection.sendall(reply)


@pytest.fixture
def serve() -> Iterator[object]:
    started: list[Service] = []

    def serve(answer: str, **options: bytes) -> Service:
        started.append(Service(answer, **options))
        started[-1].start()
        return started[-1]

    yield serve
    for service in started:
        with contextlib.suppress(OSError):
            service.listener.shutdown(socket.SHUT_RDWR)
        service.listener.close()
        service.join(10)


def test_rank_that_has_launched_fewer_operations(serve: type[Service]) -> None:
    service = serve(LATE)
    found = read_ras(service.environment)
    assert found is not None
    assert found.version == "2.24.3"
    (problem,) = found.problems
    assert (problem.communicator, problem.status) == ("0-0 (27a079b828ff1a75)", "MISMATCH")
    assert problem.ranks == (3,)
    assert "1 ranks have launched up to operation 6649" in problem.lines
    assert service.received == [b"CLIENT PROTOCOL 2\n", b"TIMEOUT 5\n", b"VERBOSE STATUS\n"]


def test_healthy_job_has_no_problem(serve: type[Service]) -> None:
    found = read_ras(serve(HEALTHY).environment)
    assert found is not None
    assert found.problems == ()


def test_dead_process_is_an_entry_of_its_own() -> None:
    found = parse_ras(DEAD)
    assert found is not None
    assert [problem.status for problem in found.problems] == ["", "INCOMPLETE"]
    assert found.problems[0].lines[0] == "DEAD"


def test_nothing_that_answers_otherwise_is_believed(serve: type[Service]) -> None:
    assert read_ras(serve(LATE, handshake=b"HTTP/1.1 400 Bad Request\n").environment) is None
    assert read_ras(serve("no status").environment) is None
    closed = serve(LATE)
    environment = closed.environment
    assert read_ras(environment | {"NCCL_RAS_ENABLE": "0"}) is None
    assert read_ras({"NCCL_RAS_ADDR": "127.0.0.1:1"}) is None
