# SPDX-License-Identifier: Apache-2.0
"""Train a language model from raw text: tokenizer, TFRecord shards, BERT or RoBERTa, filled masks, publishing.

    python -m recipes run bert_from_scratch                          # about 2 minutes on 2 cores, no network needed
    python -m recipes run bert_from_scratch --corpus my_texts/ --architecture roberta --model small --epochs 10
    python -m recipes run bert_from_scratch --corpus hf://user/name --data gs://bucket/shards --push-to hf://user/model

Time: 2 min on 2 cores. Metric: validation loss, against the unigram baseline.

A vocabulary is trained on the corpus; all text becomes one row of tokens, cut into sequences of one length and written,
once, as shards. Training reads them in a new order in every epoch, and masks 30 % of the tokens.
"""

import functools
import os
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log off the screen

from dataclasses import asdict, dataclass
from typing import Literal

from common.data.corpora import check_corpus
from common.model.push_target import check_push_to
from common.model.sizes import check_model, check_vocabulary_size
from common.run.command_line import parse, quiet_stderr, run, verbosity
from common.run.options import LanguageModelOptions, set_learning_rate


@dataclass(frozen=True)
class Config(LanguageModelOptions):
    """The options of `bert_from_scratch`, in addition to those of every recipe."""

    workdir: str = "runs/bert_from_scratch"  # work directory: results, logs, checkpoints, preset
    corpus: str = "docstrings"  # docstrings | wikitext-2 | wikitext-103 | hf://user/name | a text file or folder
    data: str = ""  # folder of the tokenizer and the shards, local or gs://; empty: data/ in the workdir
    shards: int = 0  # TFRecord files per split; 0: 8, or as many as keep each under 64 MB
    architecture: Literal["bert", "roberta"] = "bert"  # with its tokenizer: WordPiece, or byte-level BPE
    vocabulary_size: int = 4096  # tokens in the vocabulary
    model: str | None = None  # nano | tiny | mini | small | medium | base | large, or a JSON file; default: tiny
    seq_length: int = 64  # tokens per sequence
    mask_rate: float = 0.3  # fraction of tokens that are masked in training; 0.15 in validation, for any
    batch_size: int = 16  # sequences per replica in a step
    learning_rate: float | None = None  # peak for one replica; default: 0.64 / width, 5e-4 without muon
    warmup: float = 0.1  # fraction of all steps that are warm-up
    decay_power: float = 1.0  # power of the polynomial decay of the learning rate; 1: linear
    optimizer: Literal["muon", "adamw", "sgd"] = "muon"
    weight_decay: float = 0.01  # not applied to biases and layer norms
    clip_norm: float = 1.0  # global norm to which the gradient is clipped, as BERT's; 0: no clipping
    dropout: float = 0.0  # the papers' is 0.1; with few epochs, a model learns more without
    epochs: int = 3
    push_to: str = ""  # hf://user/name: upload the model after each epoch, in the background; private, if new
    push_public: bool = False  # create that repository as public

    def __post_init__(self):
        super().__post_init__()
        check_model("", self.model, self.seq_length)
        check_corpus(self.corpus, self.workdir)
        check_push_to(self.push_to, self.push_public)
        check_vocabulary_size(self.architecture, self.vocabulary_size)
        set_learning_rate(self)


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras
    import tensorflow as tf

from common.data.byte_pairs import Vocabulary
from common.data.masking import EVALUATION_RATE, MaskingRule, mask_seeds, mask_tokens
from common.data.shard_reader import decode_sequences, read_shards, steps_in_shards
from common.data.shard_writer import OPTIONS, make_shards
from common.data.shards import Shards, open_shards
from common.data.stream import Stream, one_epoch
from common.model.backbones import model_width
from common.model.fill_mask import print_filled_masks
from common.model.masked_card import MASKED, masked_card
from common.model.masked_lm import masked_lm_from_size
from common.model.publish import Publish
from common.model.saving import save_preset
from common.run.callbacks import FitLog, Profile
from common.run.plan import print_plan
from common.run.results import report, training_results
from common.run.run_folder import chief_alone
from common.run.runs import RecipeRun
from common.run.speed import model_flops
from common.scores.language_model import language_model_scores
from common.training.losses import CrossEntropy
from common.training.optimizers import make_optimizer
from common.training.scaling import Scaled
from common.training.schedules import WarmUpPolynomialDecay
from keras_replicas import Checkpoints, data_parallel, make_strategy


def make_datasets(config: Config) -> Shards:
    """The tokenizer and the shards: found, or written by the chief while other workers wait."""
    options = {name: getattr(config, name) for name in OPTIONS}
    make = functools.partial(make_shards, options, scratch=os.path.join(config.workdir, "tokens"))
    if config.dry_run:  # each worker for itself
        return open_shards(make(folder=config.data, dry_run=True))
    folder = config.data or os.path.join(config.workdir, "data")
    chief_alone(lambda: make(folder=folder))
    return open_shards(folder)


def masked_batches(config: Config, shards: Shards, split: str, scaled: Scaled) -> Stream:
    """A split's batches (x, y, sample_weight), for `fit`."""
    training, rule = split == "train", MaskingRule.of(shards.vocabulary)
    epochs, seed = (tf.int64.max, config.seed) if training else (1, None)

    def make_batch(epochs, examples, records):
        ids = decode_sequences(records, config.seq_length, rule.pad_id)
        rate = config.mask_rate if training else EVALUATION_RATE
        return mask_tokens(ids, mask_seeds(config.seed, epochs if training else None, examples), rule, rate)

    def from_step(step, num_readers, reader):
        sequences = read_shards(shards, split, scaled.global_batch_size, epochs, seed, step, num_readers, reader)
        return sequences.batch(scaled.batch_size, drop_remainder=True).map(make_batch, num_parallel_calls=2).prefetch(8)

    return Stream(from_step, steps_in_shards(shards.files(split), scaled.global_batch_size))


def build_model(config: Config, vocabulary: Vocabulary, schedule=0.0) -> keras.Model:
    """A compiled `BertMaskedLM` or `RobertaMaskedLM`. Call it inside the strategy's scope."""
    model = masked_lm_from_size(config.model or "tiny", vocabulary, config.dropout, config.seq_length)
    optimizer = make_optimizer(config.optimizer, schedule, config.weight_decay, config.clip_norm)
    loss = CrossEntropy(reduction="mean_with_sample_weight")  # over all labels of the whole batch
    model.compile(optimizer, loss, jit_compile=config.jit, steps_per_execution=config.steps_per_execution)
    return data_parallel(model, accumulate=config.accumulate)


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} after a dry run, and for other workers."""
    strategy = make_strategy(config.replicas, deterministic=config.deterministic)
    run = RecipeRun("bert_from_scratch", config)
    if run.results:
        return run.results
    run.configure_keras(config, model_width("", config.model or "tiny"))
    scaled = run.scale(config, strategy.num_replicas_in_sync, config.learning_rate, config.optimizer)

    shards = make_datasets(config)
    run.check_data(shards.sizes(), shards.checksums())
    batches = {split: masked_batches(config, shards, split, scaled) for split in shards.sizes()}
    train = batches.pop("train")
    total = min(len(train) * config.epochs, config.max_steps or sys.maxsize)
    schedule = WarmUpPolynomialDecay(scaled.learning_rate, int(config.warmup * total), total, config.decay_power)

    with strategy.scope():
        model = build_model(config, shards.vocabulary, schedule)
    if config.dry_run:
        return print_plan(model, schedule, shards.count_tokens(), train, total, shards.vocabulary.pieces)

    options: dict = {"every": config.checkpoint_every, "max_steps": total}
    checkpoints = Checkpoints(run.workdir / "checkpoints", exit_on_sigterm=True, **options)
    log = FitLog(run.workdir, len(train), total, asdict(config), model_flops(model, config))
    save = functools.partial(save_preset, model, shards.vocabulary, config.seq_length)

    with Publish(config.push_to, config.push_public, run.workdir, save, MASKED) as publish:
        model.fit(
            train,
            epochs=config.epochs,
            validation_data=batches["validation"],
            callbacks=[log, Profile(run.workdir, config.profile_steps), publish, checkpoints],
            verbose=verbosity(),  # a bar on a terminal and in a notebook, one line per epoch in a log file
        )

        results = training_results("bert_from_scratch", config, strategy, scaled.global_batch_size, log)
        for split, part in batches.items():
            scores = model.evaluate(part, verbose=0, return_dict=True)
            targets = one_epoch(part, strategy.num_replicas_in_sync)
            results |= language_model_scores(split, scores, targets, shards.token_counts(), shards.vocabulary)

        save(run.workdir / "preset", card=masked_card(results))
        return run.finish(results)


def main(config: Config) -> None:
    """Trains, prints the report, and fills a few masks."""
    if results := train_and_evaluate(config):
        print(report(results))
        print_filled_masks(os.path.join(config.workdir, "preset"))


if __name__ == "__main__":
    run(main, CONFIG)
