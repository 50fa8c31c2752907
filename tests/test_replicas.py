import numpy as np
import tensorflow as tf

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
