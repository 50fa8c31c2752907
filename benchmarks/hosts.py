# SPDX-License-Identifier: Apache-2.0
"""Two hosts on this machine, with a cable between them: network namespaces, which root can make with `ip`."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

from keras_replicas import UserError

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NOBODY = "02:00:00:00:00:00"  # a hardware address that no host has


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """The names of two hosts, which reach each other at `ADDRESSES` and nothing else; gone after the block.

    Raises:
        UserError: when they cannot be made.
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
            raise UserError(f"needs `ip`, and leave to make network namespaces: {why}") from error
        yield hosts


def on(host: str, *command: str) -> list[str]:
    """The words of a command line that runs a command on a host."""
    return ["ip", "netns", "exec", host, *command]


def cut(hosts: list[str], only: int | None = None) -> None:
    """Loses everything that is sent from now on, by all or `only` one of the hosts, without telling them."""
    # Not with a queue that drops packets: not every kernel has one.
    for i, (host, other) in enumerate(zip(hosts, reversed(ADDRESSES), strict=True)):
        if only not in (None, i):
            continue
        _ip("-netns", host, "neighbour", "replace", other, "lladdr", NOBODY, "dev", "cable", "nud", "permanent")


def mend(hosts: list[str]) -> None:
    """Undoes `cut`."""
    for host in hosts:
        _ip("-netns", host, "neighbour", "flush", "dev", "cable", "nud", "permanent")


def shape(hosts: list[str], megabits: float | None) -> None:
    """Limits what each host sends from now on, in megabits per second, headers included; None for no limit.

    Raises:
        UserError: when the kernel cannot hold packets back.
    """
    for host in hosts:
        command = on(host, "tc", "qdisc", "replace", "dev", "cable", "root")
        # After a pause, a `burst` of 2 ms' worth goes at full speed. A queue that is too short would lose packets.
        burst = max(int(megabits * 1e6 / 8 * 0.002), 100_000) if megabits else 0
        command += (
            ["tbf", "rate", f"{megabits}mbit", "burst", f"{burst}", "latency", "400ms"] if megabits else ["pfifo"]
        )
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", error)
            raise UserError(f"needs `tc`, and a kernel with its tbf: {why}") from error


def bytes_sent(host: str) -> int:
    """Bytes that a host has sent over the cable, headers included."""
    words = on(host, "cat", "/sys/class/net/cable/statistics/tx_bytes")
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
