import ctypes
import json
import subprocess
import sys

import pytest

from common.command_line import UserError
from common.strategy import gpu_memory_mb, make_strategy
from tests.conftest import ROOT


@pytest.mark.parametrize(("asked", "given"), [(0, 2), (1, 1), (2, 2), (4, 4)])
def test_the_cpu_is_split(asked, given):
    assert make_strategy(asked).num_replicas_in_sync == given


def test_more_than_can_be_split_now():
    with pytest.raises(UserError, match="ask for 8 replicas in a new process"):
        make_strategy(8)


def test_a_cpu_worker_of_several_is_not_split(monkeypatch):
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(UserError, match="leave out --replicas 2"):
        make_strategy(2)


def test_a_split_gpu_is_divided_by_its_own_memory(monkeypatch, tmp_path):
    command = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="use --replicas 1"):
        gpu_memory_mb()
    command.write_text("#!/bin/sh\necho 80000\n")
    command.chmod(0o755)
    assert gpu_memory_mb() == 72_000


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="there is no glibc")
@pytest.mark.slow
def test_large_blocks_are_kept_for_their_next_use():
    program = """if True:
        import ctypes, resource
        from common.strategy import keep_freed_memory
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        size = 64 * 2**20
        def new_pages():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            block = libc.malloc(size)
            ctypes.memset(block, 1, size)
            libc.free(block)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        new_pages()
        print(new_pages())
        keep_freed_memory()
        new_pages()
        print(new_pages())
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 1000 and after < 100
