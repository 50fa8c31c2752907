# SPDX-License-Identifier: Apache-2.0
"""Turns documents into one long row of token ids on disk, in parallel processes.

The row is a folder of blocks, each tokenised by its own process, which does not import TensorFlow. Blocks are written
atomically, so that an interrupted write can be resumed. Memory does not grow with the corpus.
"""

import collections
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

ID = np.dtype(np.int32)
BLOCK = 2**22  # characters of text in a block, at least


class TokenRow:
    """The token ids of documents, one after another, as `write_tokens` left them."""

    def __init__(self, folder: Path):
        self._paths = sorted(folder.glob("*.ids"))
        self._ends = np.cumsum([path.stat().st_size // ID.itemsize for path in self._paths])
        self.documents = sum(int(path.stem.split("-")[1]) for path in self._paths)  # those with a token
        self.length = int(self._ends[-1]) if self._paths else 0  # ids, including one for each document's end

    def __getitem__(self, place: slice) -> np.ndarray:
        """The ids from `place.start` to before `place.stop`."""
        parts, at = [], place.start
        while at < place.stop:
            block = int(np.searchsorted(self._ends, at, side="right"))
            until = min(place.stop, int(self._ends[block]))
            begin = int(self._ends[block - 1]) if block else 0
            # Not memory-mapped: what was read would stay in the process's memory as long as there is room.
            parts.append(np.fromfile(self._paths[block], ID, until - at, offset=(at - begin) * ID.itemsize))
            at = until
        return np.concatenate(parts) if parts else np.empty(0, ID)

    def counts(self, vocabulary_size: int) -> np.ndarray:
        """How often each id occurs; int64 [vocabulary_size]."""
        counts = np.zeros(vocabulary_size, np.int64)
        for path in self._paths:
            counts += np.bincount(np.fromfile(path, ID), minlength=vocabulary_size)
        return counts


def write_tokens(documents: Iterable[str], tokenizer: Tokenizer, end: int, folder: Path) -> TokenRow:
    """Tokenises documents, on all cores, and appends the id `end` to each that has a token.

    The folder is for this row alone. Blocks that exist in it are kept, so a new stream must give the same documents.

    Raises:
        OSError: `ENOSPC`, when the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = {int(path.stem.split("-")[0]) for path in folder.glob("*.ids")}
    cores = os.cpu_count() or 1
    running: collections.deque[Future] = collections.deque()
    with ThreadPoolExecutor(cores) as threads:
        for number, texts in enumerate(_blocks(documents)):
            if number not in done:
                running.append(threads.submit(_in_a_process, texts, tokenizer.to_str(), end, folder / f"{number:06}"))
            if len(running) > cores:  # keeps only a few blocks of text in memory
                running.popleft().result()
        for future in running:
            future.result()
    return TokenRow(folder)


def _blocks(documents: Iterable[str]) -> Iterator[list[str]]:
    texts, length = [], 0
    for document in documents:
        texts.append(document)
        length += len(document)
        if length >= BLOCK:
            yield texts
            texts, length = [], 0
    if texts:
        yield texts


def _in_a_process(texts: list[str], tokenizer: str, end: int, path: Path) -> None:
    work = json.dumps({"texts": texts, "tokenizer": tokenizer, "end": end, "path": str(path)})
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}  # the processes themselves fill the cores
    status = subprocess.run([sys.executable, "-P", __file__], input=work.encode(), env=environment).returncode
    if status == errno.ENOSPC:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    if status:
        raise RuntimeError(f"tokenising {path} ended with status {status}")


def _write_block(texts: list[str], tokenizer: str, end: int, path: str) -> None:
    encodings = Tokenizer.from_str(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
    rows = [np.array([*encoding.ids, end], ID) for encoding in encodings if encoding.ids]
    unfinished = Path(f"{path}.unfinished")
    with unfinished.open("wb") as file:
        file.writelines(row.tobytes() for row in rows)
        file.flush()
        os.fsync(file.fileno())  # or the new name could be on the disk before the ids
    os.replace(unfinished, f"{path}-{len(rows)}.ids")


if __name__ == "__main__":
    try:
        _write_block(**json.load(sys.stdin))
    except json.JSONDecodeError:
        pass  # truncated: the parent process is gone
    except OSError as error:
        sys.exit(error.errno)
