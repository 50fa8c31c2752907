# SPDX-License-Identifier: Apache-2.0
"""Trains a recipe on the nodes of a Ray cluster, one worker on each.

    ray job submit --working-dir . -- python recipes/cluster/ray_launch.py --workers 4 --gpus 8 bert_mlm

Ray places the workers on nodes, and each runs the recipe in its own process, with Keras 3; Ray Train's TensorFlow
trainer would need Keras 2. `--workdir`, among the recipe's options, must be a folder that all nodes share.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import uuid

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(max_concurrency=2)  # so that `stop` can be called while `run` waits
class Worker:
    """One worker, and the process that runs the recipe there."""

    def address(self) -> str:
        """Its node's address, with a free port."""
        with socket.create_server(("", 0)) as server:
            return f"{ray.util.get_node_ip_address()}:{server.getsockname()[1]}"

    def run(self, tf_config: dict, launch_id: str, folder: str, words: list[str]) -> int:
        """Runs the recipe, and returns its exit status; 128 + N where signal N ended it."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "recipes", "run", *words],
            cwd=folder,
            env=os.environ | {"TF_CONFIG": json.dumps(tf_config), "LAUNCH_ID": launch_id},
        )
        status = self.process.wait()
        return status if status >= 0 else 128 - status

    def stop(self) -> None:
        """Asks the recipe to save and exit."""
        self.process.terminate()


def train(count: int, cpus: float, gpus: float, launch_id: str, words: list[str]) -> int:
    """Runs a recipe on `count` workers; returns the worst exit status."""
    nodes = sum(node["Alive"] for node in ray.nodes())
    strategy = "STRICT_SPREAD" if nodes >= count else "SPREAD"
    group = placement_group([{"CPU": cpus, "GPU": gpus}] * count, strategy)
    print(f"waiting for {count} workers of {cpus:g} CPU(s) and {gpus:g} GPU(s) each, {strategy}", flush=True)
    ray.get(group.ready())
    on_nodes = [PlacementGroupSchedulingStrategy(group, i) for i in range(count)]
    workers = [Worker.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=node).remote() for node in on_nodes]
    try:
        addresses = ray.get([worker.address.remote() for worker in workers])
        runs = [
            worker.run.remote(
                {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}},
                *(launch_id, os.getcwd(), words),
            )
            for i, worker in enumerate(workers)
        ]
        try:
            return max(ray.get(runs))
        except KeyboardInterrupt:
            ray.get([worker.stop.remote() for worker in workers])
            return max(ray.get(runs))
    except ray.exceptions.RayActorError as error:  # a node is lost
        print(error, file=sys.stderr)
        return 1
    finally:
        for worker in workers:
            ray.kill(worker)
        remove_placement_group(group)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True, metavar="N")
    parser.add_argument("--cpus", type=float, default=1, metavar="N", help="CPUs per worker (1)")
    parser.add_argument("--gpus", type=float, default=0, metavar="N", help="GPUs per worker: all of a node (0)")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="K", help="up to K times after a worker dies (0)"
    )
    parser.add_argument("recipe")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    for name, least in (("workers", 1), ("cpus", 0), ("gpus", 0), ("max_restarts", 0)):
        if not getattr(arguments, name) >= least:
            print(f"error: --{name.replace('_', '-')} must be at least {least}", file=sys.stderr)
            raise SystemExit(2)
    ray.init()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own handler gives this process three seconds
    words, launch_id = [arguments.recipe, *arguments.options], uuid.uuid4().hex
    for _ in range(arguments.max_restarts + 1):
        status = train(arguments.workers, arguments.cpus, arguments.gpus, launch_id, words)
        if status in (0, 2, 143):  # done, wrong input, stopped; otherwise a worker died
            break
    raise SystemExit(status)
