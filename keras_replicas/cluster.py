# SPDX-License-Identifier: Apache-2.0
"""Finds this process's rank among the workers that train together.

A worker is a process; its rank is in `TF_CONFIG`, the environment variable that TensorFlow reads. If that is not set,
it is made from the variables of Slurm or Kubernetes. Worker 0 is the chief, which writes the run's files.
"""

import ipaddress
import itertools
import json
import os
import re
import socket
from collections.abc import Iterator
from typing import Any

from keras_replicas.errors import UserError

LAUNCH_ID = "LAUNCH_ID"  # environment variable by which a launcher identifies what it starts, and starts again
PORT = 8888  # of workers started by a scheduler
JOBS = ("chief", "worker")  # in the order of their ranks
MOST = 999_999  # of a number of workers or seconds


def tf_config() -> dict[str, Any]:
    """The content of `TF_CONFIG`, made from the scheduler's variables if not set; empty for a single process.

    https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable

    - Slurm: `srun` with more than one task.
    - Kubernetes, an indexed Job: `JOB_COMPLETION_INDEX`, which Kubernetes sets, and `JOB_NAME`, `JOB_SERVICE` (the
      headless service) and `JOB_WORKERS`, which the manifest sets.

    Raises:
        SystemExit: with status 0, in an evaluator, after a line: workers have no need of one.
        UserError: when a variable is malformed.
    """
    if "TF_CONFIG" not in os.environ:
        if whole_number("SLURM_STEP_NUM_TASKS", 1) > 1:
            os.environ["TF_CONFIG"] = json.dumps(_from_slurm())
        elif "JOB_COMPLETION_INDEX" in os.environ and "JOB_SERVICE" in os.environ:
            os.environ["TF_CONFIG"] = json.dumps(_from_kubernetes())
    try:
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
        if config != {}:
            jobs, job = config["cluster"], config["task"]["type"]
            if job == "evaluator":
                print("TF_CONFIG makes this process an evaluator. It ends: fit evaluates on the workers.", flush=True)
                raise SystemExit(0)
            jobs.pop("evaluator", None)
            if wrong := {*jobs, job} - {*JOBS}:
                raise ValueError(f"the job {min(wrong)!r} is not one of {' and '.join(JOBS)}")
            index = config["task"]["index"] = int(config["task"]["index"])  # some write it as a text
            if not 0 <= index < len(jobs[job]):
                raise ValueError(f"there is no {job} {index}")
            os.environ["TF_CONFIG"] = json.dumps(config)
            addresses = [address for each in jobs.values() for address in each]
            for address in addresses:
                if not is_address(address) or addresses.count(address) > 1:
                    raise ValueError(f"{address!r} is not host:port, or is listed twice")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"TF_CONFIG is malformed ({type(error).__name__}: {error}). It must be like "
            '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        ) from error
    return config


def join_timeout() -> int:
    """Seconds within which all workers must join: the environment variable `JOIN_TIMEOUT`, 300 by default."""
    return whole_number("JOIN_TIMEOUT", 300)


def whole_number(variable: str, default: int) -> int:
    """The value of an environment variable; the default if it is empty or not set.

    Raises:
        UserError: when it is not a whole number from 1 to `MOST`.
    """
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise UserError(f"{variable} must be a whole number from 1 to {MOST}, not {text!r}")
    return int(text)


def worker_config(addresses: list[str], index: int) -> dict[str, Any]:
    """The `TF_CONFIG` of worker `index` among those at the addresses `host:port`."""
    return {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}


def is_address(text: str) -> bool:
    """Whether a text is `host:port`, with an IPv6 address in brackets, as in `[::1]:8888`."""
    host, _, port = text.rpartition(":")
    in_brackets = host[:1] + host[-1:] == "[]"
    return bool(host.strip("[]")) and in_brackets == (":" in host) and port.isdecimal() and 0 < int(port) < 2**16


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `host:port`, as `socket` takes them: `("::1", 8888)` for `[::1]:8888`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def all_on_this_machine() -> bool:
    """Whether every process of the cluster has a loopback address, as this machine resolves it.

    A single such address proves nothing: `/etc/hosts` often maps the machine's own name to loopback.
    """

    def at_loopback(address: str) -> bool:
        try:
            found = socket.getaddrinfo(*host_and_port(address), type=socket.SOCK_STREAM)
        except OSError:  # another machine, which cannot be resolved yet
            return False
        return all(ipaddress.ip_address(str(place[0]).split("%")[0]).is_loopback for *_, place in found)

    return all(at_loopback(address) for job in tf_config()["cluster"].values() for address in job)


def workers() -> list[str]:
    """Addresses of all workers, the chief's first; empty for a single process."""
    return [address for job in JOBS for address in tf_config().get("cluster", {}).get(job, [])]


def num_workers() -> int:
    """The number of processes that train together, as in Horovod's `size()`; 1 for a single process.

    The same on every worker, and known before TensorFlow is imported. A worker can have several replicas.

    Raises:
        UserError: when `TF_CONFIG`, or a variable of Slurm or Kubernetes that stands for it, is malformed.
    """
    return len(workers()) or 1


def worker_index() -> int:
    """This process's rank among the workers, from 0, as in Horovod's `rank()`; 0, the chief's, for a single process.

    Known before TensorFlow is imported. Use it for what each worker keeps for itself, such as its own log; all workers
    read the same data, and each computes its part.

    Raises:
        UserError: when `TF_CONFIG`, or what stands for it, is malformed.
    """
    return rank(tf_config()) if tf_config() else 0


def is_chief() -> bool:
    """Whether this process is worker 0, which writes the files; True for a single process.

    Known before TensorFlow is imported. Whatever waits for all workers, such as `fit` or `exchange`, must be called on
    all of them, not on the chief alone.

    Raises:
        UserError: when `TF_CONFIG`, or what stands for it, is malformed.
    """
    return worker_index() == 0


def rank(config: dict[str, Any]) -> int:
    """The rank of the worker that has this `TF_CONFIG`."""
    before = JOBS[: JOBS.index(config["task"]["type"])]
    return sum(len(config["cluster"].get(job, [])) for job in before) + config["task"]["index"]


def _from_slurm() -> dict[str, Any]:
    try:
        nodes = [*hostnames(os.environ["SLURM_STEP_NODELIST"])]
        counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"])
        tasks = [int(count) for count, times in counts for _ in range(int(times or 1))]
        addresses = [f"{node}:{PORT + i}" for node, count in zip(nodes, tasks, strict=True) for i in range(count)]
        address = f"{os.environ['SLURMD_NODENAME']}:{PORT + int(os.environ['SLURM_LOCALID'])}"
        return worker_config(addresses, addresses.index(address))
    except (ValueError, KeyError) as error:
        raise UserError(
            f"cannot determine the workers' ranks from Slurm's variables ({error}); set TF_CONFIG"
        ) from error


def hostnames(nodes: str) -> Iterator[str]:
    """The names in a node list of Slurm's, in its order: of `r[1-2]n[01-02],login`, r1n01, r1n02, r2n01, ..., login.

    Raises:
        ValueError: when a range is not one of numbers.
    """
    for part in re.findall(r"(?:\[[^]]*\]|[^][,])+", nodes):
        texts = [_numbers(text) if i % 2 else [text] for i, text in enumerate(re.split(r"[][]", part))]
        yield from map("".join, itertools.product(*texts))


def _numbers(ranges: str) -> list[str]:
    pairs = [(first, last or first) for first, _, last in (each.partition("-") for each in ranges.split(","))]
    return [f"{number:0{len(first)}}" for first, last in pairs for number in range(int(first), int(last) + 1)]


def _from_kubernetes() -> dict[str, Any]:
    try:
        name, service = os.environ["JOB_NAME"], os.environ["JOB_SERVICE"]
        addresses = [f"{name}-{i}.{service}:{PORT}" for i in range(int(os.environ["JOB_WORKERS"]))]
        return worker_config(addresses, int(os.environ["JOB_COMPLETION_INDEX"]))
    except (KeyError, ValueError) as error:
        raise UserError(f"JOB_NAME, JOB_SERVICE and JOB_WORKERS must be set in the Job's manifest ({error})") from error
