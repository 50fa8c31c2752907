# SPDX-License-Identifier: Apache-2.0
"""The workers that train together: which they are, how this one finds its place, and what they tell each other.

A worker is a process; its place is in `TF_CONFIG`, the environment variable that TensorFlow reads. Where that is not
set, it is made from what Slurm or Kubernetes set. Worker 0 is the chief, which writes the run's files.
"""

import json
import os
import socket
import sys
import threading
import time
from typing import Any

import tensorflow as tf

from common.command_line import UserError

JOIN_TIMEOUT = "JOIN_TIMEOUT"  # environment variable: seconds in which all workers must have come
HEARTBEAT_TIMEOUT = 15  # seconds without a sign of life after which a worker is given up
PORT = 8888  # of workers that a scheduler starts


def tf_config() -> dict[str, Any]:
    """What `TF_CONFIG` holds, made from the scheduler's variables where it is not set; empty for a process of its own.

    https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable

    - Slurm: `srun` with more than one task; TensorFlow's `SlurmClusterResolver` reads its variables.
    - Kubernetes, an indexed Job: `JOB_COMPLETION_INDEX`, which Kubernetes sets, and `JOB_NAME`, `JOB_SERVICE` (the
      headless service) and `JOB_WORKERS`, which the manifest sets.

    Raises:
        UserError: when a variable is malformed.
    """
    if "TF_CONFIG" not in os.environ:
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            os.environ["TF_CONFIG"] = json.dumps(_from_slurm())
        elif "JOB_COMPLETION_INDEX" in os.environ and "JOB_SERVICE" in os.environ:
            os.environ["TF_CONFIG"] = json.dumps(_from_kubernetes())
    try:
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
        if config:
            own = config["cluster"][config["task"]["type"]][config["task"]["index"]]
            if not all(":" in address for job in config["cluster"].values() for address in [own, *job]):
                raise ValueError("an address is not host:port")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"TF_CONFIG is malformed ({type(error).__name__}: {error}). It must be like "
            '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        ) from error
    return config


def worker_config(addresses: list[str], index: int) -> dict[str, Any]:
    """The `TF_CONFIG` of worker `index` among those at the addresses `host:port`."""
    return {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}


def workers() -> list[str]:
    """Addresses of all workers, the chief's first; empty for a process of its own."""
    cluster = tf_config().get("cluster", {})
    return [*cluster.get("chief", []), *cluster.get("worker", [])]


def num_workers() -> int:
    """Worker processes that train together; 1 for a process of its own."""
    return len(workers()) or 1


def worker_index() -> int:
    """This worker's place; 0 is the chief."""
    config = tf_config()
    if not config:
        return 0
    behind_chief = config["task"]["type"] == "worker" and "chief" in config["cluster"]
    return config["task"]["index"] + behind_chief


def is_chief() -> bool:
    """Whether this process is the one that writes the run's files."""
    return worker_index() == 0


def join(communication: tf.distribute.experimental.CommunicationOptions) -> tf.distribute.Strategy:
    """Waits for all workers, and returns their strategy.

    Where a worker has not come within `JOIN_TIMEOUT` seconds (300), the process ends with a message and status 2.

    Raises:
        UserError: when this worker's port is taken, or the others refuse it.
    """
    # TensorFlow has no public way to set the times.
    from tensorflow.python.distribute import collective_all_reduce_strategy as collective

    timeout = int(os.environ.get(JOIN_TIMEOUT) or 300)
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


def _from_slurm() -> dict[str, Any]:
    # It would ask nvidia-smi for GPUs, and fails without one; which GPUs a task sees is Slurm's own business.
    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
        port_base=PORT, gpus_per_node=2**10, gpus_per_task=1, auto_set_gpu=False
    )
    addresses = resolver.cluster_spec().as_dict()["worker"]
    return worker_config(addresses, resolver.get_task_info()[1])


def _from_kubernetes() -> dict[str, Any]:
    try:
        name, service = os.environ["JOB_NAME"], os.environ["JOB_SERVICE"]
        addresses = [f"{name}-{i}.{service}:{PORT}" for i in range(int(os.environ["JOB_WORKERS"]))]
        return worker_config(addresses, int(os.environ["JOB_COMPLETION_INDEX"]))
    except (KeyError, ValueError) as error:
        raise UserError(f"JOB_NAME, JOB_SERVICE and JOB_WORKERS must be set in the Job's manifest ({error})") from error


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
