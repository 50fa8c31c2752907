# SPDX-License-Identifier: Apache-2.0
"""Files: written atomically, cached where they depend only on their inputs, fetched; what messages and splits say."""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from keras_replicas import UserError

LEAST_FREE = 2**28  # bytes, of a disk that is to hold a cache
PRESET = ["*.json", "*.txt", "*.model", "*.weights.h5", "model*.safetensors", "assets/*"]  # a preset's files, fetched
HELD_OUT = 10  # one text in this many is the validation split of data without one
FAILED = (ValueError, OSError, RuntimeError, KeyError, SafetensorError)  # KerasHub's, h5py's, the file system's
MALFORMED = (ValueError, OSError, KeyError, TypeError, AttributeError)  # where JSON does not hold what it should


@contextlib.contextmanager
def one_line(message: str, way_out: str = "", errors: tuple[type[Exception], ...] = FAILED) -> Iterator[None]:
    """Turns these errors into a `UserError` of one line: a message, the error's first line, and a way out."""
    try:
        yield
    except errors as error:
        first = next(iter(str(error).splitlines()), type(error).__name__).removesuffix(" A preset must be a one of:")
        raise UserError(f"{message} ({first}){way_out}") from error


def plain(text: object) -> str:
    """Text for a terminal, which obeys control characters: these become U+FFFD, except tabs and line ends."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", str(text))


def is_held_out(text: str) -> bool:
    """Whether a text is for validation, in data without such a split: chosen by a hash, whatever the other texts."""
    return zlib.crc32(text.encode()) % HELD_OUT == 0


def tell_if_few(split: str, number: int, least: int, kind: str) -> None:
    """Prints that a split with fewer than `least` of a kind is too small to tell models apart."""
    if number < least:
        print(f"{split} has {number} {kind}: too few to tell a better model from a worse one", flush=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file, or it is truncated or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: Any) -> None:
    """Writes JSON atomically, with null for NaN and infinity: a reader never finds half a file."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    unfinished.write_text(json.dumps(finite, indent=2) + "\n", encoding="utf-8")
    _sync(unfinished)
    unfinished.replace(path)


def cached(name: str, inputs: list[str], make: Callable[[Path], None]) -> Path:
    """The file or folder that `make` writes to the path that it is given, made once on this machine.

    It is in `$XDG_CACHE_HOME/keras-data-parallel-recipes` (by default under `~/.cache`) or, if that cannot be written
    or has little room, in a folder that is deleted when the process exits. A hash of `inputs`, all that its content
    depends on, stands before its name.
    """
    key = hashlib.sha256("\0".join(inputs).encode("utf-8", "surrogateescape")).hexdigest()[:20]
    folder = _cache(os.environ.get("XDG_CACHE_HOME"))
    path, unfinished = folder / f"{key}-{name}", folder / f"{key}.unfinished"
    with (folder / f".{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a machine's workers want the same files: one makes them, the others wait
        if not path.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.unlink(missing_ok=True)
            make(unfinished)
            for file in filter(Path.is_file, [unfinished, *unfinished.rglob("*")]):
                _sync(file)
            unfinished.rename(path)
    return path


def from_hub(function: str, name: str, *configuration: str, **options: Any) -> Any:
    """What a function of the `datasets` library returns for a data set on the Hub, or files; a `UserError` if not."""
    import datasets  # not above: it takes a second

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what is wrong is told in one line
    way_out = ". Without a network, download its files elsewhere, and give their folder"
    told = f"cannot fetch {name} from the Hugging Face Hub", way_out
    if files := options.get("data_files"):
        told = f"cannot read {shortened(files)}", ""
    with one_line(*told, (Exception,)):  # it raises a dozen unrelated types, as when the Hub is out of reach
        return getattr(datasets, function)(name, *configuration, **options)


@functools.cache
def fetched(preset: str) -> str:
    """Where `hf://user/name`, `hf://user/name@commit` or `kaggle://...` is, once fetched; any other preset as it is."""
    if preset.startswith("kaggle://"):
        import kagglehub

        return kagglehub.model_download(preset.removeprefix("kaggle://"))
    if not preset.startswith("hf://"):
        return preset
    import huggingface_hub  # not above: it takes a while

    name, _, commit = preset.removeprefix("hf://").partition("@")
    return huggingface_hub.snapshot_download(name, revision=commit or None, allow_patterns=PRESET)


def sha256_of(file: Path) -> str:
    """A file's SHA-256; a `UserError` when it cannot be read."""
    with one_line(f"cannot read {file}"), file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def checksums(name: str, path: str) -> dict[str, str]:
    """The SHA-256 of files that an option names, and a preset's commit on the Hub; of rows, of the manifest alone."""
    with one_line(f"cannot read {path}"):
        root = Path(fetched(path) if name == "preset" else path)
        files = [root / "manifest.json"] if os.path.isfile(root / "manifest.json") else [root, *sorted(root.rglob("*"))]
        found = {f"commit of {name}": root.name} if path.startswith("hf://") and root.is_dir() else {}
        for file in filter(os.path.isfile, files):
            shown = file.relative_to(root.parent if file == root else root)
            if not any(part.startswith(".") for part in shown.parts):
                found[f"sha256 of {name}/{shown}"] = sha256_of(file)
    return found


def shortened(words: Iterable[str]) -> str:
    """Words with commas between them, for a message: one line, cut short."""
    return textwrap.shorten(", ".join(map(plain, words)), 100, placeholder=" ...")


@functools.cache
def _cache(home: str | None) -> Path:
    try:
        folder = Path(home or Path.home() / ".cache") / "keras-data-parallel-recipes"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        if shutil.disk_usage(folder).free < LEAST_FREE:
            raise OSError("the disk is full")
    except (OSError, RuntimeError):  # it is not writable, its file system has no locks, or the user has no home
        folder = Path(tempfile.mkdtemp(prefix="recipes-cache-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _sync(file: Path) -> None:
    """Without it, a new name could be on the disk before the content."""
    with file.open("rb") as content:
        os.fsync(content.fileno())
