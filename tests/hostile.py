"""Hostile files, each with a benign twin, and a watch over what a process opens, runs and takes."""

import base64
import contextlib
import ctypes
import gzip
import io
import json
import marshal
import os
import pickle
import re
import runpy
import shutil
import struct
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

from tests.conftest import ROOT

STARTED = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "pickle.find_class"}
SPARSE = 2**31  # bytes of a file without content
_seen: list[tuple] | None = None  # while it is watched


def _hear(event, arguments):
    if _seen is not None and (event in STARTED or event == "open"):
        _seen.append((event, *arguments))


sys.addaudithook(_hear)  # for good: none can be taken away


class Watch(contextlib.AbstractContextManager):
    """Tells what this process did: `done`, which should be empty, and `memory`, its peak in bytes above the beginning.

    Whatever opens a file in the folder `outside` is heard of, C++ too; and what Python starts, or writes elsewhere than
    in the folder `inside`.
    """

    def __init__(self, outside, inside):
        self.outside, self.inside = outside, inside

    def __enter__(self):
        global _seen
        libc = ctypes.CDLL(None)
        self.notify = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(self.notify, os.fsencode(self.outside), 0x3FE) >= 0  # all but plain accesses
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.before, _seen = _status("VmRSS"), []
        return self

    def __exit__(self, *_):
        global _seen
        heard, _seen = _seen, None
        self.memory = _status("VmHWM") - self.before
        self.done = [words for words in heard if words[0] != "open"]
        for _, path, mode, flags in (words for words in heard if words[0] == "open"):
            place = Path(os.path.realpath(path)) if isinstance(path, str) else self.inside
            writes = (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not place.is_relative_to("/dev")
            mine = str(self.inside), os.environ["XDG_CACHE_HOME"], tempfile.gettempdir() + "/tmp"
            is_mine = str(place).startswith(mine) or str(place) == tempfile.gettempdir()  # files without a name
            if place.is_relative_to(self.outside) or writes and not is_mine:
                self.done.append((str(place), mode))
        with contextlib.suppress(BlockingIOError):
            self.done.append(os.read(self.notify, 4096))
        os.close(self.notify)


def _status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def command(monkeypatch, capfd, *words):
    """What `python -m recipes` answers in this process: its status, what it shows and what it tells."""
    program = ROOT / "recipes/__main__.py"
    monkeypatch.setattr(sys, "argv", ["recipes", *map(str, words)])
    capfd.readouterr()
    status = 0
    try:
        runpy.run_path(str(program), run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    return status, *capfd.readouterr()


def sparse(path):
    with path.open("wb") as file:
        file.truncate(SPARSE)


def edit(path, change):
    """Changes what a JSON file holds."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content) or content))


def payload(outside):
    """A function as Keras serializes a `lambda`, which leaves a file."""
    code = compile(f"lambda x: open({str(outside / 'run')!r}, 'w')", "", "eval").co_consts[0]
    return {"class_name": "__lambda__", "config": {"value": [base64.b64encode(marshal.dumps(code)).decode(), None, None]}}


class Runs:
    """What a pickle runs when it is loaded."""

    def __init__(self, outside):
        self.words = f"touch {outside}/run"

    def __reduce__(self):
        return os.system, (self.words,)


def pickled(outside):
    """An `.npy` of an object that runs a command."""
    file = io.BytesIO()
    np.save(file, np.array([Runs(outside)], object), allow_pickle=True)
    assert pickle.dumps(1)
    return file.getvalue()


VARIABLE = "token_embedding/vars/0"


def hdf5(kind):
    """A change of `model.weights.h5`: the token embedding, or one more array in a nested group, is not an array in it."""

    def change(path, outside, hostile):
        with h5py.File(path, "a") as file:
            (name,) = [name for name in _names(file) if name.endswith("token_embedding/embeddings/vars/0")] or ["x"]
            values = file[name][()]
            if hostile or kind != "whole":
                del file[name]
            if not hostile:
                if kind != "whole":
                    file[name] = values
                return
            shutil.copy(path, outside / "x.h5")
            if kind == "external storage":
                (outside / "raw").write_bytes(values.tobytes())
                file.create_dataset(name, values.shape, values.dtype, external=[(str(outside / "raw"), 0, values.nbytes)])
            elif kind == "soft link":
                file[name] = h5py.SoftLink("/elsewhere")
            elif kind == "external link":
                file[name] = h5py.ExternalLink(str(outside / "x.h5"), name)
            elif kind == "virtual":
                layout = h5py.VirtualLayout(values.shape, values.dtype)
                layout[:] = h5py.VirtualSource(str(outside / "x.h5"), name, values.shape)
                file.create_virtual_dataset(name, layout)
            else:
                file[name] = values
            if kind == "shape bomb":
                file.create_dataset("assets/deeper/vars/0", (2**40,), np.float32)
            elif kind == "zip bomb":
                file.create_dataset("assets/deeper/vars/0", data=np.zeros(2**24, np.int8), compression="gzip")
            elif kind == "whole":
                file.attrs["model_config"] = json.dumps({"class_name": "Lambda"})

    return change


def _names(file):
    names = []
    file.visit(names.append)
    return names


def safetensors(change):
    """A change of a `model.safetensors`' header, and of what says how long it is."""

    def changed(path, outside, hostile):
        content = path.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        size = change(header, size) if hostile else None
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", size or len(text)) + text + content[8 + struct.unpack("<Q", content[:8])[0] :])

    return changed


def overlap(header, size):
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    first, second = sorted(tensors, key=lambda entry: entry["data_offsets"])[:2]
    second["data_offsets"] = [start - 4 for start in second["data_offsets"]]


def lie(header, size):
    next(entry for name, entry in header.items() if name != "__metadata__")["dtype"] = "F64"


def record(length, content=b""):
    """A TFRecord's beginning, with a true checksum of its length."""
    header = struct.pack("<Q", length)
    crc = 0xFFFFFFFF
    for byte in header:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return header + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF) + content


def zipped(length):
    """A compressed TFRecord of zeros."""
    return gzip.compress(record(length, bytes(length + 4)))
