"""What is saved, pickled, copied or made a preset of is plain: given to `data_parallel` again, it trains on exactly."""

import contextlib
import copy
import functools
import pickle
import warnings

import keras
import keras_hub
import numpy as np
import pytest
from keras import layers

from keras_replicas import data_parallel, make_strategy
from keras_replicas.trainer import Trainer
from tests import conftest

EXAMPLES, BATCH, FEATURES, LENGTH, TOKENS = 9, 4, 3, 6, 12  # two replicas: the second has no example of the last batch
random = np.random.default_rng(0)
X, Y = random.normal(size=(2, EXAMPLES, FEATURES)).astype(np.float32)
IDS = random.integers(1, TOKENS, (EXAMPLES, LENGTH)).astype(np.int32)
TEXT = {"token_ids": IDS, "padding_mask": np.arange(LENGTH) < random.integers(2, LENGTH, (EXAMPLES, 1))}
PAIRS = TEXT | {"segment_ids": np.zeros_like(IDS)}
MASKED = PAIRS | {"mask_positions": np.tile(np.int32([1, 3]), (EXAMPLES, 1))}
HUB = keras_hub.models


def functional():
    inputs = keras.Input((FEATURES,))
    return keras.Model(inputs, layers.Dense(FEATURES)(layers.Dense(4, "tanh")(inputs)))


def sequential():
    return keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(FEATURES)])


class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.dense = layers.Dense(FEATURES)

    def call(self, x):
        return self.dense(x)


@keras.saving.register_keras_serializable("tests_of_the_way_back")
class Registered(Subclassed):
    pass


@data_parallel
@keras.saving.register_keras_serializable("tests_of_the_way_back")
class OursRegistered(Subclassed):
    pass


@keras.saving.register_keras_serializable("tests_of_the_way_back")
@data_parallel
class RegisteredOurs(Subclassed):
    pass


def from_file(model, folder):
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras", custom_objects={"Subclassed": Subclassed})


def from_pickle(model, folder):
    return pickle.loads(pickle.dumps(model))


def from_copy(model, folder):
    return copy.deepcopy(model)


def compiled(make, wrap):
    keras.utils.set_random_seed(0)
    model = wrap(make())
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def trained(model, epochs=1):
    """Losses and metrics by name."""
    return model.fit(X, Y, BATCH, epochs, shuffle=False, verbose=0).history


def what_it_is(model):
    scores = model.evaluate(X, Y, BATCH, verbose=0)
    return [*scores, *model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]


assert_same = functools.partial(conftest.assert_same, rtol=1e-6, atol=1e-6)


KINDS = (functional, sequential, Subclassed, Registered, OursRegistered, RegisteredOurs)
CASES = [(make, from_file, 2) for make in KINDS] + [(functional, from_file, 1), (sequential, from_copy, 2)]
CASES += [(make, from_pickle, 2) for make in (functional, Registered, OursRegistered, RegisteredOurs)]
QUICK = [(sequential, from_file, 2), (RegisteredOurs, from_file, 2)]


@pytest.mark.parametrize(
    ("make", "way", "replicas"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_trained_on_it_is_as_if_nothing_had_been(make, way, replicas, tmp_path):
    """Against plain Keras on one device without a break, with Adam's state; then with one more."""
    plain = compiled(getattr(make, "plain_class", make), lambda model: model)
    strategy = make_strategy(replicas)
    with strategy.scope():
        ours = compiled(make, data_parallel)
    for _ in range(2):
        assert_same(list(trained(ours).values()), list(trained(plain).values()))
        with strategy.scope():
            again = way(ours, tmp_path)
            assert isinstance(again, Trainer) == (make is RegisteredOurs)  # whose registered class is ours
            ours = data_parallel(again)
        assert_same(what_it_is(ours), what_it_is(plain))
    assert_same(list(trained(ours, 2).values()), list(trained(plain, 2).values()))
    assert_same(what_it_is(ours), what_it_is(plain))


@pytest.mark.slow
@pytest.mark.parametrize("make", [functional, sequential])
def test_a_clone_trains_as_plain_keras_s_does_and_weights_go_both_ways(make, tmp_path):
    def outcome(wrap):
        model = compiled(make, wrap)
        trained(model)
        clone = wrap(keras.models.clone_model(model))  # compiled like it
        model.save_weights(tmp_path / f"{wrap.__name__}.weights.h5")
        clone.load_weights(tmp_path / f"{wrap.__name__}.weights.h5")
        return clone, [*trained(clone).values(), *what_it_is(clone)]

    def as_it_is(model):
        return model

    plain, expected = outcome(as_it_is)
    with make_strategy(2).scope():
        ours, found = outcome(data_parallel)
    assert_same(found, expected)
    for model, other in ((ours, "as_it_is"), (plain, "data_parallel")):
        model.load_weights(tmp_path / f"{other}.weights.h5")
    assert_same(ours.evaluate(X, Y, BATCH, verbose=0), plain.evaluate(X, Y, BATCH, verbose=0))


def test_a_model_that_was_loaded_outside_of_the_scope_says_so(tmp_path):
    again = from_file(compiled(functional, data_parallel), tmp_path)
    with make_strategy(2).scope(), pytest.raises(ValueError, match="make or load it in the scope"):
        data_parallel(again)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_plain_model_on_several_replicas_comes_with_a_warning(replicas, tmp_path):
    told = "Functional is a plain model, not exact on several replicas: give it to keras_replicas.data_parallel"
    x, y = X[:8], Y[:8]  # plain Keras builds no model from uneven parts
    uses = {"fit": {"verbose": 0}, "evaluate": {"verbose": 0}, "test_on_batch": {}}
    with make_strategy(replicas).scope(), warnings.catch_warnings(action="error", category=UserWarning):
        ours = compiled(functional, data_parallel)
        ours.fit(x, y, verbose=0)  # or its optimizer would have no state, and Keras would warn
        loaded = from_file(ours, tmp_path)
        loaded.predict(x, verbose=0)
        for use, options in uses.items():
            getattr(ours, use)(x, y, **options)
            with contextlib.nullcontext() if replicas == 1 else pytest.warns(UserWarning, match=told):
                getattr(loaded, use)(x, y, **options)


def test_a_train_step_that_is_no_models_comes_without_a_warning():
    class Loop:  # of one's own, as Orbit's
        def train_step(self):
            return 1

    with warnings.catch_warnings(action="error"):
        make_strategy(2).run(Loop().train_step)


def backbone(kind=HUB.BertBackbone):
    return kind(TOKENS, 1, 2, 8, 16, dropout=0.0, max_sequence_length=LENGTH)


@pytest.fixture(scope="module")
def presets(tmp_path_factory):
    """The folder of each, saved by KerasHub itself, and what it predicts."""
    keras.utils.set_random_seed(1)
    models = {
        "mlm": (HUB.BertMaskedLM(backbone()), MASKED),
        "classifier": (HUB.BertTextClassifier(backbone(), 3), PAIRS),
    }
    found = {}
    for name, (model, x) in models.items():
        folder = str(tmp_path_factory.mktemp(name))
        model.save_to_preset(folder)
        found[name] = folder, model.predict(x, verbose=0)
    return found


@pytest.mark.parametrize(
    ("kind", "name", "x"), [(HUB.BertMaskedLM, "mlm", MASKED), (HUB.TextClassifier, "classifier", PAIRS)]
)
def test_a_preset_has_its_head_for_classes_and_models(kind, name, x, presets):
    folder, predicted = presets[name]
    with make_strategy(2).scope():
        for make in (
            lambda: data_parallel(kind).from_preset(folder, preprocessor=None),
            lambda: data_parallel(kind.from_preset(folder, preprocessor=None)),
            lambda: data_parallel(kind, accumulate=2).from_preset(folder, preprocessor=None),
        ):
            model = make()
            assert isinstance(model, Trainer) and isinstance(model, kind)
            np.testing.assert_allclose(model.predict(x, verbose=0), predicted, atol=1e-6)
        assert model.accumulate == 2


def test_a_new_head_is_the_plain_class_s(presets):
    heads = []
    for make in (HUB.TextClassifier, data_parallel(HUB.TextClassifier)):
        keras.utils.set_random_seed(2)
        model = make.from_preset(presets["mlm"][0], num_classes=4, preprocessor=None)
        heads.append(model.predict(PAIRS, verbose=0))
    assert isinstance(model, HUB.BertTextClassifier) and isinstance(model, Trainer)
    np.testing.assert_allclose(*heads, atol=1e-6)


def test_a_subclass_of_ours_is_made_by_its_own_init(presets):
    class Mine(data_parallel(HUB.BertMaskedLM)):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.mine = True

    assert Mine.from_preset(presets["mlm"][0], preprocessor=None).mine


def test_a_backbone_has_presets_too(presets, tmp_path):
    ours = data_parallel(HUB.BertBackbone).from_preset(presets["mlm"][0])
    ours.save_to_preset(str(tmp_path))
    again = HUB.Backbone.from_preset(str(tmp_path))
    assert isinstance(ours, Trainer) and type(again) is HUB.BertBackbone
    conftest.assert_same(again.get_weights(), ours.get_weights())


@pytest.mark.parametrize("quantised", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_preset_with_lora_is_the_plain_class_s(quantised, tmp_path):
    def outcome(wrap, folder):
        keras.utils.set_random_seed(0)
        model = HUB.GPT2CausalLM(backbone(HUB.GPT2Backbone), preprocessor=None)
        if quantised:
            model.quantize("int8")
        model.backbone.enable_lora(2)
        model = wrap(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1.0, momentum=0.9), loss)
        model.fit(TEXT, IDS, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        model.save_to_preset(folder)
        assert isinstance(model, Trainer) == (wrap is data_parallel)
        again = HUB.CausalLM.from_preset(folder, preprocessor=None)
        assert type(again) is HUB.GPT2CausalLM and len(again.weights) < len(model.weights)
        return model.predict(TEXT, verbose=0), again.predict(TEXT, verbose=0)

    plain = outcome(lambda model: model, str(tmp_path / "plain"))
    with make_strategy(2).scope():
        ours = outcome(data_parallel, str(tmp_path / "ours"))
    conftest.assert_same(ours, plain, rtol=1e-7, atol=1e-3 if quantised else 1e-5)
