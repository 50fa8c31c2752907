# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_replicas launch`: starts a script's workers, and restarts all after one dies.

Only the workers import TensorFlow.
"""

import argparse
import contextlib
import importlib.util
import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from keras_replicas.cluster import LAUNCH_ID, MOST, is_address, rank, tf_config, worker_config
from keras_replicas.errors import UserError
from keras_replicas.gpus import gpu_shares
from keras_replicas.processes import Workers, log_of


def add_options(parser: argparse.ArgumentParser, script: str) -> None:
    """Gives a parser the launcher's options. All that comes after the script's name is the script's.

    Args:
        parser: of `python -m keras_replicas launch`, for example.
        script: what the help calls the script, such as `SCRIPT`.
    """
    add = parser.add_argument
    add("-m", action="store_true", dest="module", help="run a module, as `python -m` does")
    add("--workers", "--nproc-per-node", type=at_least(1), metavar="N", help="start N workers on this machine")
    add("--hosts", metavar="H1:PORT,H2:PORT", help="addresses of all workers, the chief's first; one starts here")
    add("--node-rank", type=at_least(0), metavar="I", help="index of this machine in --hosts, from 0")
    add("--max-restarts", type=at_least(0), default=0, metavar="K", help="restart all, K times at most, if one dies")
    add("--join-timeout", type=at_least(1), default=300, metavar="S", help="seconds to wait for all workers (300)")
    add(
        "--log-dir",
        type=Path,
        default=Path("logs"),
        metavar="DIR",
        help="folder of the logs, worker-I.log, of all workers but the chief (logs)",
    )
    add("script", metavar=script, nargs="?")
    add("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own options")


def at_least(least: int) -> Callable[[str], int]:
    """The `type` of an option of `argparse` that is a whole number from `least` to `MOST`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= MOST:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {MOST}, not {text!r}")
        return int(text)

    return read


def launch(options: argparse.Namespace) -> int:
    """Runs a script's workers until they are done, and returns the exit status.

    - 0: all are done.
    - 2: a script refused its input, or the input is wrong here. That is not tried again.
    - 143: stopped by a signal; each worker had a minute to save.
    - Otherwise a worker died, and no restart is left: its own status, or 1 if it was killed or hung.

    Args:
        options: those of `add_options`.

    Raises:
        UserError: when there is no such script, the workers' addresses are wrong, there are fewer GPUs than workers, or
            the logs cannot be written.
    """
    command = command_of(options)
    ranks = [rank(config) for config in tf_configs(options)]  # wrong addresses are refused before anything is written
    gpus, left = gpu_shares(options.workers) if options.workers else ([], 0)
    if left:
        print(f"{left} GPU(s) stay unused: all workers must have the same number", file=sys.stderr, flush=True)
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        for each in ranks:
            log_of(options.log_dir, each).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {options.log_dir} ({error.strerror}). Give another --log-dir") from error
    with tempfile.TemporaryDirectory(prefix="workers-") as temporary:
        # TensorFlow writes generated code there, and a worker that is killed leaves it behind.
        os.environ |= {"TMPDIR": temporary, "PYTHONUNBUFFERED": "1"}
        os.environ |= {"JOIN_TIMEOUT": str(options.join_timeout), LAUNCH_ID: uuid.uuid4().hex}
        workers = Workers(command, options.log_dir, gpus)
        for left in reversed(range(options.max_restarts + 1)):
            workers.start(tf_configs(options))
            status, cause, again = workers.wait()
            print(cause, end="", file=sys.stderr, flush=True)
            if not again:
                break
            print(f"{left} restart(s) left", file=sys.stderr, flush=True)
    return status


def command_of(options: argparse.Namespace) -> list[str]:
    """The command of each worker. Raises a `UserError` if there is no such script or module."""
    if not options.script:
        raise UserError("give a script, such as train.py, after the launcher's options, or a module after -m")
    if options.module:
        if not importlib.util.find_spec(options.script.partition(".")[0]):
            raise UserError(f"there is no module {options.script}")
        return [sys.executable, "-m", options.script, *options.arguments]
    if not Path(options.script).exists():
        raise UserError(f"there is no script {options.script}")
    return [sys.executable, options.script, *options.arguments]


def tf_configs(options: argparse.Namespace) -> list[dict]:
    """The `TF_CONFIG` of each worker that this process starts. Raises a `UserError` if the addresses are wrong."""
    given = tf_config()
    if options.workers is not None:
        if given or options.hosts:
            raise UserError("--workers is for this machine alone: leave it out where --hosts or TF_CONFIG is given")
        addresses = free_addresses(options.workers)
        return [worker_config(addresses, i) for i in range(options.workers)]
    if given:
        return [given]
    if not options.hosts or options.node_rank is None:
        raise UserError("give --workers N for N workers on this machine, or --hosts h1:port,h2:port --node-rank I")
    hosts = options.hosts.split(",")
    if wrong := [host for host in hosts if not is_address(host) or hosts.count(host) > 1]:
        raise UserError(f"--hosts must be like h1:8888,h2:8888; {wrong[0]!r} is not host:port, or is listed twice")
    if options.node_rank >= len(hosts):
        raise UserError(f"--node-rank must be from 0 to {len(hosts) - 1}, not {options.node_rank}")
    return [worker_config(hosts, options.node_rank)]


def free_addresses(count: int) -> list[str]:
    """Loopback addresses with free ports."""
    with contextlib.ExitStack() as until_all_are_found:
        try:
            sockets = [until_all_are_found.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        except OSError as error:
            raise UserError(f"there are no {count} free ports ({error.strerror}): give fewer --workers") from error
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
