# SPDX-License-Identifier: Apache-2.0
"""How workers come together, and what they tell each other."""

import json
import os
import socket
import sys
import threading
import time
from typing import Any

import tensorflow as tf

from common.cluster import num_workers, tf_config, worker_index, workers
from common.command_line import UserError

HEARTBEAT_TIMEOUT = 15  # seconds without a sign of life after which a worker is given up


def join(communication: tf.distribute.experimental.CommunicationOptions) -> tf.distribute.Strategy:
    """Waits for all workers, and returns their strategy.

    Where a worker has not come within `JOIN_TIMEOUT` seconds (an environment variable; 300), the process ends with a
    message and status 2.

    Raises:
        UserError: when this worker's port is taken, or the others refuse it.
    """
    # TensorFlow has no public way to set the times.
    from tensorflow.python.distribute import collective_all_reduce_strategy as collective

    timeout = int(os.environ.get("JOIN_TIMEOUT") or 300)
    jobs = [
        collective.coordination_config_pb2.CoordinatedJob(name=job, num_tasks=len(addresses))
        for job, addresses in tf_config()["cluster"].items()
        if job in ("chief", "worker")
    ]
    collective.context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{jobs[0].name}/replica:0/task:0",
        cluster_register_timeout_in_ms=timeout * 1000,
        heartbeat_timeout_in_ms=HEARTBEAT_TIMEOUT * 1000,
        coordinated_jobs=jobs,
    )
    own = workers()[worker_index()]
    try:
        with _DeadlineFor(set(workers()) - {own}, timeout):
            return tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication)
    except tf.errors.OpError as error:
        why = f"is the port of {own} taken?" if "start gRPC server" in str(error) else str(error).splitlines()[0]
        raise UserError(f"this worker could not join the others at {', '.join(workers())}: {why}") from error


def exchange(strategy: tf.distribute.Strategy, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Gives every worker the facts of all, in the workers' order; all must call it at the same point.

    Args:
        strategy: of all workers.
        facts: what JSON can hold.

    Raises:
        UserError: with the first message that a worker gave as the fact `error`.
    """
    if num_workers() == 1:
        everyones = [facts]
    else:
        mine = tf.constant(list((json.dumps(facts) + "\n").encode()), tf.int32)
        per_replica = strategy.experimental_distribute_values_from_function(lambda _: mine)
        all_bytes = bytes(strategy.gather(per_replica, axis=0).numpy().astype("uint8"))
        lines = all_bytes.decode().splitlines()
        everyones = [json.loads(line) for line in lines[:: len(lines) // num_workers()]]
    for theirs in everyones:
        if theirs.get("error"):
            raise UserError(theirs["error"])
    return everyones


class _DeadlineFor:
    """Ends the process with a message where an address never answered in time: TensorFlow waits on, and names none."""

    def __init__(self, addresses: set[str], seconds: float):
        self.missing, self.seconds = addresses, seconds
        self.joined = threading.Event()

    def __enter__(self):
        threading.Thread(target=self._watch, daemon=True).start()

    def __exit__(self, *_):
        self.joined.set()

    def _watch(self):
        deadline = time.monotonic() + self.seconds
        while not self.joined.wait(0.5):
            self.missing = {address for address in self.missing if not _answers(address)}
            if self.missing and time.monotonic() > deadline:
                missing = ", ".join(sorted(self.missing))
                print(f"error: these workers have not come in {self.seconds:.0f} s: {missing}", file=sys.stderr)
                os._exit(2)  # the main thread is inside TensorFlow, and cannot be interrupted


def _answers(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True
