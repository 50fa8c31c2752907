"""What is hostile in a file, and a watch over what a process opens, starts and takes."""

import base64
import contextlib
import ctypes
import json
import marshal
import os
import shutil
import struct
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

STARTS = {"os.system", "os.exec", "os.posix_spawn", "os.fork"}
STARTS |= {"subprocess.Popen", "socket.connect", "pickle.find_class"}
_heard: list[tuple] | None = None  # while somebody listens


def _hear(event, arguments):
    if _heard is not None and (event in STARTS or event == "open"):
        _heard.append((event, *arguments))


sys.addaudithook(_hear)  # for good: it cannot be taken away


class Watch(contextlib.AbstractContextManager):
    """After it, `done` has what this process did and should not, and `memory` its peak in bytes, above the beginning.

    That is: to open, change or delete a file in the folder `outside`, by C++ too; to write elsewhere than in the folder
    `inside`, the cache or a temporary file; to start a process, connect, or unpickle.
    """

    def __init__(self, outside, inside):
        self.outside, self.inside, self.done = outside, inside, []

    def __enter__(self):
        global _heard
        libc = ctypes.CDLL(None)
        self._notices = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(self._notices, os.fsencode(self.outside), 0xFFF) >= 0
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before, _heard = _status("VmRSS"), []
        return self

    def __exit__(self, *_):
        global _heard
        heard, _heard = _heard, None
        self.memory = _status("VmHWM") - self._before
        mine = str(self.inside), os.environ["XDG_CACHE_HOME"], tempfile.gettempdir() + "/tmp", "/dev/null"
        for event, path, *rest in heard:
            place = os.path.realpath(path) if isinstance(path, str | bytes) else "/dev/null"
            writes = event == "open" and (rest[1] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            away = not place.startswith(mine) and place != tempfile.gettempdir()  # where files without a name are
            if event in STARTS or Path(place).is_relative_to(self.outside) or (writes and away):
                self.done.append((event, path))
        with contextlib.suppress(BlockingIOError):
            notices = os.read(self._notices, 2**16)
            while notices:
                _, what, _, size = struct.unpack_from("iIII", notices)
                if what & ~0x40000031:  # but that a folder's names were read
                    self.done.append((hex(what), notices[16 : 16 + size].rstrip(b"\0")))
                notices = notices[16 + size :]
        os.close(self._notices)


def _status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


# The beginning of a TFRecord of 10**13 bytes, with the true checksum of that length.
LYING = bytes.fromhex("00a0724e18090000f15261dc")

# Changes of a folder: functions of it, and of one outside that whoever loads it must leave alone.


def entry(name, key, value):
    """A JSON file has another entry, in its `config` if it has one; in it, OUTSIDE stands for that folder."""

    def act(folder, outside):
        content = json.loads((folder / name).read_text())
        content.get("config", content)[key] = value
        (folder / name).write_text(json.dumps(content).replace("OUTSIDE", str(outside)))

    return act


def part(file, module, name, registered=None, config=None):
    """Keras would make this, in the place of a preset's preprocessor or tokenizer."""
    thing = {"module": module, "class_name": name, "config": config or {}, "registered_name": registered}
    return entry(file, "preprocessor" if file == "task.json" else "tokenizer", thing)


def named(name, content=b"", size=0):
    """A file has this content; or this size, and next to nothing on the disk."""

    def act(folder, outside):
        with (folder / name).open("wb") as file:
            file.write(content)
            file.truncate(size or len(content))

    return act


def linked(name, within=False):
    """In place of a file or folder is a link to it: outside or, of a benign twin, within the folder."""

    def act(folder, outside):
        path, target = folder / name, (folder if within else outside) / f"target{Path(name).suffix}"
        if path.exists():
            shutil.move(path, target)
        path.symlink_to(target)

    return act


def code():
    """A function as Keras serializes a `lambda`, which writes a file when it is called."""
    called = compile("lambda x: open('/var/tmp/hostile', 'w')", "", "eval").co_consts[0]
    value = [base64.b64encode(marshal.dumps(called)).decode(), None, None]
    return {"class_name": "__lambda__", "config": {"value": value}}


class _Command:
    def __reduce__(self):
        return os.system, ("true",)


COMMAND = np.array([_Command()], object)  # which a pickle of it starts


def hdf5(kind, name="layers/reversible_embedding/vars/0"):
    """An array of a model's weights becomes another thing."""

    def act(folder, outside):
        with h5py.File(folder / "model.weights.h5", "a") as file, h5py.File(outside / "x.h5", "w") as other:
            values = other["x"] = file["layers/reversible_embedding/vars/0"][()]
            (outside / "raw").write_bytes(values.tobytes())
            if name in file:
                del file[name]
            if kind == "external storage":
                file.create_dataset(
                    name, values.shape, values.dtype, external=[(str(outside / "raw"), 0, values.nbytes)]
                )
            elif kind == "a virtual dataset":
                layout = h5py.VirtualLayout(values.shape, values.dtype)
                layout[:] = h5py.VirtualSource(str(outside / "x.h5"), "x", values.shape)
                file.create_virtual_dataset(name, layout)
            elif kind == "a shape bomb":
                file.create_dataset(name, (2**34, *values.shape[1:]), np.float32)
            elif kind == "a zip bomb":
                file.create_dataset(name, data=np.zeros(2**26, np.int8), compression="gzip")
            else:
                links = h5py.SoftLink("/layers/dense/vars/0"), h5py.ExternalLink(str(outside / "x.h5"), "x")
                file[name] = {"a soft link": links[0], "an external link": links[1]}.get(kind, values)
            if kind == "a whole model":
                file.attrs["model_config"] = "{}"

    return act


def safetensors(change):
    """The tensors of a header are changed, or it says to be as long as the function returns."""

    def act(folder, outside):
        content = (folder / "model.safetensors").read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:end])
        tensors = [header[name] for name in header if name != "__metadata__"]
        length, text = change(sorted(tensors, key=lambda tensor: tensor["data_offsets"])), json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", length or len(text)) + text + content[end:])

    return act
