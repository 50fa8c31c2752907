"""What `check` compares, and how: traces in, verdict out. No model is trained here."""

import keras
import numpy as np
import pytest

from keras_replicas.checking.comparison import compare, distances, largest_distances
from keras_replicas.checking.traces import GradientSizes, Record, Trace, named_variables


def trace(*records):
    return Trace({}, [Record(kind, step, name, np.asarray(value)) for kind, step, name, value in records], {})


LOSS, WEIGHT = ("training", 1, "loss"), ("weight", 1, "dense/kernel")
PLAIN = trace((*LOSS, 2.0), (*WEIGHT, [3.0, 4.0]))
QUIET = {LOSS: 0.0, WEIGHT: 0.0}


def test_equal_traces_have_no_differences():
    verdict = compare(PLAIN, PLAIN, QUIET)
    assert verdict.differences == [] and verdict.largest == 0.0 and verdict.steps == 1


def test_differences_are_relative_to_plain_keras():
    other = trace((*LOSS, 2.0), (*WEIGHT, [3.0, 4.5]))
    (difference,) = compare(PLAIN, other, QUIET).differences
    assert difference.record.name == "dense/kernel"
    assert difference.relative == pytest.approx(0.5 / 5.0)


def test_a_difference_below_the_limit_is_the_largest():
    other = trace((*LOSS, 2.0 + 1e-7), (*WEIGHT, [3.0, 4.0]))
    verdict = compare(PLAIN, other, QUIET)
    assert verdict.differences == [] and verdict.largest == pytest.approx(5e-8, rel=1e-3)


def test_ten_times_the_noise_is_allowed():
    other = trace((*LOSS, 2.001), (*WEIGHT, [3.0, 4.0]))
    assert compare(PLAIN, other, QUIET | {LOSS: 2e-4}).differences == []
    assert compare(PLAIN, other, QUIET | {LOSS: 5e-5}).differences != []


def test_records_are_compared_by_name_not_by_position():
    assert compare(PLAIN, PLAIN._replace(records=PLAIN.records[::-1]), QUIET).differences == []


@pytest.mark.parametrize("other", [trace((*WEIGHT, [3.0, 4.0])), trace((*LOSS, [2.0, 2.0]), (*WEIGHT, [3.0, 4.0]))])
def test_a_missing_or_reshaped_value_differs(other):
    (difference,) = compare(PLAIN, other, QUIET).differences
    assert difference.record.key == LOSS and difference.relative == np.inf


def test_a_number_that_is_not_finite_differs():
    other = trace((*LOSS, np.nan), (*WEIGHT, [3.0, np.inf]))
    assert [each.record.key for each in compare(PLAIN, other, QUIET).differences] == [LOSS, WEIGHT]


def test_words_are_equal_or_not():
    one, other = trace(("prediction", 1, "output", ["a", "b"])), trace(("prediction", 1, "output", ["a", "c"]))
    noise = distances(one, one)
    assert compare(one, one, noise).differences == []
    assert compare(one, other, noise).differences != []


def test_weights_with_cancelled_gradients_are_left_out():
    def run(value):
        named = [("weight", "w", "w"), ("optimizer state", "adam/w_momentum", "w"), ("weight", "w_gate", "w_gate")]
        return Trace({}, [Record(kind, 1, name, np.asarray(value), weight) for kind, name, weight in named], {})

    differences = compare(run(1.0), run(2.0), distances(run(1.0), run(1.0)), {"w"}).differences
    assert [each.record.name for each in differences] == ["w_gate"]


def test_an_infinite_number_hides_no_other():
    one, other = trace((*WEIGHT, [np.inf, 1.0])), trace((*WEIGHT, [np.inf, 2.0]))
    assert len(compare(one, other, {WEIGHT: 0.0}).differences) == 1
    assert compare(one, one, {WEIGHT: 0.0}).differences == []
    assert len(compare(one, trace(), {WEIGHT: 0.0}).differences) == 1


def test_noise_is_the_largest_over_all_orders():
    others = [trace((*LOSS, 2.0 + by), (*WEIGHT, [3.0, 4.0])) for by in (0.1, 0.3, 0.2)]
    assert largest_distances(PLAIN, others)[LOSS] == pytest.approx(0.3)


def test_names_do_not_depend_on_what_built_a_layer():
    def names(model):
        model.optimizer.build(model.trainable_variables)
        return [each.name for each in named_variables([], [model.optimizer], model.trainable_variables)]

    def compiled():
        model = keras.Sequential([keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")], name="inner")
        model.compile(keras.optimizers.Adam(name="adam"))
        return model

    alone, within = compiled(), compiled()
    alone.build((None, 2))
    keras.Sequential([keras.Input([2]), within], name="outer")
    assert names(alone) == names(within)
    assert {"a/kernel", "b/bias", "adam/a_kernel_momentum", "adam/b_bias_velocity"} < set(names(alone))


@pytest.mark.parametrize("kind", [keras.optimizers.Adafactor, keras.optimizers.Nadam])
def test_names_of_an_optimizer_do_not_depend_on_where_it_was_built(kind):
    """Some of its variables do not have its name in their paths."""

    def names(scope):
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, name="a")])
        optimizer = kind(name="own")
        with keras.name_scope(scope):
            optimizer.build(model.trainable_variables)
        return [each.name for each in named_variables([], [optimizer], model.trainable_variables)]

    assert names("one") == names("other")
    assert all(name.startswith(("own/", "a/")) for name in names("one"))


def test_slots_know_their_weights():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(3, name="a")])
    model.compile(keras.optimizers.Adam(name="adam"))
    model.optimizer.build(model.trainable_variables)
    named = named_variables([], [model.optimizer], model.trainable_variables)
    assert {each.name: each.weight for each in named}["adam/a_kernel_momentum"] == "a/kernel"


def test_variables_of_one_path_have_names_of_their_own():
    one, other = keras.Variable(1.0, name="v"), keras.Variable(2.0, name="v")
    assert [each.name for each in named_variables([one], [], [other])] == ["v", "v (2)"]


def test_gradients_are_measured_relative_to_the_largest():
    sizes = GradientSizes()
    large, small = keras.Variable([0.0, 0.0]), keras.Variable(0.0)
    for _ in range(2):
        sizes.update([np.array([3.0, 4.0]), np.array(5e-9)], [large, small])
    found = {id(variable): size for variable, size in sizes.relative()}
    assert found[id(large)] == 1.0 and found[id(small)] == pytest.approx(1e-9)
