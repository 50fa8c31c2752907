# SPDX-License-Identifier: Apache-2.0
"""Two hosts with a cable between them, on this machine: network namespaces, which `ip` makes for root."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NOBODY = "02:00:00:00:00:00"  # a hardware address that no host has


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """The names of two hosts, which reach each other at `ADDRESSES` and nothing else; gone after the block.

    Raises:
        PermissionError: where they cannot be made.
    """
    hosts = [f"host{i}-{os.getpid()}" for i in range(2)]
    with contextlib.ExitStack() as after:
        try:
            for host in hosts:
                _ip("netns", "add", host)
                after.callback(_ip, "netns", "delete", host)
            _ip("link", "add", "cable", "netns", hosts[0], "type", "veth", "peer", "name", "cable", "netns", hosts[1])
            for host, address in zip(hosts, ADDRESSES, strict=True):
                _ip("-netns", host, "address", "add", f"{address}/24", "dev", "cable")
                for interface in ("lo", "cable"):
                    _ip("-netns", host, "link", "set", interface, "up")
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", error)
            raise PermissionError(f"needs `ip`, and leave to make network namespaces: {why}") from error
        yield hosts


def on(host: str, *command: str) -> list[str]:
    """The words that run a command on a host."""
    return ["ip", "netns", "exec", host, *command]


def cut(hosts: list[str]) -> None:
    """Loses all that is sent from now on; no host is told."""
    # Not by a queue that drops packets: not every kernel has one.
    for host, other in zip(hosts, reversed(ADDRESSES), strict=True):
        _ip("-netns", host, "neighbour", "replace", other, "lladdr", NOBODY, "dev", "cable", "nud", "permanent")


def mend(hosts: list[str]) -> None:
    """Undoes `cut`."""
    for host in hosts:
        _ip("-netns", host, "neighbour", "flush", "dev", "cable", "nud", "permanent")


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
