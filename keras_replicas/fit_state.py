# SPDX-License-Identifier: Apache-2.0
"""What the rest of a `fit` depends on beside weights and optimizer: History, callbacks, metrics so far, seeds."""

import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.batches import checksum
from keras_replicas.cluster import is_chief
from keras_replicas.custom_step import variables_of_tensorflow
from keras_replicas.errors import UserError
from keras_replicas.losses import variables_of_losses
from keras_replicas.replicas import assign_sum

# What Keras's callbacks remember from one epoch to the next.
REMEMBERED: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best",),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
}
MAY_BE_ADDED = ("TensorBoard",)  # or left out, when a run is resumed

ARRAY = "__array__"  # the only key of what stands for an array


def to_bytes(state: dict[str, Any]) -> bytes:
    """What JSON can hold, and arrays, as bytes. Raises a `TypeError` for anything else."""
    arrays: list[np.ndarray] = []

    def as_json(value):
        if isinstance(value, np.generic):
            return value.item()
        arrays.append(np.asarray(value))
        if arrays[-1].dtype == object:
            raise TypeError(f"a callback keeps a {type(value).__name__}, which JSON cannot hold: change its state_dict")
        return {ARRAY: len(arrays) - 1}

    text = json.dumps(state, default=as_json).encode()
    file = io.BytesIO()
    np.savez(file, *arrays, json=np.frombuffer(text, np.uint8))
    return file.getvalue()


def from_bytes(content: bytes) -> dict[str, Any]:
    """The state of which `to_bytes` made these bytes. Raises a `ValueError` for any others: nothing is unpickled."""
    try:
        return _from_npz(content)
    except (
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        OSError,
        RecursionError,
        MemoryError,
        zipfile.BadZipFile,
    ) as error:
        raise ValueError(f"it holds no state of a fit ({type(error).__name__})") from error


def _from_npz(content: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        if sum(member.file_size for member in file.infolist()) > len(content):  # `to_bytes` compresses nothing
            raise ValueError("it is compressed")
    arrays = np.load(io.BytesIO(content), allow_pickle=False)

    def with_arrays(found):
        return arrays[f"arr_{found[ARRAY]}"] if found.keys() == {ARRAY} else found

    return dict(json.loads(arrays["json"].tobytes(), object_hook=with_arrays))


def variables_of(model: Any, trained_only: bool) -> list[keras.Variable]:
    """The variables of a model of `data_parallel` but those of its metrics, and the state of Keras's global seed.

    With `trained_only`, not the weights that are not trained; the seeds of its layers always.
    """
    left_out = {id(variable) for variable in model._metric_variables()}
    left_out |= {id(weight) for weight in model.weights if trained_only and not weight.trainable}
    kept = [variable for variable in model.variables if id(variable) not in left_out]
    of_custom_steps: list[Any] = []
    if model.has_custom_step("train_step"):
        of_custom_steps += variables_of_tensorflow(model).values()
    of_losses = variables_of_losses(model)
    return [*kept, model.global_seed_generator.state, *model.step_counter.variables, *of_custom_steps, *of_losses]


def optimizers_of(model: Any) -> list[keras.Optimizer]:
    """The model's compiled optimizer, and those that its custom steps call."""
    found = [model.optimizer, *(model.step_plans.optimizers if model.step_plans else [])]
    return list({id(each): each for each in found if each is not None}.values())


def facts_of(model: Any, trained_only: bool) -> dict[str, Any]:
    """What else must be as it was when the `fit` began."""
    facts = {
        "optimizer": ", ".join(type(each).__name__ for each in optimizers_of(model)) or "none",
        "variables of the model": len(model.variables),
        "variables of the metrics": len(model._metric_variables()),
        "checksum of their shapes": zlib.crc32(str([variable.shape for variable in model.variables]).encode()),
    }
    if trained_only:
        rest = (variable for variable in model.weights if not variable.trainable)
        facts["checksum of the weights that are not trained"] = checksum(rest)
    return facts


def refuse_other_facts(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises a `UserError` that names the facts that differ."""
    others = [f"{name} {now.get(name)}, not {value}" for name, value in before.items() if now.get(name) != value]
    if others:
        raise UserError(f"{folder} has checkpoints of another fit: {', '.join(others)}. Give another folder")


def _keeps_state(callback: keras.callbacks.Callback) -> bool:
    return isinstance(callback, tuple(REMEMBERED)) or hasattr(callback, "state_dict")


def state_of(callbacks: Iterable[keras.callbacks.Callback]) -> list[list[Any]]:
    """Of each callback that keeps a state: the class's name, what Keras's class remembers, and its `state_dict()`."""
    states: list[list[Any]] = []
    for callback in filter(_keeps_state, callbacks):
        names = next((names for kind, names in REMEMBERED.items() if isinstance(callback, kind)), ())
        remembered = {name: getattr(callback, name) for name in names}
        from_callback = callback.state_dict() if hasattr(callback, "state_dict") else None
        states.append([type(callback).__name__, remembered, from_callback])
    return states


def restore_callbacks(callbacks: Iterable[keras.callbacks.Callback], states: Sequence[Sequence[Any]]) -> None:
    """Gives callbacks the state that `state_of` returned. Raises a `UserError` if they are others."""
    there = list(filter(_keeps_state, callbacks))
    if not is_chief():  # whose file it is, and who alone has a `ModelCheckpoint`
        here = {type(callback).__name__ for callback in there}
        states = [state for state in states if state[0] in here]
    kinds = {type(callback).__name__ for callback in there}
    added = set(MAY_BE_ADDED) - (kinds & {kind for kind, *_ in states})
    there = [callback for callback in there if type(callback).__name__ not in added]
    states = [state for state in states if state[0] not in added]
    if [type(callback).__name__ for callback in there] != [name for name, *_ in states]:
        raise UserError(
            f"these callbacks of the interrupted fit keep a state: {', '.join(name for name, *_ in states)}. Give the "
            "same ones in the same order, or another folder"
        )
    for callback, (_, remembered, from_callback) in zip(there, states, strict=True):
        names = next((names for kind, names in REMEMBERED.items() if isinstance(callback, kind)), ())
        vars(callback).update({name: value for name, value in remembered.items() if name in names})
        if from_callback is not None:
            callback.load_state_dict(from_callback)


def refuse_other_savers(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Refuses callbacks that cannot be resumed, or resume a run themselves.

    Raises:
        UserError: for a `BackupAndRestore`, and for a `ModelCheckpoint` that counts batches: its count is not saved.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise UserError("Checkpoints does what BackupAndRestore does: leave BackupAndRestore out")
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            raise UserError(
                "ModelCheckpoint beside Checkpoints needs save_freq='epoch': its count of batches is not saved. To "
                "save every N steps, use Checkpoints(folder, every=N)"
            )


def assign_sums(strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable], values: Sequence[Any]) -> None:
    """Gives variables that are sums over replicas these values."""

    def assign():
        for variable, value in zip(variables, values, strict=True):
            assign_sum(variable, tf.cast(value, variable.dtype))

    tf.function(lambda: strategy.run(assign), autograph=False)()
