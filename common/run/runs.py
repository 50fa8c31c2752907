# SPDX-License-Identifier: Apache-2.0
"""A recipe's run: opened only with the options, code and data that started it, on all workers alike."""

import dataclasses
import hashlib
import importlib.metadata
import shlex
from pathlib import Path
from typing import Any

import keras

import keras_replicas
from common.run.options import check_accumulate
from common.run.run_folder import open_run
from common.training.precision import choose_precision
from common.training.scaling import Scaled, learning_rate_factor, scaling_rule
from keras_replicas import UserError, agree, num_workers

ROOT = Path(__file__).parents[2]
PACKAGES = ("tensorflow", "keras", "keras-hub", "tokenizers", "numpy")  # their versions may change what is computed

# Options that may differ when a run is resumed: they do not change what it computes.
FREE_OPTIONS = (
    *("workdir", "data", "overwrite", "dry_run", "checkpoint_every", "profile_steps", "push_to", "push_public"),
    *("replicas", "batch_size", "accumulate", "jit", "steps_per_execution", "steps_per_loop"),
)


class RecipeRun:
    """An open run of a recipe.

    Args:
        recipe: the recipe's name.
        config: its `Config`, with the options `workdir` and `overwrite`. With `dry_run` set, nothing is written there.

    Attributes:
        workdir: the run's folder.
        results: the content of `results.json`; None while the run is not complete.
        keep, finish: see `run_folder.Run`.

    Raises:
        UserError: as `open_run`; also when workers have different options, code or packages.
    """

    def __init__(self, recipe: str, config: Any):
        wanted = {"recipe": recipe, **dataclasses.asdict(config)}
        self.workdir = Path(config.workdir)
        folder = None if wanted.get("dry_run") else self.workdir
        self._run = open_run(folder, wanted, free=FREE_OPTIONS, overwrite=config.overwrite)
        self.results, self.keep, self.finish = self._run.results, self._run.keep, self._run.finish
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        agree({"code": checksum_of_code()} | versions, "was started differently from the chief")
        if self.results:
            self._tell_complete(config)

    def _tell_complete(self, config: Any) -> None:
        before, now = self._run.saved.get("data", ""), getattr(config, "data", "")
        of_other = f" on the data {before or 'of its task'}" if before != now else ""
        print(f"The run in {self.workdir} is complete{of_other}; --overwrite starts afresh.")
        if uri := getattr(config, "push_to", ""):
            private = "" if config.push_public else " --private"  # without it, hf makes a new repository public
            preset = shlex.quote(str(self.workdir / "preset"))
            print(f"Nothing is uploaded. To do so: hf upload {uri.removeprefix('hf://')} {preset}{private}")

    def scale(self, config: Any, replicas: int, learning_rate: Any, optimizer: str) -> Scaled:
        """The batch and the learning rate for `replicas`; a resumed run keeps its global batch and peak rate.

        Args:
            config: the recipe's, with a `batch_size` for each replica and the rule `lr_scaling`.
            replicas: their number, over all workers.
            learning_rate: for one replica.
            optimizer: its name, by which `auto` chooses the rule.

        Raises:
            UserError: when the replicas cannot share that global batch, or the given batch size does not match it; when
                workers have different devices, or chose different dtype policies.
        """
        saved = self._run.saved
        own = {"replicas": replicas // num_workers(), "precision": saved.get("chosen_precision")}
        agree(own, "has different devices than the chief, or --precision auto chose another dtype policy there")
        total = self.keep("global_batch_size", config.batch_size * replicas)
        if total % replicas or config.batch_size not in (saved["batch_size"], total // replicas):
            raise UserError(
                f"{self.workdir} holds a run with a global batch of {total}, which is not {replicas} replicas x "
                f"{config.batch_size}. Give --replicas and --batch-size that make {total}, or {self._afresh()}"
            )
        batch_size = total // replicas
        check_accumulate(getattr(config, "accumulate", 1), batch_size)
        rule = scaling_rule(config.lr_scaling, optimizer)
        peak = self.keep("peak_learning_rate", learning_rate * learning_rate_factor(rule, replicas))
        print(f"global batch: {batch_size} examples x {replicas} replica(s) = {total}")
        print(f"peak learning rate: {peak:g}, {rule} scaling of {learning_rate:g}", flush=True)
        return Scaled(batch_size, total, peak)

    def configure_keras(self, config: Any, width: int) -> None:
        """Sets Keras's seed, and its dtype policy for layers of that width; a resumed run keeps the policy."""
        keras.utils.set_random_seed(config.seed)
        policy = choose_precision(config.precision, getattr(config, "jit", False), width)
        keras.config.set_dtype_policy(self.keep("chosen_precision", policy))

    def check_data(self, sizes: dict[str, int], checksums: dict[str, int]) -> None:
        """Checks each split's number of examples, and the checksum of its data.

        Raises:
            UserError: on all workers, when there is too little data, or it has changed since the run started, or
                differs between workers.
        """
        own = {f"examples of {split}": size for split, size in sizes.items()}
        own |= {f"checksum of {split}": crc for split, crc in checksums.items()}
        agree(own, "has different data than the chief")
        if sizes["train"] < self._run.saved["global_batch_size"]:
            raise UserError(
                f"the data has {sizes['train']} training examples, too few for a global batch of "
                f"{self._run.saved['global_batch_size']}. Give more data, or a smaller --batch-size, fewer --replicas, "
                "or for a language model a smaller --seq-length"
            )
        if not sizes["validation"]:
            raise UserError("no text is left for validation. Give more text, or a folder with a wiki.valid.tokens")
        if self.keep("data_checksums", checksums) != checksums:
            raise UserError(
                f"the text or the vocabulary has changed since the run in {self.workdir} began. "
                f"Restore it, or {self._afresh()}"
            )

    def _afresh(self) -> str:
        """Advice on starting afresh when a run is unfinished, which the same `--overwrite` would resume."""
        return f"give another --workdir, or remove {self.workdir} to start afresh"


def checksum_of_code() -> str:
    """A hash of what workers run: the library, the helpers and the recipes."""
    library = Path(keras_replicas.__file__).parent  # in a copy, it is elsewhere, and the recipe is beside `common`
    files = sorted(path for folder in (library, ROOT / "common", ROOT / "recipes") for path in folder.rglob("*.py"))
    files += sorted(ROOT.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
