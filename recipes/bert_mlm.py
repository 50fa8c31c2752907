# SPDX-License-Identifier: Apache-2.0
"""Train a BERT masked language model data-parallel, with Keras fit.

    python -m recipes run bert_mlm                                  # about 2 minutes on 2 cores, no network needed
    python -m recipes run bert_mlm --corpus wikitext-2 --epochs 10  # Wikipedia, from the Hugging Face Hub
    python -m recipes run bert_mlm --preset bert_base_en_uncased --learning-rate 5e-5 --corpus my_texts/

Time: 2 min on 2 cores. Metric: validation loss, against the unigram baseline.

Text becomes word pieces in sequences of one length; 30 % are masked, anew in every epoch, and the model learns to
predict them. Each replica takes an equal part of every batch, and a step applies the summed gradients.
"""

import os
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log off the screen

from dataclasses import asdict, dataclass
from typing import Literal

from common.data.corpora import check_corpus
from common.model.sizes import Size, check_model
from common.run.command_line import parse, quiet_stderr, run, verbosity
from common.run.options import LanguageModelOptions, set_learning_rate


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
    optimizer: Literal["muon", "adamw", "sgd"] = "muon"
    weight_decay: float = 0.01  # not applied to biases and layer norms
    clip_norm: float = 1.0  # global norm to which the gradient is clipped, as BERT's; 0: no clipping
    dropout: float = 0.0  # BERT's is 0.1; with few epochs, a model learns more without
    epochs: int = 3

    def __post_init__(self):
        super().__post_init__()
        check_model(self.preset, self.model, self.seq_length, self.vocabulary)
        check_corpus(self.corpus, self.workdir)
        set_learning_rate(self, self.preset)


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras
    import tensorflow as tf

from common.data.byte_pairs import Vocabulary
from common.data.corpora import open_corpus
from common.data.masking import EVALUATION_RATE, MaskingRule, mask_seeds, mask_tokens
from common.data.packing import checksums, count_tokens, make_all_sequences, read_sequences
from common.data.stream import one_epoch
from common.data.wordpiece import load_wordpieces, train_wordpieces
from common.model.backbones import model_width
from common.model.fill_mask import print_filled_masks
from common.model.masked_lm import masked_lm_from_preset, masked_lm_from_size, preset_vocabulary
from common.model.saving import save_preset
from common.run.callbacks import FitLog, Profile
from common.run.plan import print_plan
from common.run.results import report, training_results
from common.run.runs import RecipeRun
from common.run.speed import model_flops
from common.scores.language_model import count_ids, language_model_scores
from common.training.losses import CrossEntropy
from common.training.optimizers import make_optimizer
from common.training.schedules import WarmUpPolynomialDecay
from keras_replicas import Batches, Checkpoints, data_parallel, make_strategy


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
    config: Config, vocabulary: Vocabulary, sequences: dict[str, tf.Tensor], split: str, batch_size: int
):
    """A split's batches (x, y, sample_weight), for `fit`; `batch_size` is of all replicas together."""
    rule, training = MaskingRule.of(vocabulary), split == "train"

    def make_batch(epochs, numbers):
        ids = read_sequences(sequences[split], numbers, rule.pad_id, trim=config.pack == "none")
        rate = config.mask_rate if training else EVALUATION_RATE
        return mask_tokens(ids, mask_seeds(config.seed, epochs if training else None, numbers), rule, rate)

    return Batches(make_batch, batch_size, size=len(sequences[split]), shuffle=training, seed=config.seed)


def build_model(config: Config, vocabulary: Vocabulary, schedule=0.0) -> keras.Model:
    """A compiled `BertMaskedLM`. Call it inside the strategy's scope."""
    if config.preset:
        model = masked_lm_from_preset(config.preset, config.dropout)
    else:
        model = masked_lm_from_size(config.model or "tiny", vocabulary, config.dropout, config.seq_length)
    optimizer = make_optimizer(config.optimizer, schedule, config.weight_decay, config.clip_norm)
    loss = CrossEntropy(reduction="mean_with_sample_weight")  # over all labels of the whole batch
    model.compile(optimizer, loss, jit_compile=config.jit, steps_per_execution=config.steps_per_execution)
    return data_parallel(model, accumulate=config.accumulate)


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} after a dry run, and for other workers."""
    strategy = make_strategy(config.replicas, deterministic=config.deterministic)
    run = RecipeRun("bert_mlm", config)
    if run.results:
        return run.results
    run.configure_keras(config, model_width(config.preset, config.model or "tiny"))
    scaled = run.scale(config, strategy.num_replicas_in_sync, config.learning_rate, config.optimizer)

    vocabulary, sequences = make_datasets(config)
    run.check_data({split: len(part) for split, part in sequences.items()}, checksums(sequences))
    size = scaled.global_batch_size
    batches = {part: masked_batches(config, vocabulary, sequences, part, size) for part in sequences}
    train = batches.pop("train")

    total_steps = min(len(train) * config.epochs, config.max_steps or sys.maxsize)
    schedule = WarmUpPolynomialDecay(scaled.learning_rate, int(config.warmup * total_steps), total_steps)

    with strategy.scope():
        model = build_model(config, vocabulary, schedule)
    if config.dry_run:
        return print_plan(model, schedule, count_tokens(sequences, vocabulary), train, total_steps, vocabulary.pieces)

    options: dict = {"every": config.checkpoint_every, "max_steps": total_steps}
    checkpoints = Checkpoints(run.workdir / "checkpoints", exit_on_sigterm=True, **options)
    log = FitLog(run.workdir, len(train), total_steps, asdict(config), model_flops(model, config))

    model.fit(
        train,
        epochs=config.epochs,
        validation_data=batches["validation"],
        callbacks=[log, Profile(run.workdir, config.profile_steps), checkpoints],
        verbose=verbosity(),  # a bar on a terminal and in a notebook, one line per epoch in a log file
    )

    results = training_results("bert_mlm", config, strategy, scaled.global_batch_size, log)
    counts = count_ids(sequences["train"], vocabulary)
    for split, part in batches.items():
        scores = model.evaluate(part, verbose=0, return_dict=True)
        targets = one_epoch(part, strategy.num_replicas_in_sync)
        results |= language_model_scores(split, scores, targets, counts, vocabulary)

    save_preset(model, vocabulary, config.seq_length, run.workdir / "preset")
    return run.finish(results)


def main(config: Config) -> None:
    """Trains, prints the report, and fills a few masks."""
    if results := train_and_evaluate(config):
        print(report(results))
        print_filled_masks(os.path.join(config.workdir, "preset"))


if __name__ == "__main__":
    run(main, CONFIG)
