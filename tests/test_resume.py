"""`Checkpoints`: a `fit` that was interrupted ends like one that was not, to the bit."""

import contextlib
import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_replicas as kr
from keras_replicas import checkpoints as checkpoints_module
from tests.conftest import assert_same, interrupt_at

X = np.random.default_rng(0).normal(size=(52, 4)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int32)


def as_in_a_new_process(monkeypatch):
    monkeypatch.setattr(checkpoints_module, "_completed", {})


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]


class Reshuffled(Numbered):
    """Turns its batches round between epochs."""

    def on_epoch_end(self):
        self.turned = getattr(self, "turned", 0) + 1

    def __getitem__(self, index):
        return super().__getitem__((index + getattr(self, "turned", 0)) % 7)


def generator():
    for step in range(100):
        yield X[step % 40 :][:8], Y[step % 40 :][:8]


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 8, "validation_split": 0.2, "class_weight": {0: 1.0, 1: 2.0}},
    "tf.data": lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(52, seed=3).batch(8)},
    "PyDataset": lambda: {"x": Numbered(workers=2), "validation_data": (X, Y)},
    "PyDataset with hooks": lambda: {"x": Reshuffled(), "shuffle": False},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 6},
}


def make_model(strategy=None, seed=7, optimizer="adam", hidden=6):
    keras.utils.set_random_seed(seed)
    with strategy.scope() if strategy else contextlib.nullcontext():
        layers = keras.layers.Dense(hidden, "tanh"), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()
        model = keras.Sequential([*layers, keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer() if callable(optimizer) else optimizer, loss, metrics=["accuracy"])
        return kr.data_parallel(model)


def plateau():
    return keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=0.5)


def fit(folder, *callbacks, data="arrays", strategy=None, every=3, epochs=3, max_steps=None, **options):
    """The model, and its History; of arrays an epoch has 6 steps."""
    model = make_model(strategy, **options)
    saved = kr.Checkpoints(folder, every=every, max_steps=max_steps)
    callbacks = [saved, plateau(), *callbacks]  # wherever it stands
    return model, model.fit(**DATA[data](), epochs=epochs, verbose=0, callbacks=callbacks)


def interrupted(folder, steps, *callbacks, **options):
    with pytest.raises(KeyboardInterrupt):
        fit(folder, *callbacks, interrupt_at(steps), **options)


def assert_alike(ours, theirs):
    (model, history), (other, others) = ours, theirs
    assert (history.history, history.epoch) == (others.history, others.epoch)
    assert_same(*(each.variables + each.optimizer.variables for each in (model, other)))


QUICK = ("arrays", 2), ("tf.data", 2)


@pytest.mark.parametrize(
    ("data", "replicas"),
    [pytest.param(data, n, marks=() if (data, n) in QUICK else pytest.mark.slow) for data in DATA for n in (0, 2)],
)
def test_an_interrupted_fit_ends_like_one_that_was_not(tmp_path, data, replicas):
    """Arrays with the seeds that it began with: without a seed of its own, a program has another each time."""
    options = {"data": data, "strategy": kr.make_strategy(replicas) if replicas else None}
    undisturbed = fit(tmp_path / "undisturbed", **options)
    interrupted(tmp_path / "killed", 8, **options)  # within the second epoch, saved at step 6
    assert_alike(fit(tmp_path / "killed", **options, seed=8 if data == "arrays" else 7), undisturbed)


class Counts(keras.callbacks.Callback):
    """With a state of its own, which is empty at first, and looks like our own notes."""

    epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.epochs += 1

    def state_dict(self):
        return {"array": self.epochs} if self.epochs else {}

    def load_state_dict(self, state):
        self.epochs = state.get("array", 0)


class Stopping(Counts, keras.callbacks.EarlyStopping):
    """Also with one that Keras's class has."""


def stopping():
    return Stopping(monitor="loss", patience=1, min_delta=9.0, restore_best_weights=True)


class StopAt9(keras.callbacks.Callback):
    """A step in the second epoch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = self.model.steps_done == 9


def die_in_epoch_1(when):
    def die(epoch, logs):
        if epoch == 1:
            raise KeyboardInterrupt

    return keras.callbacks.LambdaCallback(**{f"on_epoch_{when}": die})


AVERAGING = {"optimizer": lambda: keras.optimizers.Adam(0.01, use_ema=True)}


@pytest.mark.parametrize(
    ("make", "die", "options", "epochs"),
    [
        (Counts, lambda: interrupt_at(8), {}, 3),
        (stopping, lambda: interrupt_at(4), {"epochs": 9}, 2),  # in the first epoch
        (stopping, lambda: interrupt_at(8), {"epochs": 9}, 2),
        (StopAt9, lambda: die_in_epoch_1("end"), {"every": 1}, 2),  # an epoch that was stopped within ends
        (lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True), lambda: die_in_epoch_1("begin"), AVERAGING, 3),
    ],
    ids=["its own", "EarlyStopping 1", "EarlyStopping 2", "stop", "SwapEMAWeights"],
)
def test_a_callback_goes_on_with_its_state(make, die, options, epochs, tmp_path):
    undisturbed = fit(tmp_path / "undisturbed", make(), **options)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "killed", make(), die(), **options)
    again = make()
    assert_alike(fit(tmp_path / "killed", again, **options), undisturbed)
    assert len(undisturbed[1].epoch) == epochs == getattr(again, "epochs", epochs)


def test_model_checkpoint_remembers_what_was_best(tmp_path):
    best = tmp_path / "best.keras"

    def keep():
        return keras.callbacks.ModelCheckpoint(best, monitor="learning_rate", mode="max", save_best_only=True)

    interrupted(tmp_path / "killed", 8, keep())  # in the second epoch; the rate never rises, so the first is best
    of_first_epoch = best.read_bytes()
    fit(tmp_path / "killed", keep())
    assert best.read_bytes() == of_first_epoch


def test_a_fit_that_is_complete_returns_its_history_and_says_so(tmp_path, monkeypatch, caplog):
    undisturbed = fit(tmp_path)
    assert "complete" not in caplog.text
    as_in_a_new_process(monkeypatch)
    assert_alike(fit(tmp_path, interrupt_at(1)), undisturbed)  # no step is done
    assert f"The fit in {tmp_path} is complete: nothing is trained" in caplog.text
    assert_alike(fit(tmp_path, epochs=4), fit(tmp_path / "longer", epochs=4))


def test_where_the_end_is_damaged_the_last_checkpoint_serves(tmp_path, monkeypatch):
    undisturbed = fit(tmp_path)
    as_in_a_new_process(monkeypatch)
    (data,) = tmp_path.glob("end.data-*")
    content, kernel = data.read_bytes(), undisturbed[0].get_weights()[0].tobytes()
    assert kernel in content
    data.write_bytes(content.replace(kernel, bytes(len(kernel))))
    assert_alike(fit(tmp_path), undisturbed)
    as_in_a_new_process(monkeypatch)
    for path in tmp_path.glob("ckpt-*.data-*"):
        path.write_bytes(b"")
    assert_alike(fit(tmp_path), undisturbed)


def test_a_second_fit_has_checkpoints_of_its_own(tmp_path, monkeypatch):
    def program(folder, interrupt=0, epochs=2):
        as_in_a_new_process(monkeypatch)
        model, saved = make_model(), kr.Checkpoints(folder, every=2)
        given = {"x": X, "y": Y, "batch_size": 8, "verbose": 0}
        first = model.fit(**given, epochs=epochs, callbacks=[saved])
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(0.1), model.loss, metrics=["accuracy"])
        stop = [interrupt_at(interrupt)] if interrupt else []
        second = model.fit(**given, epochs=2, callbacks=[saved, *stop])
        assert len(first.history["loss"]) == epochs
        return model, second

    undisturbed = program(tmp_path / "undisturbed")
    with pytest.raises(KeyboardInterrupt):
        program(tmp_path / "killed", 9)
    assert_alike(program(tmp_path / "killed"), undisturbed)
    with pytest.raises(ValueError, match=r"fit-2 has .* another fit: steps of fits before \[21\], not \[14\]"):
        program(tmp_path / "killed", epochs=3)


def test_max_steps_ends_within_an_epoch(tmp_path, monkeypatch):
    undisturbed = fit(tmp_path / "a", max_steps=8)
    assert undisturbed[0].optimizer.iterations.numpy() == 8
    _, short = fit(tmp_path / "short", max_steps=4)
    assert short.params["steps"] == 4  # of the progress bar
    interrupted(tmp_path / "b", 7, max_steps=8)
    assert_alike(fit(tmp_path / "b", max_steps=8), undisturbed)
    as_in_a_new_process(monkeypatch)
    model, _ = fit(tmp_path / "a", max_steps=7)  # in the same epoch of 6: nothing is left
    assert model.optimizer.iterations.numpy() == 8


def test_shuffling_without_a_seed_is_told(tmp_path):
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(52).batch(8)
    with pytest.warns(UserWarning, match="shuffled without a seed"):
        make_model().fit(data, verbose=0, callbacks=[kr.Checkpoints(tmp_path)])


def test_sigterm_saves_and_exits_where_it_is_asked_for(tmp_path):
    class Terminate(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if self.model.steps_done == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    before, model = signal.getsignal(signal.SIGTERM), make_model()
    saved = kr.Checkpoints(tmp_path, exit_on_sigterm=True)
    with pytest.raises(SystemExit) as left:
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[Terminate(), saved])
    assert left.value.code == 143
    assert saved.saved_step == model.steps_done == 3  # the signal came during the third step
    assert signal.getsignal(signal.SIGTERM) == before


def test_of_what_is_trained_alone_the_rest_must_be_the_same(tmp_path):
    """As for adapters, whose base would make a checkpoint large."""

    def program(folder, *callbacks, base=1.0):
        keras.utils.set_random_seed(7)
        frozen = keras.layers.Dense(6, kernel_initializer=keras.initializers.Constant(base), trainable=False)
        layers = keras.Input((4,)), frozen, keras.layers.Dense(2, "tanh"), keras.layers.Dropout(0.3)
        model = kr.data_parallel(keras.Sequential([*layers, keras.layers.Dense(2)]))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        saved = kr.Checkpoints(folder, every=3, trained_only=True)
        return model, model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[saved, *callbacks])

    undisturbed = program(tmp_path / "undisturbed")
    with pytest.raises(KeyboardInterrupt):
        program(tmp_path / "killed", interrupt_at(8))
    assert (4, 6) not in [tuple(shape) for _, shape in tf.train.list_variables(str(tmp_path / "killed/ckpt-6"))]
    with pytest.raises(ValueError, match=r"checksum of the weights that are not trained \d+, not \d+"):
        program(tmp_path / "killed", base=2.0)
    assert_alike(program(tmp_path / "killed"), undisturbed)


@pytest.mark.parametrize(
    ("options", "data", "told"),
    [
        ({}, {"x": X + 1}, r"checksum of the first and the last row \d+, not \d+.* Give another folder"),
        ({}, {"batch_size": 16}, "batch_size 16, not 8"),
        ({"optimizer": "sgd"}, {}, "optimizer SGD, not Adam"),
        ({"hidden": 7}, {}, "checksum of their shapes"),
    ],
)
def test_another_fit_is_refused_and_is_no_damage(options, data, told, tmp_path, caplog):
    interrupted(tmp_path, 5)
    given = {"epochs": 3, "verbose": 0, "callbacks": [kr.Checkpoints(tmp_path), plateau()]}
    with pytest.raises(ValueError, match=f"another fit: .*{told}"):
        make_model(**options).fit(**DATA["arrays"]() | data, **given)
    assert "damaged" not in caplog.text


def test_what_cannot_be_resumed_is_refused(tmp_path):
    def refused(told, *callbacks, error=ValueError, model=None, folder="a", **data):
        data = {"x": X, "y": Y, "batch_size": 8} | data
        with pytest.raises(error, match=told):
            saved = kr.Checkpoints(tmp_path / folder)
            (model or make_model()).fit(**data, verbose=0, callbacks=[saved, *callbacks])

    interrupted(tmp_path / "other", 5)
    refused("ReduceLROnPlateau", folder="other", **DATA["arrays"](), epochs=3)  # which is not among the callbacks now
    (tmp_path / "file").touch()
    refused(r"cannot write to .*file \(File exists\): give another folder", folder="file")
    refused("save_freq='epoch'", keras.callbacks.ModelCheckpoint(tmp_path / "x.keras", save_freq=2))
    refused("one Checkpoints", kr.Checkpoints(tmp_path / "b"))
    refused("the data has no known end: give steps_per_epoch", x=generator(), y=None, batch_size=None)
    plain = keras.Sequential([keras.layers.Dense(2)])
    plain.compile("sgd", "sparse_categorical_crossentropy")
    refused("Checkpoints needs a model of data_parallel", error=TypeError, model=plain)
    data = kr.distribute(strategy := kr.make_strategy(2), kr.Batches((X, Y), 8))
    given = {"x": data, "y": None, "batch_size": None, "steps_per_epoch": 2}
    refused("distributed", error=TypeError, model=make_model(strategy), **given)
    with pytest.raises(ValueError, match="every must be at least 1"):
        kr.Checkpoints(tmp_path, every=0)


def points_of(folder):
    """The points of a TensorBoard folder: (tag, step, value), each once, as the last run wrote it."""
    found = {}
    for file in sorted(folder.rglob("events*"), key=lambda path: path.stat().st_mtime):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.tag.startswith("batch_") and value.HasField("tensor"):
                    found[file.parent.name, value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    return found


def test_the_files_of_keras_callbacks_go_on(tmp_path):
    """TensorBoard's points are at the same batches, and the rows of a `CSVLogger` stay."""

    def fit(name, *callbacks):
        folder = tmp_path / name
        files = [
            keras.callbacks.TensorBoard(folder / "board", update_freq=1),
            keras.callbacks.CSVLogger(folder / "log.csv"),
        ]
        folder.mkdir(exist_ok=True)
        model = make_model()
        model.fit(X, Y, 8, 3, 0, [*files, kr.Checkpoints(folder / "checkpoints", every=2), *callbacks])

    fit("whole")
    with pytest.raises(KeyboardInterrupt):
        fit("parts", interrupt_at(12))
    fit("parts")
    whole = points_of(tmp_path / "whole")
    assert whole == points_of(tmp_path / "parts") and max(step for _, _, step in whole) == 21
    assert (tmp_path / "parts" / "log.csv").read_text() == (tmp_path / "whole" / "log.csv").read_text()


def test_a_tensorboard_may_be_added_or_left_out(tmp_path):
    boards = [keras.callbacks.TensorBoard(tmp_path / "board")]
    for before, after in ((boards, []), ([], boards)):
        folder = tmp_path / f"{len(before)}"
        with pytest.raises(KeyboardInterrupt):
            make_model().fit(X, Y, 8, 2, 0, [*before, kr.Checkpoints(folder, every=2), interrupt_at(5)])
        assert len(make_model().fit(X, Y, 8, 2, 0, [*after, kr.Checkpoints(folder, every=2)]).history["loss"]) == 2


def test_another_callback_that_resumes_is_refused(tmp_path):
    callbacks = [keras.callbacks.BackupAndRestore(tmp_path / "backup"), kr.Checkpoints(tmp_path / "checkpoints")]
    with pytest.raises(kr.UserError, match="leave BackupAndRestore out"):
        make_model().fit(X, Y, 8, 1, 0, callbacks)
