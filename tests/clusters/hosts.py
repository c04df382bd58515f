"""Simulated cluster hosts: kernel namespaces with their own network, host name and processes.

A network is two namespaces joined by a pair of virtual interfaces. What runs on a host sees another host
name and only its own processes, so that a run directory looks to it as one that other machines share.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TOOLS = ("ip", "unshare", "mount")


@dataclass(frozen=True)
class Host:
    """One simulated host."""

    name: str
    address: str
    namespace: str
    interface: str
    folder: Path
    own: Path | None

    def command(self, line: list[str]) -> list[str]:
        """Return a command that runs ``line`` on this host; its processes end with the first one."""
        script = (
            f"hostname {self.name} && mount --bind {shlex.quote(str(self.folder / 'hosts'))} /etc/hosts"
            f" && export GLOO_SOCKET_IFNAME={self.interface}"
        )
        if self.own is not None:
            mine = self.storage(self.own)
            script += f" && mount --bind {shlex.quote(str(mine))} {shlex.quote(str(self.own))}"
        script += f" && exec {shlex.join(line)}"
        inside = ["unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        return ["ip", "netns", "exec", self.namespace, *inside, "sh", "-c", script]

    def storage(self, own: Path) -> Path:
        """Return the directory that is mounted at ``own`` on this host only."""
        return own.with_name(f"{own.name}-{self.name}")


def refusal() -> str:
    """Return why simulated hosts are not available, or an empty string."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces need Linux and root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not on the path"
    name = f"bl{os.getpid()}x"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces are not allowed here"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@contextlib.contextmanager
def pair(folder: Path, own: Path | None = None) -> Iterator[tuple[Host, Host]]:
    """Yield two connected hosts, and remove their network afterwards.

    They share all files, but what is below ``own``: there each has a folder of its own.
    """
    tag = f"{os.getpid() % 100000}"
    hosts = [
        Host(f"node{i}", f"10.77.{os.getpid() % 250}.{i + 1}", f"bl{tag}n{i}", f"bl{tag}v{i}", folder, own)
        for i in range(2)
    ]
    for host in hosts if own is not None else ():
        assert own is not None
        own.mkdir(exist_ok=True)
        host.storage(own).mkdir()
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        first, second = hosts
        peer = ["type", "veth", "peer", "name", second.interface, "netns", second.namespace]
        _ip("link", "add", first.interface, "netns", first.namespace, *peer)
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
