"""Each option of `data_parallel` survives each way of making a model."""

import pickle

import keras
import keras_hub
import numpy as np
import pytest

from keras_replicas import data_parallel, make_strategy
from keras_replicas.model import OPTIONS
from tests.conftest import slow

VALUES = {"accumulate": 2, "mean_over": "labels", "custom_step": "sum", "probe_call": False}
DEFAULTS = {"accumulate": 1, "mean_over": "examples", "custom_step": None, "probe_call": True}


class Mine(keras.Model):
    def __init__(self, units=2, **options):
        super().__init__(**options)
        self.units = units
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return super().get_config() | {"units": self.units}


def backbone():
    return keras_hub.models.BertBackbone(
        vocabulary_size=9, num_layers=1, num_heads=1, hidden_dim=4, intermediate_dim=4, max_sequence_length=6
    )


def classifier():
    return keras_hub.models.BertTextClassifier(backbone(), num_classes=2, preprocessor=None)


def from_preset(option, folder):
    classifier().save_to_preset(folder)
    kind = data_parallel(keras_hub.models.BertTextClassifier, **option)
    return kind.from_preset(str(folder), num_classes=2, preprocessor=None)


def loaded(option, folder):
    made = data_parallel(Mine(), **option)
    made(np.ones((2, 3), "float32"))
    made.save(folder / "mine.keras")
    return data_parallel(keras.models.load_model(folder / "mine.keras", {"Mine": Mine}), **option)


def functional(kind=keras.Model):
    inputs = keras.Input((3,))
    return kind(inputs, keras.layers.Dense(1)(inputs))


WAYS = {
    "a class": lambda option, _: data_parallel(Mine, **option)(),
    "a subclass of such a class": lambda option, _: type("Sub", (data_parallel(Mine, **option),), {})(),
    "a functional class": lambda option, _: functional(data_parallel(keras.Model, **option)),
    "an instance": lambda option, _: data_parallel(Mine(), **option),
    "a functional model": lambda option, _: data_parallel(functional(), **option),
    "from_config": lambda option, _: data_parallel(Mine, **option).from_config({"units": 3}),
    "from_config of a model": lambda option, _: (lambda made: type(made).from_config(made.get_config()))(
        data_parallel(Mine(3), **option)
    ),
    "a clone": lambda option, _: keras.models.clone_model(functional(data_parallel(keras.Model, **option))),
    "a second data_parallel": lambda option, _: data_parallel(data_parallel(Mine(), **option)),
    "a second data_parallel of the class": lambda option, _: data_parallel(data_parallel(Mine, **option))(),
    "a preset": from_preset,
    "a file": loaded,
    "pickle": lambda option, _: data_parallel(pickle.loads(pickle.dumps(functional())), **option),
}


def options_of(model):
    return {name: getattr(model, name) for name in OPTIONS}


def test_the_table_has_every_option():
    assert tuple(VALUES) == tuple(DEFAULTS) == OPTIONS


@pytest.mark.parametrize(
    "way",
    [
        "an instance",
        "a second data_parallel",
        *slow(*(way for way in WAYS if way not in ("an instance", "a second data_parallel"))),
    ],
)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_survives(name, way, tmp_path):
    with make_strategy(2).scope():
        made = WAYS[way]({name: VALUES[name]}, tmp_path)
    assert options_of(made) == DEFAULTS | {name: VALUES[name]}


def test_a_second_data_parallel_changes_what_it_is_given():
    with make_strategy(2).scope():
        made = data_parallel(data_parallel(Mine(), accumulate=2, mean_over="labels"), accumulate=4)
    assert options_of(made) == DEFAULTS | {"accumulate": 4, "mean_over": "labels"}
