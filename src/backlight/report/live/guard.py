"""Who may see a live page: whoever has the token, on this machine, by reading alone.

The address that the command prints carries the token once. It is answered with a cookie and sent on to an
address without it, so that neither the address bar nor a history nor a referrer holds it. The cookie is
bound to a path that only this page has: cookies are shared by all ports of a host, and another server on
this machine must not be sent it. Whatever is not allowed gets a status and nothing else.
"""

from __future__ import annotations

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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

    ``token`` is the secret; ``place`` is the beginning of every path, which may be seen.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.token = secrets.token_urlsafe(32)
        self.place = secrets.token_hex(6)
        self._app = app

    def entry(self, port: int) -> str:
        """Return the address that lets a browser in."""
        return f"http://127.0.0.1:{port}/?token={self.token}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on."""
        if scope["type"] != "http":
            return
        headers = {name: value for name, value in scope["headers"]}
        status, extra = self._judged(scope, headers)
        if status:
            await _answer(send, status, extra)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        await self._app(scope, receive, guarded)

    def _judged(
        self, scope: Scope, headers: dict[bytes, bytes]
    ) -> tuple[int, tuple[tuple[bytes, bytes], ...]]:
        """Return the status with which a request is refused or sent on, 0 where it may pass."""
        if scope["method"] not in {"GET", "HEAD"}:
            return 405, ((b"allow", b"GET, HEAD"),)
        if _name(headers.get(b"host", b"")) not in HOSTS:
            return 421, ()
        if scope["path"] == "/":
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
            if not self._known(given):
                return 403, ()
            place = f"/{self.place}/"
            cookie = f"{COOKIE}={self.token}; Path={place}; HttpOnly; SameSite=Lax"
            return 303, ((b"location", place.encode()), (b"set-cookie", cookie.encode()))
        if not scope["path"].startswith(f"/{self.place}/") or not self._known(_cookie(headers)):
            return 403, ()
        if headers.get(b"sec-fetch-site") == b"cross-site" and headers.get(b"sec-fetch-mode") != b"navigate":
            return 403, ()
        return 0, ()

    def _known(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.token.encode("ascii"))


def _name(host: bytes) -> str:
    """Return the name in a ``Host`` header, without the port: through a tunnel it may be any."""
    return host.decode("latin-1").rpartition(":")[0].lower() or host.decode("latin-1").lower()


def _cookie(headers: dict[bytes, bytes]) -> str:
    try:
        cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
    except CookieError:
        return ""
    return cookies[COOKIE].value if COOKIE in cookies else ""


async def _answer(send: Send, status: int, extra: tuple[tuple[bytes, bytes], ...]) -> None:
    headers = [(b"content-length", b"0"), *HEADERS, *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
