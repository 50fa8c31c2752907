"""`make_strategy`: which devices, how many, with which threads and memory."""

import ctypes
import json
import os

import pytest
import tensorflow as tf

from keras_replicas import strategy
from keras_replicas.cluster import worker_config
from keras_replicas.errors import UserError
from keras_replicas.strategy import make_strategy
from tests.conftest import python

GPUS = ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
OF_TWO = json.dumps(worker_config(["a:1", "b:1"], 0))


@pytest.mark.parametrize(("asked", "given"), [(0, 2), (1, 1), (2, 2), (4, 4)])
def test_the_cpu_is_split(asked, given):
    assert make_strategy(asked).num_replicas_in_sync == given


@pytest.mark.parametrize(("cores", "replicas", "threads"), [(2, 0, 1), pytest.param(4, 2, 0, marks=pytest.mark.slow)])
def test_replicas_that_share_cores_take_one_thread_each(cores, replicas, threads):
    """In a new process, as TensorFlow takes no other number later; 0 is its default, all cores."""
    program = (
        "import tensorflow as tf; from keras_replicas import strategy; "
        f"strategy.num_cores = lambda: {cores}; strategy.make_strategy({replicas}); "
        "print(tf.config.threading.get_intra_op_parallelism_threads())"
    )
    assert python("-c", program).stdout == f"{threads}\n"


def test_more_than_can_be_split_now_or_by_one_worker_of_several(monkeypatch):
    for replicas, told in (-1, "replicas must be 0 or more, not -1"), (8, "ask for replicas=8 in a new process"):
        with pytest.raises(UserError, match=told):
            make_strategy(replicas)
    monkeypatch.setenv("TF_CONFIG", OF_TWO)
    with pytest.raises(UserError, match="at most 1 replica.s. on this machine: leave out replicas=2"):
        make_strategy(2)


@pytest.fixture
def four_gpus(monkeypatch):
    """Stand-ins for GPUs, which the machine that runs this has not; what they are asked for is in `visible`."""
    visible = list(GPUS)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: GPUS)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: list(visible))
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda devices, kind: visible.__setitem__(slice(4), devices))
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda devices, cross_device_ops: devices)
    monkeypatch.setattr(strategy, "join", lambda communication: visible)
    monkeypatch.setattr(strategy, "_warning", lambda made: made)
    return visible


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("asked", "given"), [(0, 4), (1, 1), (3, 3)])
def test_gpus_that_are_not_asked_for_are_left_to_others(asked, given, workers, four_gpus, monkeypatch):
    if workers > 1:
        monkeypatch.setenv("TF_CONFIG", OF_TWO)
    left = GPUS[:given]
    assert make_strategy(asked) == (left if workers > 1 else [f"GPU:{i}" for i in range(given)])
    assert four_gpus == left


def test_more_gpus_than_are_there_or_were_left(four_gpus):
    with pytest.raises(UserError, match="4 GPUs, too few for replicas=5"):
        make_strategy(5)
    make_strategy(2)
    with pytest.raises(UserError, match="ask for replicas=3 in a new process"):
        make_strategy(3)


def test_a_single_gpu_is_divided_by_its_own_memory(monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU 0"])
    monkeypatch.setattr(strategy, "_mirrored", lambda devices: devices)
    monkeypatch.setattr(strategy, "_split", lambda *asked: asked)
    monkeypatch.setattr(strategy, "free_memory", lambda: 80_000)
    assert make_strategy(2) == ("GPU 0", 2, 36_000)
    monkeypatch.setattr(strategy, "free_memory", lambda: None)
    with pytest.raises(UserError, match="cannot split the GPU: .* give replicas=1"):
        make_strategy(2)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="there is no glibc")
@pytest.mark.slow
def test_a_worker_of_several_keeps_large_blocks_for_their_next_use(monkeypatch):
    """By the pages that are new to the process when it writes to a block, in one that makes a worker's strategy."""
    monkeypatch.setenv("TF_CONFIG", OF_TWO)
    program = """if True:
        import ctypes, resource
        from keras_replicas import strategy
        strategy.join = lambda communication: None  # which waits for the other
        strategy._warning = lambda made: made
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
        strategy.make_strategy()
        new_pages()
        print(new_pages())
    """
    before, after = map(int, python("-c", program).stdout.split())
    assert before > 1000 and after < 100


@pytest.mark.slow
def test_deterministic_turns_tf32_off_and_op_determinism_on():
    """On a GPU they would show in the bits. Here, op determinism shows in a random number without a seed: it raises."""
    program = """if True:
        import sys
        import tensorflow as tf
        from keras_replicas.strategy import make_strategy
        make_strategy(1, deterministic=sys.argv[1] == "True")
        try:
            tf.random.uniform([1])
            print("random", end=" ")
        except RuntimeError:
            print("deterministic", end=" ")
        print(tf.config.experimental.tensor_float_32_execution_enabled())
    """
    for wanted, printed in ((True, "deterministic False\n"), (False, "random True\n")):
        assert python("-c", program, wanted).stdout == printed


@pytest.mark.slow
def test_a_tpu_that_is_not_there():
    code = "from keras_replicas.strategy import make_strategy; make_strategy()"
    done = python("-c", code, env=os.environ | {"TPU_NAME": "local"})
    assert "keras_replicas.errors.UserError: no TPU at TPU_NAME=local (" in done.stderr


@pytest.mark.parametrize(("cores", "threads"), [(1, [2]), (2, [])])
def test_a_worker_with_one_core_has_a_second_thread_to_answer_others(monkeypatch, cores, threads):
    asked = []
    monkeypatch.setenv("TF_CONFIG", OF_TWO)
    monkeypatch.setattr(strategy, "num_cores", lambda: cores)
    monkeypatch.setattr(strategy, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(strategy, "join", lambda options: "joined")
    monkeypatch.setattr(strategy, "_warning", lambda made: made)
    monkeypatch.setattr(tf.config.threading, "set_inter_op_parallelism_threads", asked.append)
    assert make_strategy() == "joined" and asked == threads
