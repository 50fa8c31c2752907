import json

import pytest

from common.command_line import UserError
from common.strategy import gpu_memory_mb, is_chief, make_strategy, num_workers


@pytest.mark.parametrize(("asked", "given"), [(0, 2), (1, 1), (2, 2), (4, 4)])
def test_the_cpu_is_split(asked, given):
    strategy = make_strategy(asked)
    assert strategy.num_replicas_in_sync == given and is_chief(strategy)


def test_more_than_can_be_split_now():
    with pytest.raises(UserError, match="ask for 8 replicas in a new process"):
        make_strategy(8)


def test_workers_by_tf_config(monkeypatch):
    assert num_workers() == 1
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]}}))
    assert num_workers() == 3
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
