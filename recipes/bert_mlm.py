# SPDX-License-Identifier: Apache-2.0
"""Train a BERT masked language model data-parallel, with Keras fit.

    python -m recipes run bert_mlm                                  # about 2 minutes on 2 cores, no network needed
    python -m recipes run bert_mlm --corpus wikitext-2 --epochs 10  # Wikipedia, from the Hugging Face Hub
    python -m recipes run bert_mlm --preset bert_base_en_uncased --learning-rate 5e-5 --corpus my_texts/

Time: 2 min on 2 cores. Metric: validation loss, against the unigram baseline.

Text becomes word pieces in rows of one length; 30 % are masked, anew in every epoch, and the model learns to predict
them. Each replica takes an equal part of every batch, and a step applies the summed gradients.
"""

import os
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log off the screen

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from common.command_line import FIRST, FREE, INPUT, Bounds, LanguageModelOptions, parse, quiet_stderr, run
from common.model.sizes import Size, check_model
from keras_replicas import UserError


@dataclass(frozen=True)
class Config(LanguageModelOptions):
    """The options of `bert_mlm`, in addition to those of every recipe."""

    workdir: Annotated[str, FIRST, FREE] = "runs/bert_mlm"  # work directory: results, logs, checkpoints, preset
    # KerasHub name, or folder made by save_to_preset, to start from; empty: random weights
    preset: Annotated[str, FIRST, INPUT] = ""
    # BERT's size, with random weights; default: micro, unless a preset is given
    model: Annotated[Size | None, FIRST] = None
    vocabulary: Annotated[str, INPUT] = ""  # WordPiece file, one word piece per line; empty: trained on the corpus
    vocabulary_size: Annotated[int, Bounds(100, 2**20)] = 2048  # word pieces in a trained vocabulary
    pack: Literal["full", "none"] = "full"  # full: no padding; none: one line per sequence, padded within its batch
    mask_rate: Annotated[float, Bounds(0.01, 0.99)] = 0.3  # fraction of tokens masked in training; 0.15 in validation

    def __post_init__(self):
        super().__post_init__()
        check_model(self.preset, self.model, self.seq_length)
        if self.preset and self.vocabulary:
            raise UserError(f"the preset {self.preset} brings its vocabulary: leave out --vocabulary")


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras
    import keras_hub

from common.data.corpora import open_corpus
from common.data.masking import EVALUATION_RATE, mask_seeds, mask_tokens
from common.data.rows import RowBatches, Rows, corpus_rows
from common.data.vocabulary import load_wordpieces, train_wordpieces
from common.language_model import language_model_scores, muon, told_of
from common.log import RunLog, print_plan, report
from common.model.masked_lm import masked_lm_from_preset, masked_lm_from_size, preset_tokenizer
from common.model.presets import save_task
from common.run_folder import open_run
from common.training import Accuracy, CrossEntropy, WarmUpPolynomialDecay, scale
from keras_replicas import Checkpoints, data_parallel, make_strategy


def make_datasets(config: Config, batch_size: int) -> tuple[keras_hub.models.Tokenizer, dict[str, RowBatches]]:
    """The tokenizer, and the batches of each split of the corpus."""
    corpus = open_corpus(config.corpus)
    if config.preset:
        tokenizer = preset_tokenizer(config.preset)
    elif config.vocabulary:
        tokenizer = load_wordpieces(config.vocabulary)
    else:
        tokenizer = train_wordpieces(corpus.splits["train"], corpus.fingerprint, config.vocabulary_size)
    length = config.seq_length - 2  # with room for [CLS] and [SEP]
    rows = corpus_rows(corpus, tokenizer, length, pack=config.pack == "full", after=(tokenizer.end_token_id,))
    return tokenizer, {
        part: masked_batches(config, tokenizer, rows[part], batch_size, part == "train") for part in rows
    }


def masked_batches(
    config: Config, tokenizer: keras_hub.models.Tokenizer, rows: Rows, batch_size: int, training: bool
) -> RowBatches:
    """A split's batches (x, y, sample_weight), for `fit`; `batch_size` is of all replicas together."""

    def make_batch(epochs, examples):
        ids, is_token, _ = rows.read(examples, trim=config.pack == "none")
        seeds = mask_seeds(config.seed, epochs if training else None, examples)
        return mask_tokens(ids, is_token, seeds, tokenizer, config.mask_rate if training else EVALUATION_RATE)

    return RowBatches(rows, make_batch, batch_size, shuffle=training, seed=config.seed)


def build_model(config: Config, tokenizer: keras_hub.models.Tokenizer, schedule=0.0) -> keras.Model:
    """A compiled `BertMaskedLM`. Call it inside the strategy's scope."""
    if config.preset:
        model = masked_lm_from_preset(config.preset, config.seq_length, config.dropout)
    else:
        model = masked_lm_from_size(config.model or "micro", tokenizer, config.dropout, config.seq_length)
    loss = CrossEntropy(reduction="mean_with_sample_weight")  # over all labels of the whole batch
    model.compile(muon(schedule), loss, weighted_metrics=[Accuracy()], jit_compile=config.jit)
    return data_parallel(model, accumulate=config.accumulate, mean_over="labels")


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} after a dry run, and for other workers."""
    strategy = make_strategy(config.replicas, deterministic=config.deterministic)
    with open_run(config.folder(), config.fixed("bert_mlm"), overwrite=config.overwrite) as run:
        if run.results:
            return run.results
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy(config.precision)
        replicas = strategy.num_replicas_in_sync
        rate = config.learning_rate or (1e-4 if config.preset else 5e-3)
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
        callbacks = [log, keras.callbacks.TensorBoard(run.folder / "tensorboard"), checkpoints]
        model.fit(train, epochs=config.epochs, validation_data=batches["validation"], callbacks=callbacks)

        results = {"recipe": "bert_mlm", "global_batch_size": batch_size, "config": asdict(config)}
        results |= log.results(replicas)
        for split, part in batches.items():
            scores = model.evaluate(part, verbose=0, return_dict=True)
            results |= language_model_scores(split, scores, part, train, tokenizer)
        save_task(model, model.preprocessor_cls(tokenizer, sequence_length=config.seq_length), run.folder / "preset")
        return run.finish(results)


def main(config: Config) -> None:
    """Trains, and prints the report."""
    if results := train_and_evaluate(config):
        print(report(results, told_of))


if __name__ == "__main__":
    run(main, CONFIG)
