# SPDX-License-Identifier: Apache-2.0
"""Train a language model from raw text: tokenizer, TFRecord shards, BERT or RoBERTa, filled masks, publishing.

    python -m recipes run bert_from_scratch                          # about 2 minutes on 2 cores, no network needed
    python -m recipes run bert_from_scratch --corpus my_texts/ --architecture roberta --model small --epochs 10
    python -m recipes run bert_from_scratch --corpus hf://user/name --data gs://bucket/shards --push-to hf://user/model

Time: 2 min on 2 cores. Metric: validation loss, against guessing by word frequency.

A vocabulary is trained on the corpus; all text becomes one row of tokens, cut into sequences of one length and written,
once, as shards. Training reads them in an order drawn anew for every epoch, and masks 15 % of the tokens.
"""

import functools
import os
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what is on the screen is ours

from dataclasses import asdict, dataclass
from typing import Literal

from common.checks import check_accumulate, check_knobs, step_range
from common.command_line import parse, run
from common.scaling import LearningRateScaling


@dataclass(frozen=True)
class Config:
    """The knobs of `bert_from_scratch`."""

    workdir: str = "runs/bert_from_scratch"  # folder of the run: results, logs, preset
    corpus: str = "docstrings"  # docstrings | wikitext-2 | wikitext-103 | hf://user/name | a text file or folder
    data: str = ""  # folder of the tokenizer and the shards, gs:// too; else data/ in the workdir
    shards: int = 0  # TFRecord files of each split; 0: 8, or as many as keep each under 64 MB
    architecture: Literal["bert", "roberta"] = "bert"  # and its tokenizer: WordPiece, or byte-level BPE
    vocabulary_size: int = 4096  # pieces
    model: str = "tiny"  # nano | tiny | mini | small | medium | base | large, or a JSON file of dimensions
    seq_length: int = 128  # tokens in a sequence
    mask_rate: float = 0.15  # share of tokens that are masked
    replicas: int = 0  # 0: every GPU, or the CPU as 2; N: N GPUs, or one GPU or the CPU split in N
    batch_size: int = 16  # sequences on each replica in a step
    learning_rate: float = 7e-4  # peak, for one replica
    lr_scaling: LearningRateScaling = "auto"  # how the rate grows with replicas; auto: linear for sgd, else sqrt
    warmup: float = 0.1  # share of all steps in which the rate rises
    decay_power: float = 1.0  # of the polynomial by which the rate falls to zero; 1: a line
    optimizer: Literal["adamw", "lamb", "sgd"] = "adamw"
    weight_decay: float = 0.01  # not on biases and norms
    clip_norm: float = 1.0  # largest norm of the whole batch's gradient, as BERT's; 0: any
    dropout: float = 0.0  # the papers' is 0.1; a run of few epochs learns more without
    epochs: int = 4
    max_steps: int = 0  # end after this many steps; 0: no cap
    precision: Literal["auto", "float32", "mixed_bfloat16", "mixed_float16"] = "auto"  # auto: by the hardware
    deterministic: bool = False  # on GPUs: the same bits in every run, and float32 without TF32; slower
    accumulate: int = 1  # parts in which a replica computes its batch, to save memory; the batch stays
    jit: bool = False  # compile each replica's forward and backward pass with XLA
    steps_per_execution: int = 1  # steps in one call, whose end a signal to stop waits for
    seed: int = 0  # of weights, order, masks and dropout
    checkpoint_every: int = 100  # steps between two checkpoints, from which a run that was stopped goes on
    push_to: str = ""  # hf://user/name: upload the model in the background at each epoch's end; private, if new
    push_public: bool = False  # make that repository for all to see
    profile_steps: str = ""  # A-B: trace these steps for TensorBoard's profile tab
    dry_run: bool = False  # print the plan, train nothing, write nothing
    overwrite: bool = False  # start afresh in a workdir that holds a run; if stopped, the same command goes on

    def __post_init__(self):
        check_knobs(self)


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is answered at once
    CONFIG = parse(Config, __doc__)

from common.quiet import quiet_stderr

with quiet_stderr():
    import keras
    import tensorflow as tf

from common.byte_pairs import Vocabulary, train_byte_pairs
from common.callbacks import FitCheckpoints, FitLog, Profile
from common.checkpoints import epochs_left
from common.cluster import is_chief
from common.corpora import fingerprint, open_corpus
from common.docstrings import SENTENCES
from common.fill_mask import print_filled_masks
from common.losses import CrossEntropy
from common.masking import MaskingRule, mask_tokens
from common.metrics import unigram_loss
from common.model_card import model_card
from common.models import masked_lm_from_size, model_width, save_preset
from common.optimizers import make_optimizer
from common.plan import print_plan
from common.precision import choose_precision
from common.publish import Publish
from common.rendezvous import chief_alone
from common.results import language_model_scores, report, training_results
from common.runs import open_run, write_json
from common.scaling import global_batch_size, learning_rate_factor, scaling_rule
from common.schedules import WarmUpPolynomialDecay
from common.shard_reader import decode_sequences, read_shards, steps_in_shards
from common.shards import Shards, find_shards, folder_of_dry_run, open_shards, write_shards
from common.speed import model_flops
from common.strategy import distribute, make_strategy
from common.wordpiece import train_wordpieces


def make_datasets(config: Config) -> Shards:
    """The tokenizer and the shards: found, or written by the chief while other workers wait."""
    folder, scratch = config.data or os.path.join(config.workdir, "data"), os.path.join(config.workdir, "tokens")

    def write() -> None:
        nonlocal folder, scratch
        knobs = ("architecture", "vocabulary_size", "seq_length", "shards")
        made_from = {"corpus": fingerprint(config.corpus)} | {name: getattr(config, name) for name in knobs}
        if config.dry_run:  # leaves nothing
            folder = scratch = folder_of_dry_run(config.data, made_from)
        if not find_shards(folder, made_from):
            corpus = open_corpus(config.corpus)
            train = train_wordpieces if config.architecture == "bert" else train_byte_pairs
            vocabulary: Vocabulary = train(corpus["train"], config.vocabulary_size)
            write_shards(corpus, vocabulary, config.seq_length, config.shards, folder, scratch, made_from)

    if config.dry_run:  # each worker for itself
        write()
    else:
        chief_alone(write)
    return open_shards(folder)


def masked_batches(
    shards: Shards, split: str, config: Config, batch_size, replicas, first_step=0, num_shards=1, shard=0
) -> tf.data.Dataset:
    """One reader's batches (x, y, sample_weight), of a replica's size: a pure function of the seed and the step."""
    rule = MaskingRule.of(shards.vocabulary, config.mask_rate)
    training = split == "train"

    def make_batch(epochs, examples, records):
        ids = decode_sequences(records, config.seq_length, rule.pad_id)
        if not training:
            epochs = tf.fill(tf.shape(epochs), tf.constant(-1, tf.int64))  # the same masks in every validation
        return mask_tokens(ids, seeds=tf.stack([config.seed * 2**32 + epochs, examples], axis=1), rule=rule)

    sequences = read_shards(
        shards.folder,
        shards.files(split),
        global_batch_size(batch_size, replicas),
        epochs=config.epochs if training else 1,
        first_step=first_step,
        shuffle_seed=config.seed if training else None,
        num_readers=num_shards,
        reader=shard,
    )
    return sequences.batch(batch_size, drop_remainder=True).map(make_batch, num_parallel_calls=2).prefetch(8)


def build_model(config: Config, vocabulary: Vocabulary, schedule) -> keras.Model:
    """A compiled `BertMaskedLM` or `RobertaMaskedLM`. Call it inside the strategy's scope."""
    model = masked_lm_from_size(config.model, vocabulary, config.dropout, config.seq_length)
    optimizer = make_optimizer(config.optimizer, schedule, config.weight_decay, config.clip_norm)
    loss = CrossEntropy(reduction="mean_with_sample_weight")  # over all labels of the whole batch
    model.compile(optimizer, loss, jit_compile=config.jit, steps_per_execution=config.steps_per_execution)
    model.accumulate = config.accumulate
    return model


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} after a dry run, and for other workers."""
    strategy = make_strategy(config.replicas, config.deterministic)
    folders = ["tokens", *([] if config.data else ["data"]), *(["snapshots"] if config.push_to else [])]
    run = open_run("bert_from_scratch", config, writes=["model_card", *folders])
    if run.results:
        print(f"The run in {run.workdir} is complete; --overwrite starts afresh.")
        return run.results
    keras.utils.set_random_seed(config.seed)
    precision = choose_precision(config.precision, config.jit, model_width("", config.model))
    keras.config.set_dtype_policy(run.keep("chosen_precision", precision))
    replicas = strategy.num_replicas_in_sync
    scaling = scaling_rule(config.lr_scaling, config.optimizer)
    batch_size, peak_rate = run.split(config, replicas, config.learning_rate * learning_rate_factor(scaling, replicas))
    check_accumulate(config.accumulate, batch_size)
    global_batch = global_batch_size(batch_size, replicas)
    shards = make_datasets(config)
    sizes = shards.sizes()
    run.check_data(sizes, shards.checksums())
    steps = {split: steps_in_shards(shards.files(split), global_batch) for split in sizes}
    total_steps = min(steps["train"] * config.epochs, config.max_steps or sys.maxsize)
    schedule = WarmUpPolynomialDecay(peak_rate, int(config.warmup * total_steps), total_steps, config.decay_power)
    with strategy.scope():
        model = build_model(config, shards.vocabulary, schedule)
    print(f"{model.count_params():,} parameters in {keras.config.dtype_policy().name}; {total_steps} steps")
    print(f"batch: {batch_size} sequences x {replicas} replicas = {global_batch}")
    print(f"learning rate: {peak_rate:g} at the peak, {scaling} scaling of {config.learning_rate:g}")

    def batches(split: str, first_step: int = 0):
        return functools.partial(masked_batches, shards, split, config, batch_size, replicas, first_step)

    if config.dry_run:
        tokens = {split: (size, size * config.seq_length) for split, size in sizes.items()}
        print_plan(model, schedule, total_steps, tokens, next(iter(batches("train")())), shards.vocabulary.pieces)
        return {}

    checkpoints = FitCheckpoints(run.workdir, model, config.checkpoint_every)
    flops = model_flops(strategy, model.backbone, config.seq_length, config.mask_rate)
    log = FitLog(run.workdir, asdict(config), steps["train"], checkpoints.restore(), flops)
    profile = Profile(run.workdir, step_range(config.profile_steps))
    save = functools.partial(save_preset, model, shards.vocabulary, config.seq_length)
    publish = Publish(config.push_to, config.push_public, run.workdir, save)
    print(f"going on from step {log.step}" if log.step else f"watch it: tensorboard --logdir {run.workdir}", flush=True)
    scores = {}
    for left in epochs_left(log.step, steps["train"], total_steps):
        with publish:
            history = model.fit(
                distribute(strategy, batches("train", log.step)),
                **left,
                validation_data=distribute(strategy, batches("validation")),
                validation_steps=steps["validation"],
                callbacks=[log, profile, publish, checkpoints],
                verbose=1 if sys.stdout.isatty() else 2,  # a bar for a person, a line an epoch for a log file
                shuffle=False,  # the batches come in their order already
            ).history
        scores["validation"] = {name: history[f"val_{name}"][-1] for name in ("loss", "accuracy")}
    for split in [split for split in sizes if split != "train" and split not in scores]:
        scores[split] = model.evaluate(
            distribute(strategy, batches(split)), steps=steps[split], return_dict=True, verbose=0
        )
    if not is_chief():
        return {}
    results = training_results("bert_from_scratch", config, strategy, global_batch, log)
    never_masked = MaskingRule.of(shards.vocabulary, config.mask_rate).never_masked
    for split, score in scores.items():
        unigram = unigram_loss(shards.token_counts(), (y[w > 0] for _, y, w in batches(split)()), never_masked)
        results |= language_model_scores(split, score["loss"], score["accuracy"], unigram)
    save(preset := run.workdir / "preset")
    (preset / "README.md").write_text(model_card(results), encoding="utf-8")
    write_json(run.workdir / "results.json", results)
    publish.finish(preset)
    return results


def main(config: Config) -> None:
    """Trains, prints the report, and fills a few masks."""
    if results := train_and_evaluate(config):
        print(report(results))
        print_filled_masks(os.path.join(config.workdir, "preset"), SENTENCES)


if __name__ == "__main__":
    run(main, CONFIG)
