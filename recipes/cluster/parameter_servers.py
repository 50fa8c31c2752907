# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training with parameter servers: a page to copy. Experimental, as `tf.distribute` calls it.

    python recipes/cluster/parameter_servers.py --local 2       # a chief, two workers and a server on this machine

On many machines, start the same file without `--local` on each, with `TF_CONFIG` set as in
https://www.tensorflow.org/tutorials/distribute/parameter_server_training: jobs `chief`, `worker` and `ps`.

The chief hands out steps, and each worker that is free does one, on variables that the servers hold. A gradient may be
stale, computed from weights that others have changed meanwhile, so no two runs are the same; a worker that is slow or
dies holds up nobody, for another does its step again. Keras's `fit` does not support it (keras-team/keras#18624).
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

BATCH = 32


def make_batches() -> tf.data.Dataset:
    """Points of a plane, and whether each is in the unit circle; a random order without end, another on each worker."""
    points = np.random.default_rng(0).normal(size=(1000, 2)).astype("float32")
    inside = (np.linalg.norm(points, axis=1) < 1).astype("int32")
    return tf.data.Dataset.from_tensor_slices((points, inside)).shuffle(1000).repeat().batch(BATCH)


def train(strategy: tf.distribute.ParameterServerStrategy, steps: int) -> None:
    """What the chief does."""
    with strategy.scope():  # variables are placed on the servers
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(32, "gelu"), keras.layers.Dense(2)])
        optimizer = keras.optimizers.Adam(1e-2)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train_step(batches):
        def replica_step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return strategy.run(replica_step, args=next(batches))

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    batches = iter(coordinator.create_per_worker_dataset(make_batches))
    for first in range(0, steps, 100):
        count = min(100, steps - first)
        losses = [coordinator.schedule(train_step, args=(batches,)) for _ in range(count)]
        coordinator.join()  # here the chief can evaluate, and save a checkpoint
        print(f"step {first + count}: loss {np.mean(coordinator.fetch(losses)):.4f}", flush=True)


def start_locally(workers: int, words: list[str]) -> int:
    """Starts this file on free ports of this machine, once for each task; returns the chief's exit status."""
    with contextlib.ExitStack() as until_all_are_found:
        found = [until_all_are_found.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2 + workers)]
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in found]
    cluster = {"chief": addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
    processes = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the processes below must not outlive it
    try:
        for job, index in [*(("worker", i) for i in range(workers)), ("ps", 0), ("chief", 0)]:
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            # The others have no GPU: servers hold variables, and a chief of workers on one machine leaves it to them.
            hidden = {} if job == "worker" else {"CUDA_VISIBLE_DEVICES": ""}
            command = [sys.executable, __file__, *words]
            processes.append(subprocess.Popen(command, env=os.environ | {"TF_CONFIG": config, "AT_HOME": "1"} | hidden))
        return processes[-1].wait()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def listen_on_loopback_alone() -> None:
    """Restricts the sockets of this process: TensorFlow listens on every network, and any client can run code."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.fromfd(number, socket.AF_INET6, socket.SOCK_STREAM) as ours:
            if ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")


def main(steps: int) -> None:
    """Does what this process's task in `TF_CONFIG` is."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    job, index = resolver.task_type, resolver.task_id
    if job == "chief":
        strategy = tf.distribute.ParameterServerStrategy(resolver)
    else:
        server = tf.distribute.Server(resolver.cluster_spec(), job, index, protocol="grpc")
    if "AT_HOME" in os.environ:  # elsewhere, use a private network
        listen_on_loopback_alone()
    if job != "chief":
        server.join()  # until it is killed
    train(strategy, steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", type=int, default=0, metavar="N", help="start N workers, a chief and a server here")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="of all workers together (1000)")
    options = parser.parse_args()
    if options.local > 0:
        raise SystemExit(start_locally(options.local, ["--steps", str(options.steps)]))
    main(options.steps)
