import pytest

from keras_replicas.errors import UserError
from keras_replicas.gpus import free_memory, gpu_names, gpu_shares, visible_gpus


def test_a_gpu_is_a_line_and_its_parts_are_none(nvidia_smi):
    assert gpu_names() == []
    first, part, second = "GPU 0: NVIDIA H100", "  MIG 1g.10gb Device 0: (UUID: MIG-2)", "GPU 1: NVIDIA H100"
    nvidia_smi(first, part, second)
    assert gpu_names() == [first, second]


@pytest.mark.parametrize(
    ("told", "visible"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("2, 0", ["2", "0"]),
        ("1,-1,2", ["1"]),
        ("1,4,2", ["1"]),
        ("GPU-1,MIG-2", ["GPU-1", "MIG-2"]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(nvidia_smi, monkeypatch, told, visible):
    if told is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    assert visible_gpus() == []
    nvidia_smi(*(f"GPU {i}: NVIDIA H100" for i in range(4)))
    assert visible_gpus() == visible


def test_workers_share_the_gpus_that_may_be_used(nvidia_smi, monkeypatch):
    assert gpu_shares(3) == ([], 0)
    nvidia_smi(*(f"GPU {i}: NVIDIA H100" for i in range(7)))
    assert gpu_shares(2) == (["0,1,2", "3,4,5"], 1)
    assert gpu_shares(7) == (list("0123456"), 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,2,3")
    assert gpu_shares(1) == (["6,2,3"], 0)
    assert gpu_shares(2) == (["6", "2"], 1)
    with pytest.raises(UserError, match="4 workers need a GPU each, and this process may use 3. Start fewer"):
        gpu_shares(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_shares(4) == ([], 0)


def test_the_free_memory_of_the_first_visible_gpu(nvidia_smi, monkeypatch):
    assert free_memory() is None
    nvidia_smi("80000", "70000")
    assert free_memory() == 80_000
    nvidia_smi("[N/A]")
    assert free_memory() is None
    nvidia_smi("80000", status=1)
    assert free_memory() is None
    nvidia_smi("$5")  # the fifth word is the GPU that is asked for
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert free_memory() is None
