# SPDX-License-Identifier: Apache-2.0
"""Train a causal language model data-parallel, with Keras fit: GPT-2 from scratch, or any preset, with LoRA if asked.

    python -m recipes run causal_lm                                 # about 3 minutes on 2 cores, no network needed
    python -m recipes run causal_lm --corpus wikitext-2 --epochs 10 # Wikipedia, from the Hugging Face Hub
    python -m recipes run causal_lm --preset gpt2_base_en --lora-rank 8 --seq-length 256 --corpus my_texts/

Time: 3 min on 2 cores. Metric: validation loss, against the unigram and bigram baselines.

All text becomes one row of byte pairs, an end token between documents, cut into sequences without padding; the model
learns to predict each token from those before it, across documents' ends too, as GPT-3 did (Brown et al. 2020,
arXiv:2005.14165, section 2.3): that what follows an end token begins anew.
"""

import functools
import os
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log off the screen

from dataclasses import asdict, dataclass
from typing import Literal

from common.data.dialogues import check_texts, is_dialogues, read_dialogues, said_in
from common.model.push_target import check_push_to
from common.model.sizes import CausalSize, check_lora, check_model, check_vocabulary_size
from common.run.command_line import parse, quiet_stderr, run, verbosity
from common.run.options import LanguageModelOptions, set_learning_rate


@dataclass(frozen=True)
class Config(LanguageModelOptions):
    """The options of `causal_lm`, in addition to those of every recipe."""

    workdir: str = "runs/causal_lm"  # work directory: results, logs, checkpoints, preset
    corpus: str = "docstrings"  # docstrings | wikitext-2 | wikitext-103 | hf://user/name | a text file or folder
    data: str = ""  # shards of bert_from_scratch, or .jsonl of prompts with answers, in place of the corpus
    preset: str = ""  # KerasHub name, or folder made by save_to_preset, to start from; empty: random weights
    lora_rank: int | None = None  # train adapters of this rank alone (LoRA), of a preset; default: all weights
    model: CausalSize | None = None  # GPT-2's size, with random weights; default: tiny, unless a preset is given
    vocabulary_size: int = 4096  # byte pairs in a trained vocabulary
    seq_length: int = 64  # tokens per sequence
    batch_size: int = 16  # sequences per replica in a step
    # peak for one replica; default: 0.64 / width, 5e-4 without muon; of a preset 1e-4, with LoRA 1e-3
    learning_rate: float | None = None
    warmup: float = 0.1  # fraction of all steps that are warm-up
    optimizer: Literal["muon", "adamw", "sgd"] = "muon"
    weight_decay: float = 0.01  # not applied to biases and layer norms
    clip_norm: float = 1.0  # global norm to which the gradient is clipped, as GPT-3's; 0: no clipping
    dropout: float = 0.0  # GPT-2's is 0.1; with few epochs, a model learns more without
    epochs: int = 3
    push_to: str = ""  # hf://user/name: upload the model after each epoch, in the background; private, if new
    push_public: bool = False  # create that repository as public

    def __post_init__(self):
        super().__post_init__()
        check_model(self.preset, self.model, self.seq_length)
        check_lora(self.lora_rank, self.preset)
        check_vocabulary_size("roberta", self.vocabulary_size)
        check_texts(self.data, self.corpus, self.workdir)
        check_push_to(self.push_to, self.push_public)
        set_learning_rate(self, self.preset)


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras
    import tensorflow as tf

from common.data.answers import Answers
from common.data.byte_pairs import train_byte_pairs
from common.data.corpora import open_corpus
from common.data.packed_text import PackedText
from common.data.sharded_text import ShardedText, find_text_shards
from common.data.stream import Stream, one_epoch
from common.model.backbones import model_width
from common.model.causal_card import CAUSAL, causal_card
from common.model.causal_lm import make_causal_lm, make_preprocessor, pieces_of, save_causal_lm
from common.model.generate import print_continuations
from common.model.publish import Publish
from common.run.callbacks import FitLog, Profile
from common.run.plan import print_plan
from common.run.results import report, training_results
from common.run.runs import RecipeRun
from common.run.samples import Samples
from common.run.speed import model_flops
from common.scores.causal import causal_scores, count_pairs
from common.training.losses import CrossEntropy
from common.training.optimizers import make_optimizer
from common.training.scaling import Scaled
from common.training.schedules import WarmUpPolynomialDecay
from keras_replicas import Checkpoints, data_parallel, make_strategy


def make_datasets(config: Config) -> PackedText | ShardedText | Answers:
    """The token ids of each split, and the preprocessor, which has their tokenizer."""
    make = functools.partial(make_preprocessor, config.preset, seq_length=config.seq_length)
    if config.data and not is_dialogues(config.data):
        shards = find_text_shards(config.data, config.seq_length)
        return ShardedText(shards, make(shards.vocabulary))
    dialogues = read_dialogues(config.data) if config.data else {}
    corpus = said_in(dialogues) if config.data else open_corpus(config.corpus)
    preprocessor = make(None if config.preset else train_byte_pairs(corpus["train"], config.vocabulary_size))
    return Answers.of(dialogues, preprocessor, config.jit) if config.data else PackedText.of(corpus, preprocessor)


def causal_batches(config: Config, data, split: str, scaled: Scaled) -> Stream:
    """A split's batches (x, y, sample_weight), for `fit`."""

    def shift(ids, is_token, is_label):  # by one: the label of each token is the next one
        x = {"token_ids": ids[:, :-1], "padding_mask": tf.cast(is_token[:, :-1], tf.int32)}
        return x, ids[:, 1:], tf.cast(is_label[:, 1:], tf.float32)

    def from_step(step, num_shards, shard):
        seed = config.seed if split == "train" else None
        return data.rows(split, scaled, seed, step, num_shards, shard).map(shift).prefetch(8)

    return Stream(from_step, data.steps(split, scaled.global_batch_size))


def build_model(config: Config, data, schedule=0.0) -> keras.Model:
    """A compiled `CausalLM`. Call it inside the strategy's scope."""
    size = config.model or "tiny"
    model = make_causal_lm(config.preset, size, data.preprocessor, config.dropout, config.lora_rank)
    optimizer = make_optimizer(config.optimizer, schedule, config.weight_decay, config.clip_norm)
    loss = CrossEntropy(reduction="mean_with_sample_weight")  # over all labels of the whole batch
    model.compile(optimizer, loss, jit_compile=config.jit, steps_per_execution=config.steps_per_execution)
    return data_parallel(model, accumulate=config.accumulate)


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} after a dry run, and for other workers."""
    strategy = make_strategy(config.replicas, deterministic=config.deterministic)
    run = RecipeRun("causal_lm", config)
    if run.results:
        return run.results
    run.configure_keras(config, model_width(config.preset, config.model or "tiny"))
    scaled = run.scale(config, strategy.num_replicas_in_sync, config.learning_rate, config.optimizer)

    data = make_datasets(config)
    run.check_data(data.sizes(), data.checksums())
    batches = {split: causal_batches(config, data, split, scaled) for split in data.sizes()}
    train, replicas = batches.pop("train"), strategy.num_replicas_in_sync

    total_steps = min(len(train) * config.epochs, config.max_steps or sys.maxsize)
    schedule = WarmUpPolynomialDecay(scaled.learning_rate, int(config.warmup * total_steps), total_steps)

    with strategy.scope():
        model = build_model(config, data, schedule)
    if config.dry_run:
        return print_plan(model, schedule, data.count_tokens(), train, total_steps, pieces_of(data.tokenizer))

    options: dict = {"every": config.checkpoint_every, "max_steps": total_steps, "trained_only": bool(config.lora_rank)}
    checkpoints = Checkpoints(run.workdir / "checkpoints", exit_on_sigterm=True, **options)
    log = FitLog(run.workdir, len(train), total_steps, asdict(config), model_flops(model, config))
    save = functools.partial(save_causal_lm, model, config.preset, run.workdir / "adapter")

    with Publish(config.push_to, config.push_public, run.workdir, save, CAUSAL) as publish:
        model.fit(
            train,
            epochs=config.epochs,
            validation_data=batches["validation"],
            callbacks=[log, Samples(log, data), Profile(run.workdir, config.profile_steps), publish, checkpoints],
            verbose=verbosity(),  # a bar on a terminal and in a notebook, one line per epoch in a log file
        )

        results = training_results("causal_lm", config, strategy, scaled.global_batch_size, log)
        pairs = count_pairs(one_epoch(train, replicas), len(train) * replicas, data.tokenizer)
        for split, part in batches.items():
            scores = model.evaluate(part, verbose=0, return_dict=True)
            results |= causal_scores(split, scores, one_epoch(part, replicas), pairs, data.tokenizer)
        results["prompts"] = data.prompts()

        save(run.workdir / "preset", card=causal_card(results))
        return run.finish(results)


def main(config: Config) -> None:
    """Trains, prints the report, and continues a few texts."""
    if results := train_and_evaluate(config):
        print(report(results))
        print_continuations(os.path.join(config.workdir, "preset"), results["prompts"])


if __name__ == "__main__":
    run(main, CONFIG)
