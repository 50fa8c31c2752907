# SPDX-License-Identifier: Apache-2.0
"""Keras 3's `fit`, `evaluate` and `predict`, right on N replicas under `tf.distribute`, and resumed to the bit.

Import public names from here, as in `import keras_replicas as kr`; modules inside may change. Nothing is loaded, not
even TensorFlow, before a name is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from keras_replicas.batches import Batches, distribute
    from keras_replicas.checking import check
    from keras_replicas.checkpoints import Checkpoints
    from keras_replicas.cluster import is_chief, num_workers, worker_index
    from keras_replicas.errors import UserError
    from keras_replicas.log import StepLog
    from keras_replicas.model import data_parallel
    from keras_replicas.noise import noise_of_step
    from keras_replicas.optimizers import apply_summed
    from keras_replicas.order import locate
    from keras_replicas.replicas import first_replica, gather_over_replicas, sum_over_replicas
    from keras_replicas.step_calls import steps_in_one_call
    from keras_replicas.strategy import make_strategy
    from keras_replicas.workers import agree, exchange

# Where each public name is defined.
_MODULES = {
    name: module
    for module, names in {
        "batches": ["Batches", "distribute"],
        "checking": ["check"],
        "checkpoints": ["Checkpoints"],
        "cluster": ["is_chief", "num_workers", "worker_index"],
        "errors": ["UserError"],
        "log": ["StepLog"],
        "model": ["data_parallel"],
        "noise": ["noise_of_step"],
        "optimizers": ["apply_summed"],
        "order": ["locate"],
        "replicas": ["first_replica", "gather_over_replicas", "sum_over_replicas"],
        "step_calls": ["steps_in_one_call"],
        "strategy": ["make_strategy"],
        "workers": ["agree", "exchange"],
    }.items()
    for name in names
}
__all__ = list(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
