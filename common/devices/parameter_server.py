# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training with parameter servers: experimental.

The chief schedules steps, and each worker that is free does one, on variables that the servers hold. A gradient may be
stale, computed from weights that others have changed meanwhile, so no two runs are the same; a worker that is slow or
dies holds up nobody. If a worker dies during a step, another does that step again.
"""

from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from keras_replicas import UserError
from keras_replicas.cluster import host_and_port, tf_config
from keras_replicas.workers import close_to_other_machines


def parameter_server_strategy(replicas: int = 0, deterministic: bool = False) -> tf.distribute.ParameterServerStrategy:
    """The chief's strategy. On a worker or a server it does not return: they serve the chief until they are killed.

    Raises:
        UserError: when `replicas` is more than 1, or `deterministic` is true.
    """
    if replicas > 1 or deterministic:
        given = "--deterministic" if deterministic else f"--replicas {replicas}"
        raise UserError(
            f"with parameter servers, a worker has one replica, and runs are not reproducible: leave out {given}"
        )
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    kind, index = resolver.task_type, resolver.task_id
    if kind == "chief":
        strategy = tf.distribute.ParameterServerStrategy(resolver)
    else:
        server = tf.distribute.Server(resolver.cluster_spec(), kind, index, protocol="grpc")
    close_to_other_machines(host_and_port(tf_config()["cluster"][kind][index])[1])
    if kind != "chief":
        server.join()
    return strategy


def asynchronous_steps(
    strategy: tf.distribute.ParameterServerStrategy, do_step: Callable, steps: range, round_ends: tuple[int, ...]
) -> Iterator[dict[str, np.ndarray]]:
    """Has the workers do steps in rounds, with a barrier after each.

    Args:
        strategy: from `parameter_server_strategy`.
        do_step: maps the step, an int64 scalar, to a dict of scalars; runs on a worker.
        round_ends: a round ends after each step, counted from 1, that is a multiple of one of these.

    Yields:
        For each scalar a vector, with one value per step of the round.
    """
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    do_step = tf.function(do_step)
    promised = []
    for step in steps:
        promised.append(coordinator.schedule(do_step, args=(tf.constant(step, tf.int64),)))
        if step + 1 == steps.stop or any((step + 1) % every == 0 for every in round_ends):
            coordinator.join()
            done = coordinator.fetch(promised)
            yield {name: np.array([values[name] for values in done]) for name in done[0]}
            promised = []
