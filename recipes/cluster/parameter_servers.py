# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training with parameter servers, for workers of uneven speed: an example to copy.

    python recipes/cluster/parameter_servers.py --local 2   # a chief, two workers and a server on this machine
    python recipes/cluster/parameter_servers.py             # one task of a cluster, by TF_CONFIG: chief, worker or ps

The chief schedules steps, and each worker that is free does one, on variables that the server holds. A gradient may be
stale, computed from weights that others have changed meanwhile, so no two runs are the same; a worker that is slow or
dies holds up nobody. Keras's `fit` refuses this strategy (keras-team/keras#18624). The ports are open to whoever can
reach them, and any client may run code: keep them behind a firewall.
"""

import argparse
import json
import os
import socket
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

STEPS, EVERY = 200, 50  # steps in all, and between two reports


def train() -> None:
    """Trains, as the chief."""
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    x = np.random.default_rng(0).normal(size=(1024, 8)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    @tf.function
    def train_step(step):
        def on_worker():
            rows = tf.random.stateless_uniform([32], [0, step], maxval=len(x), dtype=tf.int64)
            with tf.GradientTape() as tape:
                loss = loss_of(tf.gather(y, rows), model(tf.gather(x, rows), training=True)) / 32
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return strategy.run(on_worker)

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    for first in range(0, STEPS, EVERY):
        losses = [coordinator.schedule(train_step, args=(tf.constant(first + i, tf.int64),)) for i in range(EVERY)]
        coordinator.join()
        print(f"step {first + EVERY}: loss {np.mean(coordinator.fetch(losses)):.4f}", flush=True)


def start_all(workers: int) -> int:
    """Starts all tasks on this machine, and returns the chief's exit status."""
    jobs = {"chief": 1, "worker": workers, "ps": 1}
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(sum(jobs.values()))]
    free = iter([f"127.0.0.1:{each.getsockname()[1]}" for each in sockets])
    cluster = {job: [next(free) for _ in range(count)] for job, count in jobs.items()}
    for each in sockets:
        each.close()
    tasks = []
    for job, addresses in cluster.items():
        for index in range(len(addresses)):
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            tasks.append(subprocess.Popen([sys.executable, __file__], env=os.environ | {"TF_CONFIG": config}))
    try:
        return tasks[0].wait()
    finally:
        for task in tasks:
            task.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local", type=int, metavar="N", help="start a chief, N workers and a server here")
    arguments = parser.parse_args()
    if arguments.local:
        raise SystemExit(start_all(arguments.local))
    task = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if task.task_type == "chief":
        train()
    else:
        tf.distribute.Server(task.cluster_spec(), task.task_type, task.task_id, protocol="grpc").join()
