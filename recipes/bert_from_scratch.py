# SPDX-License-Identifier: Apache-2.0
"""Train a language model from raw text: tokenizer, TFRecord shards, BERT or RoBERTa, publishing while it trains.

    python -m recipes run bert_from_scratch                          # about 2 minutes on 2 cores, no network needed
    python -m recipes run bert_from_scratch --corpus my_texts/ --architecture roberta --model small --epochs 10
    python -m recipes run bert_from_scratch --corpus hf://user/name --data gs://bucket/rows --push-to hf://user/model

Time: 2 min on 2 cores. Metric: validation loss, against the unigram baseline.

A vocabulary is trained on the corpus; all text becomes one row of tokens, cut into rows of one length and written,
once, as shards. Training reads them in a new order in every epoch, and masks 30 % of the tokens.
"""

import functools
import os
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log off the screen

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from common.command_line import FIRST, FREE, INPUT, Bounds, LanguageModelOptions, parse, quiet_stderr, run
from common.model.sizes import check_model, check_push_to


@dataclass(frozen=True)
class Config(LanguageModelOptions):
    """The options of `bert_from_scratch`, in addition to those of every recipe."""

    # work directory: results, logs, checkpoints, preset
    workdir: Annotated[str, FIRST, FREE] = "runs/bert_from_scratch"
    # folder of the shards, local or gs://, also of tf.train.Example with their tokenizer; empty: in the workdir
    data: Annotated[str, FIRST, FREE] = ""
    architecture: Literal["bert", "roberta"] = "bert"  # with its tokenizer: WordPiece, or byte-level BPE
    vocabulary_size: Annotated[int, Bounds(262, 2**20)] = 2048  # tokens in the vocabulary
    # nano | micro | tiny | mini | small | medium | base | large, or a JSON file
    model: Annotated[str, FIRST, INPUT] = "micro"
    mask_rate: Annotated[float, Bounds(0.01, 0.99)] = 0.3  # fraction of tokens masked in training; 0.15 in validation
    push_to: Annotated[str, FREE] = ""  # hf://user/name: upload the model after each epoch, in the background
    push_public: Annotated[bool, FREE] = False  # if it is new there, it is public

    def __post_init__(self):
        super().__post_init__()
        check_model("", self.model, self.seq_length)
        check_push_to(self.push_to, self.push_public)


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras
    import keras_hub

from common.data.byte_pairs import train_byte_pairs
from common.data.corpora import open_corpus
from common.data.masking import EVALUATION_RATE, mask_seeds, mask_tokens
from common.data.row_folders import holds_examples, keep_in, open_folder
from common.data.rows import RowBatches, Rows, corpus_rows
from common.data.vocabulary import train_wordpieces
from common.language_model import language_model_scores, muon, told_of
from common.log import RunLog, print_plan, report
from common.model.masked_lm import masked_lm_from_size
from common.model.publish import Publish
from common.run_folder import chief_alone, open_run
from common.training import Accuracy, CrossEntropy, WarmUpPolynomialDecay, scale
from keras_replicas import Checkpoints, data_parallel, make_strategy


def make_datasets(config: Config, batch_size: int) -> tuple[keras_hub.models.Tokenizer, dict[str, RowBatches]]:
    """The tokenizer, and the batches of each split; its rows are found, or written by the chief while others wait."""
    folder, length = config.data or os.path.join(config.workdir, "data"), config.seq_length - 2  # for [CLS] and [SEP]
    if holds_examples(folder):  # which come with their tokenizer
        rows, tokenizer = open_folder(folder, length)
    else:
        corpus = open_corpus(config.corpus)
        train = train_wordpieces if config.architecture == "bert" else train_byte_pairs
        tokenizer = train(corpus.splits["train"], corpus.fingerprint, config.vocabulary_size)
        make = functools.partial(corpus_rows, corpus, tokenizer, length, after=(tokenizer.end_token_id,))
        if not config.dry_run:
            chief_alone(lambda: make(keep=functools.partial(keep_in, folder)))
        rows = make() if config.dry_run else open_folder(folder)[0]
    return tokenizer, {
        part: masked_batches(config, tokenizer, rows[part], batch_size, part == "train") for part in rows
    }


def masked_batches(
    config: Config, tokenizer: keras_hub.models.Tokenizer, rows: Rows, batch_size: int, training: bool
) -> RowBatches:
    """A split's batches (x, y, sample_weight), for `fit`; `batch_size` is of all replicas together."""

    def make_batch(epochs, examples):
        ids, is_token, _ = rows.read(examples)
        seeds = mask_seeds(config.seed, epochs if training else None, examples)
        return mask_tokens(ids, is_token, seeds, tokenizer, config.mask_rate if training else EVALUATION_RATE)

    return RowBatches(rows, make_batch, batch_size, shuffle=training, seed=config.seed)


def build_model(config: Config, tokenizer: keras_hub.models.Tokenizer, schedule=0.0) -> keras.Model:
    """A compiled `BertMaskedLM` or `RobertaMaskedLM`. Call it inside the strategy's scope."""
    model = masked_lm_from_size(config.model, tokenizer, config.dropout, config.seq_length)
    loss = CrossEntropy(reduction="mean_with_sample_weight")  # over all labels of the whole batch
    model.compile(muon(schedule), loss, weighted_metrics=[Accuracy()], jit_compile=config.jit)
    return data_parallel(model, accumulate=config.accumulate, mean_over="labels")


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} after a dry run, and for other workers."""
    strategy = make_strategy(config.replicas, deterministic=config.deterministic)
    with open_run(config.folder(), config.fixed("bert_from_scratch"), overwrite=config.overwrite) as run:
        if run.results:
            return run.results
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy(config.precision)
        replicas = strategy.num_replicas_in_sync
        rate = config.learning_rate or 5e-3
        # A run that is resumed keeps them, whatever the number of replicas now.
        batch_size, rate = run.keep("scaled", lambda: scale(config.batch_size, rate, replicas, config.lr_scaling))

        tokenizer, batches = make_datasets(config, batch_size)
        train = batches.pop("train")
        total_steps = min(len(train) * config.epochs, config.max_steps or sys.maxsize)
        schedule = WarmUpPolynomialDecay(rate, total_steps, config.warmup)

        with strategy.scope():
            model = build_model(config, tokenizer, schedule)
        if config.dry_run:
            return print_plan(model, train, schedule, total_steps, tokenizer)
        log = RunLog(run.folder, train)
        checkpoints = Checkpoints(
            run.folder / "checkpoints", every=config.checkpoint_every, max_steps=total_steps, exit_on_sigterm=True
        )
        preprocessor = model.preprocessor_cls(tokenizer, sequence_length=config.seq_length)
        publish = Publish(config.push_to, config.push_public, run.folder, preprocessor)
        data = {"validation_data": batches["validation"], "epochs": config.epochs}
        model.fit(train, **data, callbacks=[log, publish, checkpoints])

        results = {"recipe": "bert_from_scratch", "global_batch_size": batch_size, "config": asdict(config)}
        results |= log.results(replicas)
        for split, part in batches.items():
            scores = model.evaluate(part, verbose=0, return_dict=True)
            results |= language_model_scores(split, scores, part, train, tokenizer)
        publish.save(run.folder / "preset", "fill-mask", results)
        return publish.finish(run.finish(results))


def main(config: Config) -> None:
    """Trains, and prints the report."""
    if results := train_and_evaluate(config):
        print(report(results, told_of))


if __name__ == "__main__":
    run(main, CONFIG)
