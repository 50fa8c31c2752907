# SPDX-License-Identifier: Apache-2.0
"""What can be told to be wrong before TensorFlow is imported, and told in words that name the mend."""

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from common.cluster import WORKERS_TOLD_IN, join_timeout
from common.command_line import UserError
from common.corpora import NAMES, open_corpus
from common.glue import open_examples
from common.sizes import dimensions
from common.wordpiece import load_wordpieces

# The least value of each knob that has one; the knobs below it are shares of a whole, and rates.
AT_LEAST = {
    "batch_size": 1,
    "epochs": 1,
    "checkpoint_every": 1,
    "steps_per_loop": 1,
    "accumulate": 1,
    "steps_per_execution": 1,
    "replicas": 0,
    "max_steps": 0,
    "shards": 0,
    "seed": 0,
    "seq_length": 3,  # [CLS], a token, [SEP]
    "vocabulary_size": 100,
}
# The most of each; beyond, NumPy takes no seed, and memory or time would end before it is told.
AT_MOST = {"seed": 2**32 - 1, "replicas": 2**10, "batch_size": 2**20, "seq_length": 2**16, "shards": 2**16}
MOST = 2**31 - 1  # of any other
SHARES = ("mask_rate", "dropout", "warmup")
RATES = ("learning_rate", "weight_decay", "clip_norm", "decay_power")


def check_knobs(config: Any) -> None:
    """Checks a recipe's `Config`: the values, the files that they name, and how long it is to wait for other workers.

    Raises:
        UserError: for the first thing that is wrong.
    """
    if WORKERS_TOLD_IN & os.environ.keys():
        join_timeout()
    knobs = dataclasses.asdict(config)
    for name, least in AT_LEAST.items():
        most = AT_MOST.get(name, MOST)
        _require(knobs.get(name, least) >= least, knobs, name, f"at least {least}")
        _require(knobs.get(name, least) <= most, knobs, name, f"at most {most}")
    for name in SHARES:
        _require(0 <= knobs.get(name, 0) < 1, knobs, name, "a share in [0, 1)")
    _require(knobs.get("mask_rate", 1) > 0, knobs, "mask_rate", "above 0")
    for name in RATES:
        value = knobs.get(name, 0)
        _require(math.isfinite(value) and value >= 0, knobs, name, "a finite number, 0 or more")
    step_range(knobs.get("profile_steps", ""))
    check_accumulate(knobs.get("accumulate", 1), config.batch_size)
    if knobs.get("preset") and (config.model or knobs.get("vocabulary")):
        both = "--model" if config.model else "--vocabulary"
        raise UserError(f"--preset brings its own model and vocabulary: leave out {both}, or --preset")
    for name in ("workdir", "corpus"):
        if knobs.get(name) == "":  # which as a path is the current folder
            raise UserError(f"--{name} is empty: name one, or leave it out")
    _require(
        not re.search(r"[\[\]*?\\]", knobs["workdir"]),
        knobs,
        "workdir",
        "a name without [ ] * ? \\, which TensorFlow globs",
    )
    for name in ("preset", "corpus", "vocabulary", "data"):
        _check_not_in_workdir(knobs, name)
    _check_workdir_not_in_corpus(knobs)
    if knobs.get("vocabulary"):
        load_wordpieces(config.vocabulary)
    if knobs.get("preset") and Path(config.preset).is_dir():
        _check_preset_folder(Path(config.preset), config.seq_length)
    if config.model:
        dimensions(config.model)
    if knobs.get("architecture") == "roberta":
        _require(config.vocabulary_size >= 261, knobs, "vocabulary_size", "at least 261: 256 bytes, 5 special tokens")
    if knobs.get("push_public") and not knobs["push_to"]:
        raise UserError("--push-public is for uploads: say where to with --push-to hf://user/name, or leave it out")
    check_push_to(knobs.get("push_to", ""))
    if "task" in knobs:
        open_examples(config.task, config.data, config.text_columns, config.label_column)
    elif config.corpus not in NAMES:
        _check_texts(config.corpus)


def step_range(text: str) -> range:
    """The steps that `A-B` names, from A to B; none for an empty text.

    Raises:
        UserError: when it is neither.
    """
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--profile-steps must be two steps with a dash, such as 10-20; got {text}")
    return range(int(found[1]), int(found[2]) + 1)


def check_accumulate(parts: int, batch_size: int) -> None:
    """Checks that a replica's batch can be computed in that many equal parts.

    Raises:
        UserError: when it cannot.
    """
    if batch_size % parts:
        raise UserError(
            f"--accumulate {parts} does not divide a replica's batch of {batch_size}. "
            f"Give one of {', '.join(str(n) for n in range(1, batch_size + 1) if batch_size % n == 0)}"
        )


def check_push_to(uri: str) -> None:
    """Checks that models can be uploaded there: `hf://user/name`, with a token. An empty one asks for no uploads.

    Raises:
        UserError: when they cannot.
    """
    if not uri:
        return
    # Not above: it takes a while, and most runs do without.
    from huggingface_hub import get_token, is_offline_mode
    from huggingface_hub.utils import validate_repo_id

    if not re.fullmatch("hf://[^/]+/[^/]+", uri):
        raise UserError(f"--push-to must be hf://user/name, a model on the Hugging Face Hub; got {uri}")
    try:
        validate_repo_id(uri.removeprefix("hf://"))
    except ValueError as error:
        raise UserError(f"--push-to {uri}: {error}") from error
    if is_offline_mode():
        raise UserError("--push-to needs the network, and HF_HUB_OFFLINE is set: unset it")
    if not get_token():
        raise UserError("--push-to needs a token of the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN")


def _require(holds: bool, knobs: dict[str, Any], name: str, what: str) -> None:
    if not holds:
        raise UserError(f"--{name.replace('_', '-')} must be {what}; got {knobs[name]}")


def _check_not_in_workdir(knobs: dict[str, Any], name: str) -> None:
    """What a run reads must outlive the run, which `--overwrite` deletes."""
    value, workdir = knobs.get(name) or "", Path(knobs["workdir"]).resolve()
    shards = name == "data" and "task" not in knobs  # which the run writes itself, by default there
    if not value or "://" in value or not (shards or Path(value).exists()):  # a name, or missing and told of elsewhere
        return
    path = Path(value).resolve()
    if path.is_relative_to(workdir) and not (shards and path == workdir / "data"):
        raise UserError(
            f"--{name} {value} lies in the work folder {knobs['workdir']}, of which a run may delete what it wrote. "
            "Give another --workdir"
        )


def _check_workdir_not_in_corpus(knobs: dict[str, Any]) -> None:
    """A run writes text too, its vocabulary for example, and all text in a folder is read."""
    corpus, workdir = knobs.get("corpus"), knobs["workdir"]
    if corpus is None or corpus in NAMES or not Path(corpus).is_dir():
        return
    if Path(workdir).resolve().is_relative_to(Path(corpus).resolve()):
        raise UserError(
            f"--workdir {workdir} lies in the folder --corpus {corpus}, all of whose text is read, a run's too. "
            "Give a --workdir outside of it"
        )


def _check_preset_folder(folder: Path, seq_length: int) -> None:
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "model_type" in settings:  # Hugging Face's form
            positions = settings["max_position_embeddings"]
            pieces = settings["vocab_size"]
        else:
            positions = settings["config"]["max_sequence_length"]
            pieces = settings["config"]["vocabulary_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} is no BERT preset; give a folder that save_to_preset made") from error
    if seq_length > positions:
        raise UserError(f"--seq-length {seq_length} is more than the {positions} positions of the preset {folder}")
    files = ("tokenizer.json", "vocab.txt") if "model_type" in settings else ("tokenizer.json",)
    if not any((folder / name).is_file() for name in files):
        raise UserError(f"the preset {folder} has no {' or '.join(files)}, the tokenizer its model was trained with")
    words = folder / "assets/tokenizer/vocabulary.txt"
    if words.is_file() and (found := len(words.read_text(encoding="utf-8").splitlines())) != pieces:
        raise UserError(f"{words} has {found} pieces, and the preset's model {pieces}: they do not belong together")


def _check_texts(corpus: str) -> None:
    for split, documents in open_corpus(corpus).items():
        if split == "train" and next(documents(), None) is None:
            raise UserError(f"there is no text in {corpus}")
