# SPDX-License-Identifier: Apache-2.0
"""The arguments of `fit`, `evaluate` and `predict`, with data that begins where a run goes on, divided over replicas.

Keras divides data sets itself where it does so rightly: on one machine, from the first step on.
"""

import copy
import math
import types
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.batches import Batches, distribute
from keras_replicas.checkpoints import Checkpoints
from keras_replicas.cluster import is_chief, num_workers
from keras_replicas.data import WholeBatches, as_batches, row_by_row
from keras_replicas.division import divide, refuse_scalars, refuse_unlike_rows
from keras_replicas.errors import UserError
from keras_replicas.noise import keep_global_seed
from keras_replicas.private import get_data_adapter, train_validation_split
from keras_replicas.step_plans import first_rows
from keras_replicas.workers import agree, exchange

Arguments = dict[str, Any]  # by name, of one call
# Keras's callbacks that write files, or send them: one worker's are enough.
WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)


def checkpoints_in(given: Arguments) -> Checkpoints | None:
    """The `Checkpoints` among the callbacks."""
    callbacks = given.get("callbacks")
    callbacks = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    found = [each for each in keras.tree.flatten(callbacks) if isinstance(each, Checkpoints)]
    if len(found) > 1:
        raise ValueError("fit takes one Checkpoints callback, not several")
    return found[0] if found else None


def begin_fit(model: Any, given: Arguments, checkpoints: Checkpoints | None) -> tuple[int, Arguments]:
    """The step from which `fit` goes on, and its arguments from there."""
    ours = _is_divided_by_us(model, given.get("x"), given.get("steps_per_epoch"))
    if model.steps_by_keras and not (ours or checkpoints or hasattr(given.get("validation_data"), "iter_from_step")):
        return 0, given
    given = with_validation_data(model, given)
    given = _with_generators(model, given, "validation_data", "test_step")
    if checkpoints is None and not ours:
        given = _with_generators(model, given, "x", "train_step")
        if _on_workers(model):
            given["callbacks"] = _callback_list(model, given)
        if isinstance(given.get("x"), tf.distribute.DistributedDataset | tf.data.Dataset):
            given["shuffle"] = False  # else Keras warns that it is not shuffled
        return 0, given
    data = {name: given.pop(name, None) for name in ("x", "y", "sample_weight", "batch_size", "class_weight")}
    callbacks = _callback_list(model, given)
    keep_global_seed(model)
    state = checkpoints.open_fit(callbacks) if checkpoints else {}
    done = int(keras.ops.convert_to_numpy(model.optimizer.iterations)) if model.optimizer else 0
    order = model.global_seed + done  # another one for each `fit`
    seeds = state.get("seeds") or {"data": order, "noise": model.global_seed}
    seeds = exchange(seeds)[0] if _on_workers(model) else seeds
    model.global_seed = seeds["noise"]
    shuffle, steps = given.pop("shuffle", True), given.get("steps_per_epoch")
    batches = as_batches(**data, steps=steps, shuffle=shuffle, seed=seeds["data"])
    _check_same(model, batches)
    steps, epochs = steps or len(batches), given.get("epochs", 1)
    if model.has_custom_step("train_step"):
        _prepare_custom_step(model, "train_step", batches, checkpoints)
    step, last = given.get("initial_epoch", 0) * steps, checkpoints.max_steps if checkpoints else None
    callbacks.set_params(callbacks.params | {"steps": min(steps, last or steps)})  # which a progress bar shows
    if checkpoints:
        if isinstance(batches, WholeBatches):
            batches.warn_if_unrepeatable()
        model.build_for(batches.iter_from_step(0, tf.distribute.InputContext()).element_spec)
        facts = {"steps in an epoch": steps}
        if isinstance(batches, Batches):  # of others, a first batch may be another each time
            facts |= {"batch_size": batches.batch_size} | batches.fingerprint()
        resumed_at, is_complete = checkpoints.begin_fit(state, [epochs, last], seeds, facts)
        step = max(step, resumed_at)
        begins = epochs if is_complete or (last and step >= last) else step // steps
        given |= {"initial_epoch": begins, "epochs": min(epochs, math.ceil(last / steps)) if last else epochs}
    x = distribute(model.distribute_strategy, batches, step)
    return step, given | {"x": x, "steps_per_epoch": steps, "callbacks": callbacks, "shuffle": False}


def with_validation_data(model: Any, given: Arguments) -> Arguments:
    """Arguments of `fit`, in which validation data is split off, and divided if need be."""
    data = [given.get(name) for name in ("x", "y", "sample_weight")]
    validation, batch_size = given.get("validation_data"), given.get("batch_size")
    given = given | {"validation_batch_size": given.get("validation_batch_size") or batch_size}
    share = given.pop("validation_split", 0.0)
    if share and validation is None:
        train, validation = train_validation_split(data, share)
        given |= dict(zip(("x", "y", "sample_weight"), train, strict=True)) | {"validation_data": tuple(validation)}
    if validation is None:
        return given
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation)
    if not _is_divided_by_us(model, x, given.get("validation_steps")):
        return given
    named = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": given["validation_batch_size"]}
    divided = with_divided_data(model, named | {"steps": given.get("validation_steps")}, "test_step")
    return given | {"validation_data": divided["x"], "validation_steps": divided["steps"]}


def with_divided_data(model: Any, given: Arguments, step: str = "") -> Arguments:
    """Arguments of `evaluate` or `predict`, in which data is divided if need be; `step` is what runs on it."""
    if not _is_divided_by_us(model, given.get("x"), given.get("steps")):
        given = given if model.steps_by_keras else _with_generators(model, given, "x", step or "predict_step")
        is_prediction = not step
        return _with_even_parts(model, given) if is_prediction else given
    data = {name: given.pop(name, None) for name in ("x", "y", "sample_weight", "batch_size")}
    batches = as_batches(**data, steps=given.get("steps"))
    if isinstance(batches, Batches):  # outputs come in the order of the rows
        batches = copy.copy(batches)
        batches.shuffle = False
    _check_same(model, batches)
    if step and not model.steps_by_keras and model.has_custom_step(step):
        _prepare_custom_step(model, step, batches)
    return given | {"x": distribute(model.distribute_strategy, batches), "steps": given.get("steps") or len(batches)}


def _with_even_parts(model: Any, given: Arguments) -> Arguments:
    """Arguments of `predict`, with a distributed data set of even parts; `building.py` makes those of other calls."""
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return given
    if isinstance(given.get("x"), tf.distribute.DistributedDataset):
        return given
    x, batch_size, steps = given.pop("x"), given.pop("batch_size", None), given.pop("steps", None)
    adapter = get_data_adapter(x, batch_size=batch_size, steps_per_epoch=steps, shuffle=False)
    dataset = row_by_row(adapter.get_tf_dataset())
    divided = divide(model.distribute_strategy, dataset)
    return given | {"x": divided, "steps": steps or adapter.num_batches}


def _prepare_custom_step(model: Any, name: str, batches: Any, checkpoints: Checkpoints | None = None) -> None:
    """Builds the model, and finds how its custom step's results combine, by the first batch of the data."""
    if model.steps_by_keras and not checkpoints:
        return
    model.build_for(batches.iter_from_step(0, tf.distribute.InputContext()).element_spec)
    if checkpoints and getattr(batches, "is_read_once", False):
        raise UserError(
            f"Checkpoints beside a custom {name} need data that can be read twice, to find what the step's optimizers "
            "are: give arrays, a PyDataset or a tf.data.Dataset, not a generator"
        )
    model.prepare_custom_step(name, first_rows(batches), needs_optimizers=checkpoints is not None)


def _on_workers(model: Any) -> bool:
    return isinstance(model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy) and num_workers() > 1


def _is_divided_by_us(model: Any, x: Any, steps: int | None) -> bool:
    """Whether this data is divided by `distribute`, or by Keras.

    - Data with `iter_from_step`, and all data on several workers, which must read the same: by `distribute`.
    - Without a strategy: by Keras.
    - A `PyDataset`: by `distribute`, for Keras stops its threads after each epoch, and fails where one has already read
      into the next (`Iterator called after on_epoch_end`). On one replica, that is so only where it has no end.
    - Arrays: by `distribute`, with which a step takes as little as half as long; but by Keras where `steps` are asked
      for, which may be more than the arrays have, or several in a call.
    - Anything else: by Keras.
    """
    if isinstance(x, tf.distribute.DistributedDataset):
        return False
    if hasattr(x, "iter_from_step") or _on_workers(model):
        return True
    if not model._distribute_strategy:
        return False
    if isinstance(x, keras.utils.PyDataset):
        return not model.steps_by_keras or x.num_batches is None
    are_arrays = all(hasattr(leaf, "__array__") for leaf in keras.tree.flatten(x))
    return are_arrays and steps is None and model.steps_per_execution == 1


def _with_generators(model: Any, given: Arguments, name: str, step: str) -> Arguments:
    """Arguments with a data set in the place of a generator; `step` is what runs on it.

    Raises:
        UserError: when tensors of a data set's batches have unlike numbers of rows, which only a custom step may get,
            or no rows.
    """
    if isinstance(given.get(name), types.GeneratorType):
        options = {"class_weight": given.pop("class_weight", None)} if name == "x" else {}
        given[name] = row_by_row(get_data_adapter(given[name], **options).get_tf_dataset())
        given |= {"shuffle": False} if name == "x" and "shuffle" in given else {}
    has_replicas = model.distribute_strategy.num_replicas_in_sync > 1
    if has_replicas and isinstance(given.get(name), tf.data.Dataset):
        refuse = refuse_scalars if model.has_custom_step(step) else refuse_unlike_rows
        refuse(given[name].element_spec)
    return given


def _callback_list(model: Any, given: Arguments) -> keras.callbacks.CallbackList:
    callbacks, verbose = given.get("callbacks"), given.get("verbose", "auto")
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        params = {"verbose": verbose, "epochs": given.get("epochs", 1), "steps": None}
        bar = verbose != 0
        callbacks = keras.callbacks.CallbackList(callbacks, add_history=True, add_progbar=bar, model=model, **params)
    if _on_workers(model) and any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks.callbacks):
        raise UserError("BackupAndRestore does not work on several workers: use keras_replicas.Checkpoints")
    if _on_workers(model) and not is_chief():
        callbacks.callbacks = [each for each in callbacks.callbacks if not isinstance(each, WRITERS)]
    return callbacks


def _check_same(model: Any, batches: Any) -> None:
    if _on_workers(model) and hasattr(batches, "fingerprint"):
        difference = (
            "has other data than the chief: give every worker the same whole batches; it takes its part of each itself"
        )
        agree(batches.fingerprint(), difference)
