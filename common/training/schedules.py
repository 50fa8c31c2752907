# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="recipes")
class WarmUpPolynomialDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up to `peak` over `warmup_steps`, then Keras's `PolynomialDecay` to zero.

    Step s (from 0) of the warm-up has peak * (s + 1) / (warmup_steps + 1), so that no step is spent at rate zero and
    the warm-up meets the decay, which starts with `peak` at step `warmup_steps` and would be zero at `total_steps`.
    Warm-up and linear decay are BERT's (Devlin et al. 2018, arXiv:1810.04805, appendix A.2).

    Args:
        peak: peak learning rate.
        warmup_steps: steps before the peak; 0 for none.
        total_steps: steps of the whole run.
        power: of the decay; 1: linear.

    Raises:
        ValueError: when the warm-up leaves no step for the decay.
    """

    def __init__(self, peak: float, warmup_steps: int, total_steps: int, power: float = 1.0):
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(f"warmup_steps must be in [0, total_steps); got {warmup_steps} of {total_steps}")
        self.peak = peak
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.power = power
        self.decay = keras.optimizers.schedules.PolynomialDecay(
            peak, decay_steps=total_steps - warmup_steps, end_learning_rate=0.0, power=power
        )

    def __call__(self, step):
        """The rate for optimizer step `step`, a number or scalar tensor counted from 0; a scalar tensor."""
        step = ops.cast(step, "float32")
        warming_up = self.peak * (step + 1) / (self.warmup_steps + 1)
        decaying = self.decay(ops.maximum(step - self.warmup_steps, 0.0))
        return ops.where(step < self.warmup_steps, warming_up, decaying)

    def get_config(self):
        """The constructor's arguments."""
        return {name: getattr(self, name) for name in ("peak", "warmup_steps", "total_steps", "power")}
