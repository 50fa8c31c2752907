"""What 1, 2 and 4 replicas, and two workers, compute against plain Keras on one device: the rows of the features."""

import gc
import json
import pickle
import sys
from pathlib import Path

import keras
import pytest

from benchmarks.conformance import REPLICAS, checked, models_to_check
from benchmarks.features import BATCH, ROWS, X, Y, away_from_plain, cross_entropy, difference, functional, outcome
from benchmarks.machine import RESULTS
from benchmarks.published import BOUNDS, PROGRAMS, compare
from keras_replicas import data_parallel, exchange, is_chief, make_strategy
from tests.conftest import assert_same, python


def check(feature, replicas, found):
    if replicas in ROWS[feature]["refused"]:
        assert isinstance(found, str)
    else:
        assert found < ROWS[feature]["bound"]


IN_CI = list(ROWS)[::3]  # on four replicas and on two workers; the others before a release


def in_slow_tier(feature):
    return pytest.mark.slow if feature in IN_CI else pytest.mark.long


def row(feature, replicas):
    """On two replicas in the quick tier; on one, and what takes longest, before a release."""
    is_long = replicas == 1 or "jit" in feature or "KerasHub" in feature
    marks = pytest.mark.long if is_long else in_slow_tier(feature)
    return pytest.param(feature, replicas, marks=() if replicas == 2 else marks)


@pytest.mark.parametrize(("feature", "replicas"), [row(feature, replicas) for feature in ROWS for replicas in REPLICAS])
def test_replicas_compute_what_one_device_does(feature, replicas):
    if feature == "`MultiOptimizer`" and not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("Keras before 3.15 has no MultiOptimizer")
    check(feature, replicas, difference(feature, replicas))


@pytest.fixture(scope="module")
def of_workers(tmp_path_factory, request):
    """The outcomes of two workers, which run this file as a program, for the features that are tested."""
    folder = tmp_path_factory.mktemp("workers")
    test = "test_two_workers_compute_what_one_device_does"
    features = [each.callspec.params["feature"] for each in request.session.items if each.originalname == test]
    words = ["launch", "--workers", "2", "--log-dir", folder, "-m", "tests.test_conformance", folder, *features]
    done = python("-m", "keras_replicas", *words)
    assert done.returncode == 0, done.stderr[-2000:]
    return pickle.loads((folder / "outcomes").read_bytes())


@pytest.mark.parametrize("feature", [pytest.param(each, marks=in_slow_tier(each)) for each in ROWS])
def test_two_workers_compute_what_one_device_does(feature, of_workers):
    check(feature, 2, away_from_plain(feature, of_workers[feature]))


QUICK_PROGRAMS = ("generative/vae", "guides/custom_train_step_in_tensorflow (going lower-level)")
# Two optimizers, state, a warning and a refusal; a weight that `call` sets, and labels of unlike lengths.
SLOW_PROGRAMS = (
    *("generative/wgan_gp", "generative/vq_vae", "vision/semisupervised_simclr", "generative/ddim"),
    *("generative/pixelcnn", "vision/captcha_ocr"),
)


OF_FLOAT32 = "vision/captcha_ocr"  # TensorFlow's CTC computes in it whatever it is given


def published(name):
    """Some programs in the quick tier and in the slow one; the others before a release."""
    if name in QUICK_PROGRAMS:
        return pytest.param(name)
    return pytest.param(name, marks=pytest.mark.slow if name in SLOW_PROGRAMS else pytest.mark.long)


@pytest.mark.parametrize("name", map(published, PROGRAMS))
def test_published_programs_equal_one_device(name):
    expected, found = PROGRAMS[name].expected, compare(name, 2)
    if expected == "equal":
        assert found.refusal is None and found.warnings == []
        assert found.difference < BOUNDS["float32"]
    elif expected == "warned":
        assert found.refusal is None and len(found.warnings) >= 1
    else:
        assert found.refusal and "\n" not in found.refusal


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name for name in PROGRAMS if PROGRAMS[name].expected == "equal" and name != OF_FLOAT32]
)
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_published_programs_equal_one_device_in_float64(name, replicas):
    keras.config.set_floatx("float64")
    try:
        found = compare(name, replicas)
    finally:
        keras.config.set_floatx("float32")
    assert found.refusal is None and found.difference < BOUNDS["float64"]


MODELS = models_to_check()
CHECKED_IN_CI = list(MODELS)[::10]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in CHECKED_IN_CI else pytest.mark.long) for name in MODELS],
)
def test_check_finds_what_is_equal_and_what_is_not(name):
    assert checked(name, *MODELS[name])["found"] == MODELS[name][1]


def test_the_page_has_every_row():
    results = json.loads((RESULTS / "conformance.json").read_text())
    assert list(results["rows"]) == list(ROWS)
    assert list(results["published"]) == list(PROGRAMS)


def test_check_finds_what_is_expected_of_every_row():
    rows = json.loads((RESULTS / "check.json").read_text())["rows"]
    assert {name: row["found"] for name, row in rows.items()} == {name: finds for name, (_, finds) in MODELS.items()}


def test_keras_s_callbacks_do_what_they_do_on_one_device(tmp_path):
    def run(model_class):
        keras.utils.set_random_seed(0)
        model = functional()(model_class)
        model.compile(keras.optimizers.SGD(0.1), cross_entropy(), metrics=["accuracy"])
        callbacks = [
            keras.callbacks.EarlyStopping(patience=3),
            keras.callbacks.ModelCheckpoint(tmp_path / "best.keras"),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
            keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=10.0),
            keras.callbacks.TensorBoard(tmp_path / "board"),
        ]
        given = {"validation_split": 0.3, "callbacks": callbacks, "shuffle": False, "verbose": 0}
        history = model.fit(X, Y, BATCH, 3, **given).history
        assert len((tmp_path / "log.csv").read_text().splitlines()) == 4 and (tmp_path / "best.keras").exists()
        return *history.values(), model.optimizer.learning_rate.numpy(), *model.get_weights()

    plain = run(keras.Model)
    with make_strategy(2).scope():
        ours = run(data_parallel(keras.Model))
    assert_same(ours, plain, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    strategy = make_strategy()
    gc.freeze()  # as in conftest
    folder, *features = sys.argv[1:]
    outcomes = {feature: outcome(feature, strategy) for feature in features}
    if is_chief():
        Path(folder, "outcomes").write_bytes(pickle.dumps(outcomes))
    exchange({})  # before one leaves
