# SPDX-License-Identifier: Apache-2.0
"""A run is a directory: opened by one process at a time, and only with the options that started it."""

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shlex
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import keras

import keras_replicas
from common.files import read_json, remove_unfinished, write_json
from common.run import run_folder
from common.run.options import check_accumulate
from common.training.precision import choose_precision
from common.training.scaling import learning_rate_factor, scaling_rule
from keras_replicas.cluster import is_chief, num_workers
from keras_replicas.errors import UserError
from keras_replicas.order import Scaled
from keras_replicas.workers import agree, chief_alone, exchange

ROOT = Path(__file__).parents[2]
PACKAGES = ("tensorflow", "keras", "keras-hub", "tokenizers", "numpy")  # their versions may change what is computed
LAUNCH_ID = "LAUNCH_ID"  # environment variable by which a launcher identifies the workers that it restarts

# Options that may differ when a run is resumed: they do not change what it computes.
FREE_OPTIONS = (
    *("workdir", "data", "overwrite", "dry_run", "checkpoint_every", "profile_steps", "push_to", "push_public"),
    *("replicas", "batch_size", "accumulate", "jit", "steps_per_execution", "steps_per_loop"),
)


@dataclasses.dataclass
class Run:
    """An open run."""

    workdir: Path
    saved: dict[str, Any]  # content of `config.json`: the options that it was started with, and values recorded since
    results: dict[str, Any] | None  # content of `results.json`, if the run is complete
    lock: TextIO | None  # held as long as the process lives; None if nothing may be written

    def __post_init__(self):
        if self.lock:
            write_json(self.workdir / "config.json", self.saved)

    def keep(self, name: str, value: Any) -> Any:
        """Records a value in `config.json`, and returns it; a resumed run returns the value recorded at its start."""
        if name not in self.saved:
            self.saved[name] = value
            if self.lock:
                write_json(self.workdir / "config.json", self.saved)
        return self.saved[name]

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
        own = {"replicas": replicas // num_workers(), "precision": self.saved.get("chosen_precision")}
        agree(own, "has different devices than the chief, or --precision auto chose another dtype policy there")
        total = self.keep("global_batch_size", config.batch_size * replicas)
        if total % replicas or config.batch_size not in (self.saved["batch_size"], total // replicas):
            raise UserError(
                f"{self.workdir} holds a run with a global batch of {total}, which is not {replicas} replicas x "
                f"{config.batch_size}. Give --replicas and --batch-size that make {total}, or "
                + run_folder.afresh(self.workdir)
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

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Writes `results.json`, which makes the run complete, and returns it; {} for workers other than the chief."""
        if not is_chief():
            return {}
        write_json(self.workdir / "results.json", results)
        return results

    def check_data(self, sizes: dict[str, int], checksums: dict[str, int]) -> None:
        """Checks each split's number of examples, and the checksum of its data.

        Raises:
            UserError: on all workers, when there is too little data, or it has changed since the run started, or
                differs between workers.
        """
        own = {f"examples of {split}": size for split, size in sizes.items()}
        own |= {f"checksum of {split}": crc for split, crc in checksums.items()}
        agree(own, "has different data than the chief")
        if sizes["train"] < self.saved["global_batch_size"]:
            raise UserError(
                f"the data has {sizes['train']} training examples, too few for a global batch of "
                f"{self.saved['global_batch_size']}. Give more data, or a smaller --batch-size, fewer --replicas, or "
                "for a language model a smaller --seq-length"
            )
        if not sizes["validation"]:
            raise UserError("no text is left for validation. Give more text, or a folder with a wiki.valid.tokens")
        if self.keep("data_checksums", checksums) != checksums:
            raise UserError(
                f"the text or the vocabulary has changed since the run in {self.workdir} began. "
                f"Restore it, or {run_folder.afresh(self.workdir)}"
            )


def open_run(recipe: str, config: Any, writes: Iterable[str] = ()) -> Run:
    """Opens the run in `config.workdir`, or starts one there; with `dry_run` set, it does neither.

    A run that ended before its first checkpoint, such as one rejected for its data, is started afresh, even with other
    options. With `overwrite` set, so is any other, except an interrupted one that was started with the very same
    options, and one that this launcher's workers started. Several workers must have joined; the chief does it for all.

    Args:
        recipe: the recipe's name.
        config: its `Config`, with the options `workdir` and `overwrite`.
        writes: see `common.run.run_folder`; recorded, so that a run that replaces this one leaves users' files alone.
            `data` does not count if `config.data` is another folder than `data/` in the work directory.

    Raises:
        UserError: when the folder cannot be written, another process has it open, or it holds a run of another recipe
            or with other options (`FREE_OPTIONS` excepted), or files with a run's names that no run wrote; when
            workers were started with different options, code or packages, or do not share the folder.
    """
    workdir = Path(config.workdir)
    if getattr(config, "data", "") and Path(config.data).resolve() != (workdir / "data").resolve():
        writes = [name for name in writes if name != "data"]
    wanted = {"recipe": recipe, **dataclasses.asdict(config)}
    _refuse_other_workers(wanted)
    opened, lock = chief_alone(lambda: _open(workdir, wanted, writes)), workdir / ".lock"
    seen = exchange({"token": lock.read_text() if lock.is_file() and not wanted.get("dry_run") else None})
    for index, theirs in enumerate(seen):
        if theirs != seen[0]:
            raise UserError(
                f"worker {index} does not see the chief's work directory {workdir}. "
                "Give a --workdir on a shared file system"
            )
    run = opened or _look_at(workdir, wanted)
    if run.results:
        before = run.saved.get("data", "")
        of_other = f" on the data {before or 'of its task'}" if before != wanted.get("data", before) else ""
        print(f"The run in {workdir} is complete{of_other}; --overwrite starts afresh.")
        if uri := getattr(config, "push_to", ""):
            private = "" if config.push_public else " --private"  # without it, hf makes a new repository public
            preset = shlex.quote(str(workdir / "preset"))
            print(f"Nothing is uploaded. To do so: hf upload {uri.removeprefix('hf://')} {preset}{private}")
    return run


def _open(workdir: Path, wanted: dict[str, Any], writes: Iterable[str]) -> Run:
    if wanted.get("dry_run"):
        return _look_at(workdir, wanted)
    run_folder.refuse_other_files(workdir, writes)
    lock = _locked(workdir)
    remove_unfinished(workdir)
    run_folder.bring_back(workdir)
    if run_folder.holds_run(workdir):
        run_folder.refuse_files_beside(workdir, writes)
        if wanted["overwrite"] and not _is_own(workdir, wanted):
            run_folder.set_aside(workdir)
    writes = sorted({*writes, *run_folder.writes_of(workdir)})
    return _look_at(workdir, wanted, lock, writes=writes, launch=os.environ.get(LAUNCH_ID))


def _is_own(workdir: Path, wanted: dict[str, Any]) -> bool:
    """Whether this very command, which has `--overwrite`, started the run there, so that it resumes it."""
    saved = read_json(workdir / "config.json") or {}
    if not run_folder.has_progress(workdir):
        return False
    if LAUNCH_ID in os.environ and saved.get("launch") == os.environ[LAUNCH_ID]:
        return True  # even a complete run: a launcher restarts all workers after one dies
    complete = read_json(workdir / "results.json") is not None
    return not complete and saved | wanted | {"workdir": saved["workdir"]} == saved


def _look_at(workdir: Path, wanted: dict[str, Any], lock: TextIO | None = None, **noted: Any) -> Run:
    if wanted.get("dry_run") or not (run_folder.holds_run(workdir) and run_folder.has_progress(workdir)):
        return Run(workdir, wanted | noted, None, lock)
    saved = read_json(workdir / "config.json") or {}
    different = [name for name in wanted if name not in FREE_OPTIONS and saved.get(name) != wanted[name]]
    if different:
        raise UserError(
            f"{workdir} holds a run with different options: "
            + ", ".join(f"{name} {saved.get(name)!r}, not {wanted[name]!r}" for name in different)
            + ". Give another --workdir, or --overwrite to start afresh"
        )
    return Run(workdir, saved | noted, read_json(workdir / "results.json"), lock)


def _refuse_other_workers(wanted: dict[str, Any]) -> None:
    library = Path(keras_replicas.__file__).parent  # in a copy, it is elsewhere, and the recipe is beside `common`
    files = sorted(path for folder in (library, ROOT / "common", ROOT / "recipes") for path in folder.rglob("*.py"))
    files += sorted(ROOT.glob("*.py"))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    own = {"--" + name.replace("_", "-"): value for name, value in wanted.items()} | {"code": code} | versions
    agree(own, "was started differently from the chief")


def _locked(workdir: Path) -> TextIO:
    """The work directory's lock, holding a token that tells workers that they see the same file."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / ".lock").open("a+", errors="replace")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.seek(0)
        if not re.fullmatch("([0-9a-f]{32})?", lock.read()):  # a token, as below
            raise UserError(f"{workdir}/.lock is not part of a run. Move it, or give another --workdir")
        lock.truncate(0)
        lock.write(uuid.uuid4().hex)
        lock.flush()
    except BlockingIOError as error:
        raise UserError(f"another process is running in {workdir}. Wait for it, or give another --workdir") from error
    except OSError as error:
        raise UserError(
            f"cannot write to the work directory {workdir} ({error.strerror}). Give another --workdir"
        ) from error
    return lock
