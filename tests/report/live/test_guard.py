"""Which requests the live page answers, and which get only a status."""

from __future__ import annotations

import json
import re
import socket
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

import httpx
import pytest

from backlight.analysis.live import open_browser
from backlight.report.live import server as server_module
from backlight.report.live.server import COOKIE, LiveServer


class Subject:
    """Subject of a live page without a run."""

    name = "</title><script>alert(1)</script>"
    version = 4
    touched = 0

    def touch(self) -> None:
        self.touched += 1

    def head(self) -> dict[str, Any]:
        return {"news": 4, "parameters": ["much"], "table": "t"}

    def panel(self, name: str, *, have: str = "", **options: Any) -> tuple[str, str] | None:
        return None if have == "stamp" else ("stamp", json.dumps({"name": {"loss": "loss"}[name]}))


@contextmanager
def serving(live: LiveServer) -> Iterator[LiveServer]:
    thread = threading.Thread(target=live.run)
    thread.start()
    try:
        yield live
    finally:
        live.stop()
        thread.join(timeout=20)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(LiveServer({"run-0": Subject(), "run-1": Subject()})) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client:
        yield client


def log_in(client: httpx.Client, server: LiveServer) -> str:
    answer = client.get(server.new_address())
    assert answer.status_code == 200
    return re.search(r"url=(/[0-9a-f]{12}/)\"", answer.text)[1]  # type: ignore[index]


def test_token_is_exchanged_for_a_cookie_once(client: httpx.Client, server: LiveServer) -> None:
    address = server.new_address()
    root = log_in(client, server)
    client.cookies.clear()
    answer = client.get(address)
    token = address.partition("=")[2]
    assert token not in answer.text + str(answer.headers)
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", f"Path={root}"} <= set(cookie.split("; "))
    assert token not in cookie
    again = httpx.get(address, trust_env=False, headers={"accept": "text/html,*/*;q=0.8"})
    assert again.status_code == 403
    assert "works once" in again.text
    assert "run-0" not in again.text
    assert client.get(root).headers["location"] == f"{root}run-0/"
    page = client.get(f"{root}run-0/")
    assert page.status_code == 200
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["cache-control"] == "no-store"
    assert token not in page.text


@pytest.mark.parametrize(
    "path", ["/", "/?token=", "/?token=wrong", "/?token=%00%ff", "/favicon.ico", "/x/run-0/"]
)
def test_missing_token_is_forbidden(client: httpx.Client, server: LiveServer, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.content) == (403, b"")
    root = log_in(client, server)
    client.cookies.clear()
    for below in ("", "run-0/", "run-0/news", "run-0/panel/loss"):
        for headers in ({}, {"cookie": f"{COOKIE}=wrong; {COOKIE}"}):
            answer = client.get(root + below, headers=headers)
            assert (answer.status_code, answer.content) == (403, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
def test_only_get_and_head_are_allowed(client: httpx.Client, server: LiveServer, method: str) -> None:
    root = log_in(client, server)
    for path in (f"/?token={server.guard.new_token()}", f"{root}run-0/", f"{root}run-0/panel/loss"):
        answer = client.request(method, path)
        assert (answer.status_code, answer.content) == (405, b"")
        assert answer.headers["allow"] == "GET, HEAD"
    assert client.head(f"{root}run-0/").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1]:80"]
)
def test_foreign_host_header_is_rejected(client: httpx.Client, server: LiveServer, host: str) -> None:
    root = log_in(client, server)
    for path in (f"/?token={server.guard.new_token()}", f"{root}run-0/"):
        answer = client.get(path, headers={"host": host})
        assert (answer.status_code, answer.content) == (421, b"")


@pytest.mark.parametrize("host", ["localhost:9000", "LOCALHOST", "127.0.0.1:80", "127.0.0.1"])
def test_local_host_names_are_accepted(client: httpx.Client, server: LiveServer, host: str) -> None:
    root = log_in(client, server)
    assert client.get(f"{root}run-0/", headers={"host": host}).status_code == 200


def test_cross_site_request_is_rejected(client: httpx.Client, server: LiveServer) -> None:
    root = log_in(client, server)
    foreign = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    answer = client.get(f"{root}run-0/panel/loss", headers=foreign)
    assert (answer.status_code, answer.content) == (403, b"")
    page = client.get(f"{root}run-0/")
    assert page.headers["x-frame-options"] == "DENY"
    assert page.headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in page.headers


def test_policy_allows_only_the_own_server(client: httpx.Client, server: LiveServer) -> None:
    page = client.get(f"{log_in(client, server)}run-0/")
    policy = dict(part.split(maxsplit=1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert all(word.startswith("'sha256-") for word in policy["script-src"].split())
    assert not re.findall(r'(?:src|href|action)="(?!#)[^"]*"', page.text.split("<script>")[0])
    assert "<script>alert(1)" not in page.text
    assert "backlight report RUN" in re.search(r"<noscript>(.*?)</noscript>", page.text)[1]  # type: ignore[index]


def test_panel_and_news_responses(client: httpx.Client, server: LiveServer) -> None:
    root = log_in(client, server)
    answer = client.get(f"{root}run-0/panel/loss")
    assert (answer.json(), answer.headers["x-stamp"]) == ({"name": "loss"}, "stamp")
    assert client.get(f"{root}run-0/panel/loss?have=stamp").status_code == 204
    assert client.get(f"{root}run-0/panel/nothing").status_code == 404
    assert client.get(f"{root}run-7/").status_code == 404
    assert client.get(f"{root}run-0/news?after=3").json() == {"news": 4, "parameters": ["much"], "table": "t"}
    assert "parameters" not in client.get(f"{root}run-0/news?after=x&table=t").json()


def test_port_in_use_error_names_the_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError, match=rf"port {port} of 127.0.0.1 .* in use; give another one with --port"
        ):
            LiveServer({"run-0": Subject()}, port)


def test_early_connection_waits() -> None:
    live = LiveServer({"run-0": Subject()})
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as early, serving(live):
        early.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert early.recv(64).startswith(b"HTTP/1.1 403")


def test_server_listens_on_loopback_only(server: LiveServer) -> None:
    assert server.new_address().startswith(f"http://127.0.0.1:{server.port}/?token=")
    assert server._socket.getsockname() == ("127.0.0.1", server.port)


@pytest.mark.slow
def test_half_open_connections_do_not_stop_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections than descriptors, none of which sends a whole request."""
    monkeypatch.setattr(server_module, "HEADER_TIMEOUT_S", 1.0)
    before = {id(task) for task in threading.enumerate()}
    with serving(LiveServer({"run-0": Subject()})) as live:
        opened = []
        try:
            for number in range(4 * server_module.MAX_CONNECTIONS):
                connection = socket.create_connection(("127.0.0.1", live.port), timeout=20)
                opened.append(connection)
                with suppress(OSError):
                    connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n"[: number % 30])
            with httpx.Client(
                base_url=f"http://127.0.0.1:{live.port}", trust_env=False, timeout=20
            ) as client:
                assert client.get(f"{log_in(client, live)}run-0/").status_code == 200
            assert len(live._server.server_state.connections) <= server_module.MAX_CONNECTIONS
            for connection in opened:  # each is closed by the server, the last ones by the timeout
                with suppress(ConnectionError):
                    assert connection.recv(1) == b""
        finally:
            for connection in opened:
                connection.close()
    # Those of other servers of this file come and go.
    left = [task for task in threading.enumerate() if id(task) not in before]
    assert [task.name for task in left if not task.name.startswith("AnyIO worker")] == []


def test_browser_gets_its_address_from_a_private_file(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(webbrowser, "open", given.append)
    with open_browser("http://127.0.0.1:1/?token=secret"):
        (address,) = given
        page = Path(url2pathname(address.removeprefix("file://")))
        assert "secret" not in address
        assert "url=http://127.0.0.1:1/?token=secret" in page.read_text()
        assert [p.stat().st_mode & 0o077 for p in (page, page.parent)] == [0, 0]
    assert not page.parent.exists()
