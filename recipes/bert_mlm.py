# SPDX-License-Identifier: Apache-2.0
"""Train a BERT masked language model data-parallel, with Keras fit.

    python -m recipes run bert_mlm                                  # about 2 minutes on 2 cores, no network needed
    python -m recipes run bert_mlm --corpus wikitext-2 --epochs 10  # Wikipedia, from the Hugging Face Hub
    python -m recipes run bert_mlm --preset bert_base_en_uncased --learning-rate 5e-5 --corpus my_texts/

Time: 2 min on 2 cores. Metric: validation loss, against the unigram baseline.

Text becomes word pieces in sequences of one length; 30 % are masked, anew in every epoch, and the model learns to
predict them. Each replica takes an equal part of every batch, and a step applies the summed gradients.
"""

import functools
import os

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log off the screen

from dataclasses import asdict, dataclass
from typing import Literal

from common.data.corpora import check_corpus
from common.model.sizes import Size, check_model
from common.run.command_line import parse, quiet_stderr, run, verbosity
from common.run.options import LanguageModelOptions, set_defaults


@dataclass(frozen=True)
class Config(LanguageModelOptions):
    """The options of `bert_mlm`, in addition to those of every recipe."""

    workdir: str = "runs/bert_mlm"  # work directory: results, logs, checkpoints, preset
    corpus: str = "docstrings"  # docstrings | wikitext-2 | wikitext-103 | hf://user/name | a text file or folder
    preset: str = ""  # KerasHub name, or folder made by save_to_preset, to start from; empty: random weights
    model: Size | None = None  # BERT's size, with random weights; default: tiny, unless a preset is given
    vocabulary: str = ""  # WordPiece file, one word piece per line; empty: trained on the corpus
    vocabulary_size: int = 4096  # word pieces in a trained vocabulary
    seq_length: int = 64  # tokens per sequence
    pack: Literal["full", "none"] = "full"  # full: no padding; none: one line per sequence, padded within its batch
    mask_rate: float = 0.3  # fraction of tokens that are masked in training; 0.15 in validation, for any
    batch_size: int = 16  # sequences per replica in a step
    learning_rate: float | None = None  # peak for one replica; default: 0.64 / width, 5e-4 without muon; preset: 1e-4
    warmup: float = 0.1  # fraction of all steps that are warm-up
    optimizer: Literal["muon", "adamw", "lamb", "sgd"] = "muon"
    weight_decay: float = 0.01  # not applied to biases and layer norms
    clip_norm: float = 1.0  # global norm to which the gradient is clipped, as BERT's; 0: no clipping
    dropout: float = 0.0  # BERT's is 0.1; with few epochs, a model learns more without
    epochs: int | None = None  # default: 3, unless --minutes is given

    def __post_init__(self):
        super().__post_init__()
        check_model(self.preset, self.model, self.seq_length, self.vocabulary)
        check_corpus(self.corpus, self.workdir)
        set_defaults(self, self.preset)


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras
    import tensorflow as tf

from common.data.byte_pairs import Vocabulary
from common.data.corpora import open_corpus
from common.data.masking import EVALUATION_RATE, MaskingRule, mask_seeds, mask_tokens
from common.data.packing import checksums, count_tokens, make_all_sequences, read_sequences
from common.data.wordpiece import load_wordpieces, train_wordpieces
from common.model.backbones import model_width
from common.model.fill_mask import print_filled_masks
from common.model.masked_lm import masked_lm_from_preset, masked_lm_from_size, preset_vocabulary
from common.model.saving import save_preset
from common.run.callbacks import FitCheckpoints, FitLog, Profile
from common.run.minutes import choose_size, count_steps
from common.run.plan import print_plan
from common.run.results import report, training_results
from common.run.runs import open_run
from common.run.speed import model_flops
from common.scores.language_model import count_ids, language_model_scores
from common.training.losses import CrossEntropy
from common.training.optimizers import make_optimizer
from common.training.schedules import WarmUpPolynomialDecay
from keras_replicas.order import Scaled, locate, steps_per_epoch
from keras_replicas.strategy import distribute, make_strategy


def make_datasets(config: Config) -> tuple[Vocabulary, dict[str, tf.Tensor]]:
    """The vocabulary, and for each split of the corpus a tensor [sequences, seq_length] of token ids."""
    corpus = open_corpus(config.corpus)
    if config.preset:
        vocabulary = preset_vocabulary(config.preset)
    elif config.vocabulary:
        vocabulary = load_wordpieces(config.vocabulary)
    else:
        vocabulary = train_wordpieces(corpus["train"], config.vocabulary_size)
    return vocabulary, make_all_sequences(corpus, vocabulary, config.seq_length, pack=config.pack == "full")


def masked_batches(
    config: Config, vocabulary, sequences, scaled: Scaled, split, first_step=0, num_shards=1, shard=0
) -> tf.data.Dataset:
    """One shard's batches (x, y, sample_weight), of a replica's size each: a pure function of the seed and the step."""
    rule = MaskingRule.of(vocabulary)
    examples, training = len(sequences[split]), split == "train"
    global_batch = scaled.global_batch_size
    end = tf.int64.max if training else steps_per_epoch(examples, global_batch) * global_batch

    def make_batch(positions):
        epochs, numbers = locate(positions, examples, global_batch, config.seed if training else None)
        ids = read_sequences(sequences[split], numbers, rule.pad_id, trim=config.pack == "none")
        rate = config.mask_rate if training else EVALUATION_RATE
        return mask_tokens(ids, mask_seeds(config.seed, epochs if training else None, numbers), rule, rate)

    positions = tf.data.Dataset.range(first_step * global_batch, end)
    positions = positions.shard(num_shards, shard).batch(scaled.batch_size, drop_remainder=True)
    return positions.map(make_batch, num_parallel_calls=2).prefetch(8)


def build_model(config: Config, vocabulary: Vocabulary, schedule=0.0, last_step: int | None = None) -> keras.Model:
    """A compiled `BertMaskedLM`, which `fit` trains up to `last_step`. Call it inside the strategy's scope."""
    if config.preset:
        model = masked_lm_from_preset(config.preset, config.dropout)
    else:
        model = masked_lm_from_size(config.model or "tiny", vocabulary, config.dropout, config.seq_length)
    optimizer = make_optimizer(config.optimizer, schedule, config.weight_decay, config.clip_norm)
    loss = CrossEntropy(reduction="mean_with_sample_weight")  # over all labels of the whole batch
    model.compile(optimizer, loss, jit_compile=config.jit, steps_per_execution=config.steps_per_execution)
    model.accumulate, model.wire, model.last_step = config.accumulate, config.wire, last_step
    return model


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} after a dry run, and for other workers."""
    strategy = make_strategy(config.replicas, deterministic=config.deterministic)
    run = open_run("bert_mlm", config)
    if run.results:
        return run.results
    config = choose_size(config, run, strategy)
    run.configure_keras(config, model_width(config.preset, config.model or "tiny"))
    scaled = run.scale(config, strategy.num_replicas_in_sync, config.learning_rate, config.optimizer)

    vocabulary, sequences = make_datasets(config)
    run.check_data({split: len(part) for split, part in sequences.items()}, checksums(sequences))
    batches = functools.partial(masked_batches, config, vocabulary, sequences, scaled)
    steps = {split: steps_per_epoch(len(part), scaled.global_batch_size) for split, part in sequences.items()}

    build = functools.partial(build_model, config, vocabulary)
    total_steps = count_steps(config, run, strategy, steps, build, batches)
    schedule = WarmUpPolynomialDecay(scaled.learning_rate, int(config.warmup * total_steps), total_steps)

    with strategy.scope():
        model = build(schedule, total_steps)
    if config.dry_run:
        return print_plan(model, schedule, count_tokens(sequences, vocabulary), batches("train"), vocabulary.pieces)

    checkpoints = FitCheckpoints(run.workdir, model, config.checkpoint_every)
    log = FitLog(run.workdir, asdict(config), steps["train"], checkpoints.restore(), model_flops(model, config))

    model.fit(
        distribute(strategy, batches, "train", log.step),
        epochs=-(-total_steps // steps["train"]),
        steps_per_epoch=steps["train"],
        validation_data=distribute(strategy, batches, "validation"),
        validation_steps=steps["validation"],
        callbacks=[log, Profile(run.workdir, config.profile_steps), checkpoints],
        verbose=verbosity(),  # a bar on a terminal and in a notebook, one line per epoch in a log file
    )

    results = training_results("bert_mlm", config, strategy, scaled.global_batch_size, log)
    for split in [split for split in sequences if split != "train"]:
        scores = model.evaluate(distribute(strategy, batches, split), steps=steps[split], verbose=0, return_dict=True)
        counts = count_ids(sequences["train"], vocabulary)
        results |= language_model_scores(split, scores, batches(split), counts, vocabulary)

    save_preset(model, vocabulary, config.seq_length, run.workdir / "preset")
    return run.finish(results)


def main(config: Config) -> None:
    """Trains, prints the report, and fills a few masks."""
    if results := train_and_evaluate(config):
        print(report(results))
        print_filled_masks(os.path.join(config.workdir, "preset"))


if __name__ == "__main__":
    run(main, CONFIG)
