"""The server of live pages: reads and nothing else, on the loopback of this machine alone."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from backlight.report.encoding import script_json
from backlight.report.live.guard import Guard
from backlight.report.page import document

LOOPBACK = "127.0.0.1"

HOLD = 20.0
"""Seconds for which a question for news is held while there is none."""

BEAT = 0.05
"""Seconds between two looks at whether there is news."""

WITHOUT = (
    "This page follows a run with JavaScript, which is switched off here. "
    "<code>backlight report RUN</code> writes what there is as a file, "
    "<code>backlight top RUN</code> follows it in a terminal."
)


class Subject(Protocol):
    """What one live page shows: a run, or several over each other."""

    @property
    def name(self) -> str:
        """Return what the page is called."""

    @property
    def version(self) -> int:
        """Return a number that grows with every news."""

    def touch(self) -> None:
        """Hear that somebody looks."""

    def head(self) -> dict[str, Any]:
        """Return everything that the page shows beside the data of its panels."""

    def panel(
        self, name: str, *, have: str = "", column: str = "", between: tuple[int, int] | None = None
    ) -> tuple[str, str] | None:
        """Return a stamp of a panel and its content as JSON, or None where ``have`` is that stamp."""


class LiveServer:
    """Serves a page for each of ``subjects``, the first one first.

    Parameters
    ----------
    subjects:
        By the last part of their address.
    port:
        A port of this machine, 0 for any that is free.

    Raises
    ------
    OSError
        If the port is in use or may not be taken.
    """

    def __init__(self, subjects: dict[str, Subject], port: int = 0) -> None:
        self._subjects = subjects
        self._closing = False
        routes = [
            Route("/{place}/", self._first),
            Route("/{place}/{subject}/", self._page),
            Route("/{place}/{subject}/news", self._news),
            Route("/{place}/{subject}/panel/{name}", self._panel),
        ]
        inner = Starlette(
            routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1)]
        )
        self.guard = Guard(inner)
        self._socket = _bound(port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            self.guard,
            log_level="critical",  # a question that is cut off by Ctrl-C is no error
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            loop="asyncio",
            http="h11",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)

    @property
    def bound(self) -> tuple[str, int]:
        """Return the address and the port that it listens on."""
        host, port = self._socket.getsockname()
        return str(host), int(port)

    @property
    def address(self) -> str:
        """Return the address that lets a browser in."""
        return self.guard.entry(self.port)

    def run(self) -> None:
        """Serve until the terminal says stop, or :meth:`stop`."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.close()

    def stop(self) -> None:
        """Let :meth:`run` return."""
        self._closing = True
        self._server.should_exit = True

    def close(self) -> None:
        """Give the port back."""
        self.stop()
        self._socket.close()

    async def _first(self, request: Request) -> Response:
        return RedirectResponse(f"{request.url.path}{next(iter(self._subjects))}/", 303)

    async def _page(self, request: Request) -> Response:
        subject = self._subjects.get(request.path_params["subject"])
        if subject is None:
            return Response(status_code=404)
        subject.touch()
        chosen = request.path_params["subject"]
        views = [
            {"key": key, "name": each.name, "here": key == chosen} for key, each in self._subjects.items()
        ]
        content = {"live": {"views": views}, "run": {"name": subject.name}, "parameters": [], "attempts": []}
        text = document(content, subject.name, last="live.js", connect="'self'", without=WITHOUT)
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
        headers = {"content-security-policy": f"{policy[1]}; frame-ancestors 'none'"} if policy else {}
        return Response(text, media_type="text/html", headers=headers)

    async def _news(self, request: Request) -> Response:
        subject = self._subjects.get(request.path_params["subject"])
        if subject is None:
            return Response(status_code=404)
        after = _number(request.query_params.get("after"))
        until = time.monotonic() + HOLD
        subject.touch()
        while subject.version == after and time.monotonic() < until:
            if self._closing or self._server.should_exit or await request.is_disconnected():
                return Response(status_code=204)
            await asyncio.sleep(BEAT)
        if subject.version == after:
            return Response(status_code=204)
        told = await run_in_threadpool(subject.head)
        if told.get("table") == request.query_params.get("table", ""):
            told = {key: value for key, value in told.items() if key != "parameters"}
        return Response(await run_in_threadpool(script_json, told), media_type="application/json")

    async def _panel(self, request: Request) -> Response:
        subject = self._subjects.get(request.path_params["subject"])
        if subject is None:
            return Response(status_code=404)
        subject.touch()
        asked = request.query_params
        try:
            found = await run_in_threadpool(
                subject.panel,
                request.path_params["name"],
                have=asked.get("have", ""),
                column=asked.get("column", ""),
                between=_between(asked.get("from"), asked.get("to")),
            )
        except KeyError:
            return Response(status_code=404)
        if found is None:
            return Response(status_code=204)
        stamp, text = found
        return Response(text, media_type="application/json", headers={"x-stamp": stamp})


def _bound(port: int) -> socket.socket:
    """Return a socket at ``port`` of the loopback.

    Raises
    ------
    OSError
        If the port cannot be had; the message names the way out.
    """
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((LOOPBACK, port))
        taken.listen(128)  # a browser that comes before the server is up waits, and is not refused
    except OSError as error:
        taken.close()
        raise OSError(
            f"port {port} of {LOOPBACK} cannot be taken: {error.strerror or error}; "
            "give another one with --port, or leave it out for one that is free"
        ) from error
    return taken


def _between(first: str | None, last: str | None) -> tuple[int, int] | None:
    ends = _number(first), _number(last)
    return ends if 0 <= ends[0] <= ends[1] else None


def _number(text: str | None) -> int:
    try:
        return int(text or -1)
    except ValueError:
        return -1
