import numpy as np
import tensorflow as tf

from keras_replicas.noise import noise_seeds
from tests.test_data_parallel import make_model


def test_no_two_draws_of_a_run_have_the_same_seed():
    """A seed is two words: the replica is in the high half of the first, and the second has room for 65,536 draws."""
    model = make_model(2, dropout=0.1)
    strategy = model.distribute_strategy
    own = [int(v.value[0]) for v in model.non_trainable_variables if v.name == "seed_generator_state"]
    own.append(model.global_seed)
    for step in (0, 1, 5):
        seeds = strategy.run(lambda step=step: [seed for _, seed in noise_seeds(model, tf.constant(step))])
        for layer, seed in zip(own, seeds, strict=True):
            words = np.array([np.asarray(of_replica) for of_replica in strategy.experimental_local_results(seed)])
            assert words.tolist() == [[layer + (replica << 32), step * 65_536] for replica in range(2)]
