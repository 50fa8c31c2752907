# SPDX-License-Identifier: Apache-2.0
"""How workers join, and exchange facts."""

import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_replicas import cluster, waiting
from keras_replicas.errors import UserError
from keras_replicas.waiting import ADVICE, current_call

HEARTBEAT_TIMEOUT = 15  # seconds without a heartbeat after which a worker is declared lost
BOTH_IPS: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
log = logging.getLogger("keras_replicas")
_exchanges = itertools.count()


def join(communication: tf.distribute.experimental.CommunicationOptions) -> tf.distribute.Strategy:
    """Waits for all workers, and returns their strategy.

    If all have loopback addresses, only connections from this machine are accepted.

    Raises:
        UserError: when a worker has not joined within `join_timeout` seconds, or this one's port is in use.
    """
    # TensorFlow has no public way to set the timeouts.
    from keras_replicas.private import collective_all_reduce_strategy as collective

    timeout = cluster.join_timeout()
    jobs = [
        collective.coordination_config_pb2.CoordinatedJob(name=job, num_tasks=len(addresses))
        for job, addresses in cluster.tf_config()["cluster"].items()
    ]
    collective.context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{jobs[0].name}/replica:0/task:0",
        cluster_register_timeout_in_ms=timeout * 1000,
        heartbeat_timeout_in_ms=HEARTBEAT_TIMEOUT * 1000,
        coordinated_jobs=jobs,
    )
    _meet(timeout)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication)
    signal.signal(signal.SIGTERM, on_sigterm)  # TensorFlow has replaced the handler
    waiting.wait_timeout()  # raises if it is no number
    waiting.watch_other_workers()
    if cluster.all_on_this_machine():
        close_to_other_machines(cluster.host_and_port(cluster.workers()[cluster.worker_index()])[1])
    return strategy


def exchange(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Waits until all workers have called it, and returns everyone's facts, by rank.

    For what all must know or agree on, such as a choice by the chief: `exchange({"seed": seed})[0]["seed"]`. All
    workers call it equally often, after `make_strategy`. A single process gets its own facts.

    Args:
        facts: what JSON can hold. The fact `error`, if it is not empty, is raised on all workers, the first by rank: so
            that none waits for one that has refused its input.

    Raises:
        UserError: with that message.
    """
    everyones = [facts]
    if cluster.num_workers() > 1:
        from keras_replicas.private import eager_context

        key, store, call = f"exchange/{next(_exchanges)}", eager_context(), current_call()
        store.set_config_key_value(f"{key}/{cluster.worker_index()}", json.dumps([call, facts]))
        found = [_posted(store, f"{key}/{index}", index, call) for index in range(cluster.num_workers())]
        for index, (others_call, _) in enumerate(found):
            if others_call != call:
                raise UserError(
                    f"worker {index} is in {others_call or 'no call'}, and worker {cluster.worker_index()} in "
                    f"{call or 'no call'}. {ADVICE}"
                )
        everyones = [theirs for _, theirs in found]
    for theirs in everyones:
        if theirs.get("error"):
            raise UserError(theirs["error"])
    return everyones


def _posted(store: Any, key: str, index: int, call: str) -> list[Any]:
    """What another worker has posted, in what call. It tells for whom it waits.

    Raises:
        UserError: when that worker posts nothing within `WAIT_TIMEOUT` seconds.
    """
    timeout = waiting.wait_timeout()
    deadline = time.monotonic() + timeout
    wait_for = min(waiting.SECONDS_BEFORE_WORD, timeout)
    has_told = False
    while True:
        try:
            return json.loads(store.get_config_key_value(key, wait_for * 1000))
        except tf.errors.DeadlineExceededError:
            what = f"worker {cluster.worker_index()} waits in {call or 'exchange'} for worker {index}"
            if time.monotonic() >= deadline:
                raise UserError(f"{what}, which did not come within {timeout} s. {ADVICE}") from None
            if not has_told:
                log.warning("%s, which is not there. %s", what, ADVICE)
            has_told = True


def agree(facts: dict[str, Any], difference: str) -> None:
    """Waits for all workers, and checks that each has the chief's facts.

    Args:
        facts: what JSON can hold, by name.
        difference: what a worker has done whose facts are others, such as "was started differently from the chief".

    Raises:
        UserError: on all workers, naming the first that differs, the `difference`, and both values of each fact that
            differs.
    """
    chiefs, *others = exchange(facts)
    for index, theirs in enumerate(others, 1):
        names = [name for name in chiefs | theirs if theirs.get(name) != chiefs.get(name)]
        if names:
            facts_of_both = ", ".join(f"{name} {theirs.get(name)!r}, not {chiefs.get(name)!r}" for name in names)
            raise UserError(f"worker {index} {difference}: {facts_of_both}")


def _meet(seconds: float) -> None:
    """Waits for all workers, each listening at its address: TensorFlow itself would wait silently."""
    address, missing = cluster.workers()[cluster.worker_index()], set(cluster.workers())
    host, port = cluster.host_and_port(address)
    try:
        if cluster.all_on_this_machine():
            family, *_, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(found[:2], family=family)
        else:
            listening = socket.create_server(("", port), **BOTH_IPS)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise UserError(f"this worker cannot listen at {address} ({why}). Give another port") from error
    greeter = threading.Thread(target=_greet, args=(listening,), daemon=True)
    greeter.start()
    deadline = time.monotonic() + seconds
    while missing := {each for each in missing if not _answers(each)}:
        if time.monotonic() > deadline:
            raise UserError(f"these workers have not joined within {seconds:.0f} s: {', '.join(sorted(missing))}")
        time.sleep(0.2)
    listening.shutdown(socket.SHUT_RDWR)  # ends the greeter, and frees the port for TensorFlow
    greeter.join()
    listening.close()


def _greet(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            with listening.accept()[0] as caller:
                caller.sendall(b"here")


def _answers(address: str) -> bool:
    try:
        with socket.create_connection(cluster.host_and_port(address), timeout=1) as connection:
            return bool(connection.recv(1))  # gRPC also sends first; a hung process does not, but its machine accepts
    except OSError:
        return False


def close_to_other_machines(port: int) -> None:
    """Restricts TensorFlow's sockets that listen at a port to loopback: any client there can run code.

    Warns on standard error if it cannot.
    """
    closed, why = 0, "none of this process's sockets listens there"
    try:
        for listening in _listening_at(port):
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
            closed += 1
    except (OSError, AttributeError) as error:  # without permission; on systems other than Linux
        closed, why = 0, str(error)
    if not closed:
        danger = f"port {port} is open to other machines, and any client may run code ({why})"
        print(f"warning: {danger}. Block it with a firewall", file=sys.stderr, flush=True)


def _listening_at(port: int) -> Iterator[socket.socket]:
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.fromfd(number, socket.AF_INET6, socket.SOCK_STREAM) as ours:
            if ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and ours.getsockname()[1] == port:
                yield ours
