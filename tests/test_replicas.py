"""What replicas tell each other, and several steps in one call."""

import numpy as np
import tensorflow as tf

from keras_replicas.loop import steps_in_one_call
from keras_replicas.replicas import gather_over_replicas
from tests.conftest import collective_strategy


def test_logits_of_any_precision_are_gathered_by_collectives():
    """As between workers, and by NCCL: of the 16-bit types, TensorFlow's gather has float16 alone."""
    strategy = collective_strategy()
    dtypes = ("float32", "float16", "bfloat16")

    @tf.function
    def gathered():
        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            examples = tf.range(3, dtype=tf.int64) + 3 * tf.cast(replica, tf.int64)
            return gather_over_replicas((examples, [tf.cast(examples[:, None], dtype) / 2 for dtype in dtypes]))

        return strategy.run(on_replica)

    everywhere, all_logits = gathered()
    for examples in strategy.experimental_local_results(everywhere):
        np.testing.assert_array_equal(examples, range(6))
    for logits in all_logits:
        for rows in strategy.experimental_local_results(logits):
            np.testing.assert_array_equal(tf.cast(rows, tf.float32)[:, 0], np.arange(6) / 2)


def test_each_step_of_a_call_has_its_values_in_their_shapes_and_knows_of_the_stop():
    def step(iterator, stop):
        number = next(iterator)
        return {"number": number, "table": tf.reshape(tf.range(6) + 6 * number, [2, 3]), "stop": stop}

    run_steps = steps_in_one_call(step)
    data = iter(tf.data.Dataset.range(5, output_type=tf.int32))
    for count, stop in ((3, False), (2, True)):
        values = run_steps(data, count, stop)
        first = 0 if count == 3 else 3
        np.testing.assert_array_equal(values["number"], range(first, first + count))
        np.testing.assert_array_equal(values["table"], np.arange(6 * first, 6 * (first + count)).reshape(count, 2, 3))
        assert values["stop"].tolist() == [float(stop)] * count
