# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="recipes")
class WarmUpPolynomialDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up to `peak`, then Keras's `PolynomialDecay` to zero.

    Of W warm-up steps, step s (from 0) has peak * (s + 1) / (W + 1), so that no step is spent at rate zero and the
    warm-up meets the decay, which starts with `peak` at step W and would be zero at `total_steps`. Warm-up and linear
    decay are BERT's (Devlin et al. 2018, arXiv:1810.04805, appendix A.2).

    Args:
        peak: peak learning rate.
        total_steps: steps of the whole run.
        warmup: fraction of all steps that are warm-up, below 1.
        power: of the decay; 1: linear.
    """

    def __init__(self, peak: float, total_steps: int, warmup: float = 0.1, power: float = 1.0):
        self.peak, self.total_steps, self.warmup, self.power = peak, total_steps, warmup, power
        self.warmup_steps = min(int(warmup * total_steps), total_steps - 1)
        self.decay = keras.optimizers.schedules.PolynomialDecay(
            peak, decay_steps=total_steps - self.warmup_steps, end_learning_rate=0.0, power=power
        )

    def __call__(self, step):
        """The rate for optimizer step `step`, a number or scalar tensor counted from 0; a scalar tensor."""
        step = ops.cast(step, "float32")
        warming_up = self.peak * (step + 1) / (self.warmup_steps + 1)
        decaying = self.decay(ops.maximum(step - self.warmup_steps, 0.0))
        return ops.where(step < self.warmup_steps, warming_up, decaying)

    def get_config(self):
        """The constructor's arguments."""
        return {name: getattr(self, name) for name in ("peak", "total_steps", "warmup", "power")}
