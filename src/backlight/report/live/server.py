"""The live page over HTTP: this machine only, one token per run, nothing but GET."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import socket
import time
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from backlight.report.page import document
from backlight.report.page_codec import script_json

if TYPE_CHECKING:
    from backlight.report.live.follower import FollowedRun, Several

COOKIE = "backlight"

HOSTS = frozenset({"127.0.0.1", "localhost"})
"""Names by which a browser may ask; another name that leads here is a rebound one."""

HEADERS = (
    (b"cache-control", b"no-store"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


class Guard:
    """Lets requests through to ``app`` below ``/<place>/`` and refuses all others.

    A browser enters with a token, once, and gets a cookie with another secret. ``place`` is the beginning of
    every path, which may be seen.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.place = secrets.token_hex(6)
        self._secret = secrets.token_urlsafe(32)
        self._tokens: set[str] = set()
        self._app = app

    def new_token(self) -> str:
        """Return a token that lets one browser in, once."""
        token = secrets.token_urlsafe(32)
        self._tokens.add(token)
        return token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on."""
        if scope["type"] != "http":
            return
        headers = {name: value for name, value in scope["headers"]}
        status, extra, body = self._judged(scope, headers)
        if status:
            await _answer(send, status, extra, body)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        await self._app(scope, receive, guarded)

    def _judged(
        self, scope: Scope, headers: dict[bytes, bytes]
    ) -> tuple[int, tuple[tuple[bytes, bytes], ...], bytes]:
        """Return status, headers and body with which a request is refused or sent on; 0 where it may pass."""
        if scope["method"] not in {"GET", "HEAD"}:
            return 405, ((b"allow", b"GET, HEAD"),), b""
        if _name(headers.get(b"host", b"")) not in HOSTS:
            return 421, (), b""
        if scope["path"] == "/":
            token_given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
            token = next((token for token in self._tokens if _are_equal(token_given, token)), None)
            if token is None:
                return _refused(headers)
            self._tokens.discard(token)
            place = f"/{self.place}/"
            cookie = f"{COOKIE}={self._secret}; Path={place}; HttpOnly; SameSite=Strict"
            # Not a redirection: a browser that comes from a file would not send a strict cookie with it.
            page = (
                '<!doctype html><link rel="icon" href="data:,"><title>backlight</title>'
                f'<meta http-equiv="refresh" content="0; url={place}">'
            )
            return 200, ((b"content-type", b"text/html"), (b"set-cookie", cookie.encode())), page.encode()
        if not scope["path"].startswith(f"/{self.place}/") or not _are_equal(_cookie(headers), self._secret):
            return _refused(headers)
        if headers.get(b"sec-fetch-site") == b"cross-site" and headers.get(b"sec-fetch-mode") != b"navigate":
            return 403, (), b""
        return 0, (), b""


USED_LINK = (
    '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><title>backlight</title>'
    '<body style="font: 16px/1.5 system-ui, sans-serif; max-width: 40em; margin: 15vh auto; padding: 0 1em">'
    "<h1>This link has been used</h1>"
    "<p>A link of <code>backlight open</code> works once and in one browser, so that no other user of this "
    "machine can read your run. The page is still open in the tab that used the link first.</p>"
    "<p>For a new link press Ctrl-C in the terminal of <code>backlight open</code> and start it again.</p>"
)
"""Page for a browser that brings no token that is still valid, and no cookie."""


def _refused(headers: dict[bytes, bytes]) -> tuple[int, tuple[tuple[bytes, bytes], ...], bytes]:
    """Return the answer to a request without access: an explanation where a person will read it."""
    if b"text/html" not in headers.get(b"accept", b""):
        return 403, (), b""
    return 403, ((b"content-type", b"text/html; charset=utf-8"),), USED_LINK.encode()


def _are_equal(candidate: str, secret: str) -> bool:
    return hmac.compare_digest(candidate.encode("utf-8", "surrogateescape"), secret.encode("ascii"))


def _name(host: bytes) -> str:
    """Return the name in a ``Host`` header, without the port: through a tunnel it may be any."""
    return host.decode("latin-1").rpartition(":")[0].lower() or host.decode("latin-1").lower()


def _cookie(headers: dict[bytes, bytes]) -> str:
    try:
        cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
    except CookieError:
        return ""
    return cookies[COOKIE].value if COOKIE in cookies else ""


async def _answer(send: Send, status: int, extra: tuple[tuple[bytes, bytes], ...], body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode()), *HEADERS, *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


MAX_CONNECTIONS = 48
"""Open connections; beyond them, the one that has waited longest for its request is closed."""

HEADER_TIMEOUT_S = 5.0
"""Time in which a connection has to send a whole request."""


class _BoundedProtocol(H11Protocol):
    """Closes connections that are too many or too slow to send a request."""

    _waiting: ClassVar[dict[_BoundedProtocol, asyncio.TimerHandle]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > MAX_CONNECTIONS:
            next(iter(self._waiting))._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_longer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_no_longer()
        elif self not in self._waiting:
            self._wait()

    def _wait(self) -> None:
        self._waiting[self] = self.loop.call_later(HEADER_TIMEOUT_S, self._refuse)

    def _wait_no_longer(self) -> None:
        timer = self._waiting.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _refuse(self) -> None:
        self._wait_no_longer()
        self.connections.discard(self)
        self.transport.abort()


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


class LiveServer:
    """Serves a page for each of ``subjects`` (by the last part of their address), the first one first.

    ``port`` is a port of this machine, 0 for any that is free. One that is in use is an ``OSError``.
    """

    def __init__(self, subjects: Mapping[str, FollowedRun | Several], port: int = 0) -> None:
        self._subjects = subjects
        self._closing = False
        routes = [
            Route("/{place}/", self._first),
            Route("/{place}/{subject}/", self._page),
            Route("/{place}/{subject}/news", self._news),
            Route("/{place}/{subject}/panel/{name}", self._panel),
        ]
        gzip = Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1)
        self.guard = Guard(Starlette(routes=routes, middleware=[gzip]))
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
            http=_BoundedProtocol,
            backlog=16,  # connections that are accepted at once, before any can be closed
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)

    def new_address(self) -> str:
        """Return an address that lets a browser in, once."""
        return f"http://{LOOPBACK}:{self.port}/?token={self.guard.new_token()}"

    def run(self) -> None:
        """Serve until the terminal says stop, or :meth:`stop`."""
        asyncio_log = logging.getLogger("asyncio")
        level = asyncio_log.level
        asyncio_log.setLevel(logging.CRITICAL)  # no traceback for each connection that is refused
        try:
            self._server.run(sockets=[self._socket])
        finally:
            asyncio_log.setLevel(level)
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
        views = [
            {"key": key, "name": each.name, "here": each is subject} for key, each in self._subjects.items()
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
        state = await run_in_threadpool(subject.head)
        if state.get("table") == request.query_params.get("table", ""):
            state = {key: value for key, value in state.items() if key != "parameters"}
        return Response(await run_in_threadpool(script_json, state), media_type="application/json")

    async def _panel(self, request: Request) -> Response:
        subject = self._subjects.get(request.path_params["subject"])
        if subject is None:
            return Response(status_code=404)
        subject.touch()
        asked = request.query_params
        try:
            content = await run_in_threadpool(
                subject.panel,
                request.path_params["name"],
                have=asked.get("have", ""),
                column=asked.get("column", ""),
                between=_between(asked.get("from"), asked.get("to")),
            )
        except KeyError:
            return Response(status_code=404)
        if content is None:
            return Response(status_code=204)
        stamp, text = content
        return Response(text, media_type="application/json", headers={"x-stamp": stamp})


def _bound(port: int) -> socket.socket:
    """Return a socket at ``port`` of the loopback, or raise an OSError that names the way out."""
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
