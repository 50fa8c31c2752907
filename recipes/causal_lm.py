# SPDX-License-Identifier: Apache-2.0
"""Train a causal language model data-parallel, with Keras fit: GPT-2 from scratch, or any preset, with LoRA if asked.

    python -m recipes run causal_lm                                 # about 2 minutes on 2 cores, no network needed
    python -m recipes run causal_lm --corpus wikitext-2 --epochs 10 # Wikipedia, from the Hugging Face Hub
    python -m recipes run causal_lm --preset gpt2_base_en --lora-rank 8 --learning-rate 1e-3 --corpus my_texts/

Time: 2 min on 2 cores. Metric: validation loss, against the unigram baseline.

All text becomes one row of tokens, an end token between documents, cut into rows without padding; the model learns to
predict each token from those before it, across documents' ends too, as GPT-3 did (Brown et al. 2020, arXiv:2005.14165,
section 2.3): that what follows an end token begins anew.
"""

import os
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log off the screen

from dataclasses import asdict, dataclass
from typing import Annotated

from common.command_line import FIRST, FREE, INPUT, Bounds, LanguageModelOptions, parse, quiet_stderr, run
from common.model.sizes import CausalSize, check_model, check_push_to
from keras_replicas import UserError


@dataclass(frozen=True)
class Config(LanguageModelOptions):
    """The options of `causal_lm`, in addition to those of every recipe."""

    workdir: Annotated[str, FIRST, FREE] = "runs/causal_lm"  # work directory: results, logs, checkpoints, preset
    # in place of the corpus: .jsonl of prompts with answers, or a folder of rows that bert_from_scratch has written
    data: Annotated[str, FIRST, INPUT] = ""
    # KerasHub name, or folder made by save_to_preset, to start from; empty: random weights
    preset: Annotated[str, FIRST, INPUT] = ""
    # of a preset, train adapters of this rank alone (LoRA), with --learning-rate 1e-3; default: all weights
    lora_rank: Annotated[int | None, Bounds(1, 2**10)] = None
    # GPT-2's size, with random weights; default: micro, unless a preset is given
    model: Annotated[CausalSize | None, FIRST] = None
    vocabulary_size: Annotated[int, Bounds(262, 2**20)] = 2048  # byte pairs in a trained vocabulary
    push_to: Annotated[str, FREE] = ""  # hf://user/name: upload the model after each epoch, in the background
    push_public: Annotated[bool, FREE] = False  # if it is new there, it is public

    def __post_init__(self):
        super().__post_init__()
        check_model(self.preset, self.model, self.seq_length, self.lora_rank)
        check_push_to(self.push_to, self.push_public)
        if self.data and not (self.data.endswith(".jsonl") or "://" in self.data or os.path.isdir(self.data)):
            raise UserError(f"--data {self.data} must be a .jsonl file or a folder; other texts are for --corpus")


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras
    import keras_hub
    import tensorflow as tf

from common.data.dialogues import is_dialogues
from common.data.rows import RowBatches, Rows
from common.language_model import language_model_scores, muon, told_of
from common.log import RunLog, print_plan, report
from common.model.causal_lm import Samples, causal_rows, make_causal_lm, print_continuations
from common.model.publish import Publish
from common.run_folder import open_run
from common.training import Accuracy, CrossEntropy, WarmUpPolynomialDecay, scale
from keras_replicas import Checkpoints, data_parallel, make_strategy


def make_datasets(
    config: Config, batch_size: int
) -> tuple[keras_hub.models.CausalLMPreprocessor, dict[str, RowBatches]]:
    """The preprocessor, which has the tokenizer, and the batches of each split."""
    preprocessor, rows = causal_rows(
        config.corpus, config.data, config.preset, config.vocabulary_size, config.seq_length
    )
    return preprocessor, {part: causal_batches(config, rows[part], batch_size, part == "train") for part in rows}


def causal_batches(config: Config, rows: Rows, batch_size: int, training: bool) -> RowBatches:
    """A split's batches (x, y, sample_weight), for `fit`; `batch_size` is of all replicas together."""

    def make_batch(epochs, examples):
        ids, is_token, is_label = rows.read(examples, trim=is_dialogues(config.data))
        x = {"token_ids": ids[:, :-1], "padding_mask": tf.cast(is_token[:, :-1], tf.int32)}
        return x, ids[:, 1:], tf.cast(is_label[:, 1:], tf.float32)

    return RowBatches(rows, make_batch, batch_size, shuffle=training, seed=config.seed)


def build_model(config: Config, preprocessor: keras_hub.models.CausalLMPreprocessor, schedule=0.0) -> keras.Model:
    """A compiled `CausalLM`. Call it inside the strategy's scope."""
    model = make_causal_lm(config.preset, config.model or "micro", preprocessor, config.dropout, config.lora_rank)
    loss = CrossEntropy(reduction="mean_with_sample_weight")  # over all labels of the whole batch
    model.compile(muon(schedule), loss, weighted_metrics=[Accuracy()], jit_compile=config.jit)
    return data_parallel(model, accumulate=config.accumulate, mean_over="labels")


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} after a dry run, and for other workers."""
    strategy = make_strategy(config.replicas, deterministic=config.deterministic)
    with open_run(config.folder(), config.fixed("causal_lm"), overwrite=config.overwrite) as run:
        if run.results:
            return run.results
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy(config.precision)
        replicas = strategy.num_replicas_in_sync
        rate = config.learning_rate or (1e-4 if config.preset else 5e-3)
        # A run that is resumed keeps them, whatever the number of replicas now.
        batch_size, rate = run.keep("scaled", lambda: scale(config.batch_size, rate, replicas, config.lr_scaling))

        preprocessor, batches = make_datasets(config, batch_size)
        train, tokenizer = batches.pop("train"), preprocessor.tokenizer
        total_steps = min(len(train) * config.epochs, config.max_steps or sys.maxsize)
        schedule = WarmUpPolynomialDecay(rate, total_steps, config.warmup)

        with strategy.scope():
            model = build_model(config, preprocessor, schedule)
        if config.dry_run:
            return print_plan(model, train, schedule, total_steps, tokenizer)
        log = RunLog(run.folder, train)
        checkpoints = Checkpoints(
            run.folder / "checkpoints",
            every=config.checkpoint_every,
            max_steps=total_steps,
            exit_on_sigterm=True,
            trained_only=bool(config.lora_rank),
        )
        publish = Publish(config.push_to, config.push_public, run.folder, preprocessor)
        samples = Samples(log.board, batches["validation"].rows, tokenizer)
        callbacks = [log, samples, publish, checkpoints]
        model.fit(train, epochs=config.epochs, validation_data=batches["validation"], callbacks=callbacks)

        results = {"recipe": "causal_lm", "global_batch_size": batch_size, "config": asdict(config)}
        results |= log.results(replicas)
        for split, part in batches.items():
            scores = model.evaluate(part, verbose=0, return_dict=True)
            results |= language_model_scores(split, scores, part, train, tokenizer)
        publish.save(run.folder / "preset", "text-generation", results)
        return publish.finish(run.finish(results | {"prompts": samples.texts}))  # which are not for the model's card


def main(config: Config) -> None:
    """Trains, prints the report, and continues a few texts."""
    if results := train_and_evaluate(config):
        print(report(results, told_of))
        print_continuations(os.path.join(config.workdir, "preset"), results["prompts"])


if __name__ == "__main__":
    run(main, CONFIG)
