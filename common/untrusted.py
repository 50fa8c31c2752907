# SPDX-License-Identifier: Apache-2.0
"""What presets and runs may hold, whoever wrote them: lists of what is allowed, looked at before anything is opened."""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py

from keras_replicas import UserError

from .files import MALFORMED, one_line

SMALL, LOG = 40 * 2**20, 2**30  # bytes, at most, of JSON and vocabularies, and of a run's steps.jsonl
CONFIG, PARTS = 2**22, 2**20  # bytes, at most, of a config.json; objects and lists of a JSON file
WEIGHTS = re.compile(r"(model|task|model_\d+)\.weights\.h5|adapters\.lora\.h5|model(-\d+-of-\d+)?\.safetensors")
CHECKPOINTS = re.compile(r"(ckpt-\d+|end)(_temp|\.index|\.data-\d+-of-\d+)(\.tempstate\d+)?|fit-\d+|\..*")
RUN = ("best", "checkpoints", "predictions", "preset", "tensorboard", "best.json", "results.json", "steps.jsonl")
INERT = {"", ".json", ".h5", ".txt", ".md", ".model", ".spm", ".safetensors", ".csv", ".tsv", ".png", ".jpg", ".svg"}
LFS_POINTER = b"version https://git-lfs"
ASSETS = ("vocabulary", "merges", "proto")  # of a tokenizer, which opens a path that is given in their place
SIZES = dict.fromkeys(("hidden_dim", "hidden_size", "n_embd", "dim", "d_model"), "width")
SIZES |= dict.fromkeys(("num_layers", "num_hidden_layers", "n_layer", "n_layers"), "layers")
SIZES |= dict.fromkeys(("intermediate_dim", "intermediate_size"), "inner")


def check_preset(preset: str | Path, keras_form: bool = False) -> None:
    """Raises a UserError unless a folder is a preset, in KerasHub's form or Hugging Face's, and holds only what it may.

    With `keras_form`, it must be in KerasHub's, whatever it says of itself.

    The folder may be a link. Those in it must lead to its own files or, in the cache of the Hub, to the blobs beside.
    """
    if not os.path.isdir(folder := Path(preset)):  # Path's raises an error for a long name
        return
    if (folder / "preset").is_dir() and not (folder / "metadata.json").exists():
        raise UserError(f"{folder} is the folder of a run: give {folder / 'preset'}")
    root = folder.resolve()
    homes = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    try:
        files = [*_files(root, homes)]
        for path in files:
            with path.open("rb") as content:
                if content.read(len(LFS_POINTER)) == LFS_POINTER:
                    raise ValueError(f"{path.name} is a pointer of Git LFS, not the file: run `git lfs pull` there")
        weights = sum(path.stat().st_size for path in files if WEIGHTS.fullmatch(path.name))
        heads = [_read_json(root / name) for name in ("config.json", "tokenizer.json") if root / name in files]
        keras_form = keras_form or any("registered_name" in head for head in heads)  # beside rows, a tokenizer alone
        for path in files:
            name, ending = path.relative_to(root).as_posix(), path.suffix.lower()
            if keras_form and ending not in INERT:
                raise ValueError(f"{name} does not belong to a preset: remove it")
            if WEIGHTS.fullmatch(name) and ending == ".h5":
                _check_hdf5(path)
            elif name == path.name and ending == ".json":
                _check_json(name, _read_json(path), keras_form, weights)
            elif not WEIGHTS.fullmatch(name) and (keras_form or name == path.name and ending in (".txt", ".model")):
                _check_bytes(path)
    except (*MALFORMED, RuntimeError) as error:  # h5py's, too
        raise UserError(f"the preset {folder} is refused: {str(error).splitlines()[0]}") from error


def check_run(folder: Path) -> None:
    """Raises a UserError where a run has a link, a file larger than any run's or damaged, or one in another's place.

    The folder may be a link, and so may `checkpoints` in it, to a folder of checkpoints or an empty one.
    """
    checkpoints = folder / "checkpoints"
    for path in checkpoints.glob("*"):
        if not CHECKPOINTS.fullmatch(path.name):
            raise UserError(f"{path} is not a checkpoint: remove it")
    for path in [*_files(folder, spared=checkpoints), *_files(checkpoints)]:
        if path.parent == folder and path.suffix in (".json", ".jsonl"):
            _read_json(path) if path.suffix == ".json" else _check_bytes(path)
    for path in map(folder.joinpath, RUN):
        if path.exists() and path.is_dir() == bool(path.suffix):
            raise UserError(f"{path} is {'a folder' if path.suffix else 'no folder'}: move it elsewhere")


def _files(folder: Path, homes: Sequence[Path] = (), spared: Path | None = None) -> Iterator[Path]:
    """The files of a folder, without hidden folders. Raises a UserError for a pipe, or a link to elsewhere."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in [*folders, *names]):
            target, name = path.resolve(), path.relative_to(folder)
            if path.is_symlink() and path != spared and (path.is_dir() or not any(map(target.is_relative_to, homes))):
                raise UserError(f"{name} in {folder} is a link, and could lead anywhere: put the file itself there")
            if path.is_file():
                yield path
            elif not path.is_dir():
                raise UserError(f"{name} in {folder} is neither a file nor a folder: remove it")


def _check_bytes(path: Path) -> None:
    if path.stat().st_size > (most := {"steps.jsonl": LOG, "config.json": CONFIG}.get(path.name, SMALL)):
        raise UserError(f"{path} has more than {most:,} bytes")


def _read_json(path: Path) -> Any:
    _check_bytes(path)
    with one_line(f"cannot read {path}", ": restore or remove it", (ValueError, RecursionError)):
        text = path.read_text(encoding="utf-8")
        if text.count("{") + text.count("[") > PARTS:  # each takes far more memory than its bytes
            raise ValueError(f"it has more than {PARTS:,} objects and lists")
        return json.loads(text)


def _check_json(file: str, content: Any, keras_form: bool, weights: int) -> None:
    """What Keras makes of it must be of KerasHub, and no larger than its weights; those that it names lie beside it."""
    values = [content]
    for value in values:  # a list that grows
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in (value for value in values if isinstance(value, dict)):
        module, name, registered = (part.get(key) for key in ("module", "class_name", "registered_name"))
        package = str(module).split(".")[0]
        of_hub = package in ("keras_hub", "keras_nlp") and registered == f"{package}>{name}"
        policy = module == "keras" and not registered and re.fullmatch(r"\w*DTypePolicy(Map)?", str(name))
        if keras_form and "class_name" in part and not (of_hub or policy):
            raise ValueError(f"{file} names {module}.{name}, which is no class of KerasHub's models of text")
        if keras_form and ("/" in str(part.get("name")) or any(isinstance(part.get(key), str) for key in ASSETS)):
            raise ValueError(f"{file} has a path where a name or a vocabulary belongs")
        sizes = {SIZES.get(key, key): value for key, value in part.items() if isinstance(value, int)}
        width, layers, inner = (sizes.get(name, 0) for name in ("width", "layers", "inner"))
        most = width * max([layers * (4 * width + 2 * inner), *sizes.values()])  # roughly its weights
        if (keras_form or file in ("config.json", "task.json")) and most > 8 * weights + 2**23:
            raise ValueError(f"{file} is of a model much larger than its weights of {weights:,} bytes")
    shards = content["weight_map"] if file in ("model.weights.json", "model.safetensors.index.json") else {}
    for names in shards.values():
        if not all(map(WEIGHTS.fullmatch, names if isinstance(names, list) else [names])):
            raise ValueError(f"{file} names {names!r}, which is no file of weights beside it")


def _check_hdf5(path: Path) -> None:
    """It must be as Keras writes weights: groups, and arrays of numbers that are whole in this very file."""
    with h5py.File(path, "r") as file:
        if "model_config" in file.attrs:
            raise ValueError(f"{path.name} is a whole model, not weights alone")
        links: list[tuple[str, Any]] = []
        file.visititems_links(lambda name, link: links.append((name, link)))
        room = path.stat().st_size
        for name, item in ((name, file[name] if isinstance(link, h5py.HardLink) else link) for name, link in links):
            if not isinstance(item, h5py.Group):
                is_inside = isinstance(item, h5py.Dataset) and not (item.external or item.is_virtual or item.chunks)
                room -= math.prod(item.shape or ()) * item.dtype.itemsize if is_inside else 0
                if not is_inside or item.dtype.kind not in "biufV" or room < 0:
                    raise ValueError(f"{path.name} has {name}, which is no array of numbers in this file")
