import json
import re

import pytest

from keras_replicas.cluster import (
    is_address,
    is_chief,
    num_workers,
    tf_config,
    whole_number,
    worker_config,
    worker_index,
    workers,
)
from keras_replicas.errors import UserError

SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n2",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "JOB_NAME": "job", "JOB_SERVICE": "service", "JOB_WORKERS": "2"}


@pytest.fixture
def environment(monkeypatch):
    """Sets variables; TF_CONFIG, which the code sets itself, is as before after the test."""
    monkeypatch.setenv("TF_CONFIG", "")
    monkeypatch.delenv("TF_CONFIG")

    def set_(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_


def test_a_process_of_its_own(environment):
    assert tf_config() == {}
    assert (workers(), num_workers(), worker_index(), is_chief()) == ([], 1, 0, True)


def test_slurm(environment):
    environment(SLURM)
    assert tf_config() == worker_config(["n1:8888", "n2:8888"], 1)
    assert (num_workers(), worker_index(), is_chief()) == (2, 1, False)


def test_kubernetes(environment):
    environment(KUBERNETES)
    assert tf_config() == worker_config(["job-0.service:8888", "job-1.service:8888"], 1)


def test_tf_config_comes_before_slurm_and_slurm_before_kubernetes(environment, monkeypatch):
    given = worker_config(["a:1", "b:2", "c:3"], 2)
    environment(SLURM | KUBERNETES | {"TF_CONFIG": json.dumps(given)})
    assert tf_config() == given
    monkeypatch.delenv("TF_CONFIG")
    assert workers() == ["n1:8888", "n2:8888"]
    environment({"TF_CONFIG": ""})  # how to train alone inside a scheduler's job
    assert tf_config() == {}


def test_a_single_task_of_slurm_is_a_process_of_its_own(environment):
    environment(SLURM | {"SLURM_STEP_NUM_TASKS": "1"})
    assert tf_config() == {}


@pytest.mark.parametrize(
    ("node_list", "tasks_per_node", "places"),
    [
        ("n[9-11]", "1(x3)", [("n9", 0), ("n10", 0), ("n11", 0)]),  # sorted as text, n10 comes before n9
        ("a,b", "2(x2)", [("a", 0), ("b", 0), ("a", 1), ("b", 1)]),  # srun --distribution=cyclic
    ],
)
def test_a_slurm_task_is_found_on_its_own_node(node_list, tasks_per_node, places, environment, monkeypatch):
    configs = []
    for rank, (node, local_rank) in enumerate(places):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        environment(
            {
                "SLURM_STEP_NUM_TASKS": str(len(places)),
                "SLURM_STEP_NODELIST": node_list,
                "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(local_rank),
                "SLURMD_NODENAME": node,
            }
        )
        configs.append(tf_config())
        assert workers()[worker_index()] == f"{node}:{8888 + local_rank}"
    assert all(config["cluster"] == configs[0]["cluster"] for config in configs)
    assert sorted(config["task"]["index"] for config in configs) == list(range(len(places)))


@pytest.mark.parametrize("variable", [name for name in SLURM if name != "SLURM_STEP_NUM_TASKS"])
def test_a_missing_variable_of_slurm(variable, environment, monkeypatch):
    environment(SLURM)
    monkeypatch.delenv(variable)
    with pytest.raises(UserError, match="from Slurm's variables .* set TF_CONFIG"):
        tf_config()


@pytest.mark.parametrize("variable", ["JOB_NAME", "JOB_WORKERS"])
def test_a_missing_variable_of_kubernetes(variable, environment, monkeypatch):
    environment(KUBERNETES)
    monkeypatch.delenv(variable)
    with pytest.raises(UserError, match=f"must be set in the Job's manifest .*{variable}"):
        tf_config()


def test_malformed_variables_of_kubernetes(environment):
    environment(KUBERNETES | {"JOB_WORKERS": "two"})
    with pytest.raises(UserError, match="must be set in the Job's manifest .*two"):
        tf_config()
    environment({"JOB_WORKERS": "2", "JOB_COMPLETION_INDEX": "2"})
    with pytest.raises(UserError, match="there is no worker 2"):
        tf_config()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        "7",
        '"text"',
        '{"task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": ["a:1"]}}',
        '{"cluster": ["a:1"], "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": "a:1"}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": [1]}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": ["a:1"]}, "task": 0}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "0"}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": -1}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "chief", "index": 0}}',
        '{"cluster": {"worker": ["a:1"], "evaluator": ["b:1"]}, "task": {"type": "evaluator", "index": 0}}',
        '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "worker", "index": 0}}',
    ],
)
def test_a_malformed_tf_config_is_answered_with_a_right_one(text, environment):
    environment({"TF_CONFIG": text})
    with pytest.raises(UserError, match='TF_CONFIG is malformed .* like {"cluster": {"worker": '):
        print(tf_config())


@pytest.mark.parametrize("text", ["5m", "-1", "0", "1.5", "abc", "9" * 30])
@pytest.mark.parametrize("variable", ["JOIN_TIMEOUT", "SLURM_STEP_NUM_TASKS"])
def test_a_variable_that_is_no_whole_number_is_named(variable, text, environment):
    environment({variable: text})
    told = f"{variable} must be a whole number from 1 to 999999, not '{re.escape(text)}'"
    with pytest.raises(UserError, match=told):
        whole_number("JOIN_TIMEOUT", 300)
        tf_config()
    environment({variable: ""})
    assert whole_number(variable, 300) == 300


@pytest.mark.parametrize(("task_type", "index", "place"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)])
def test_workers_come_behind_a_chief(task_type, index, place, environment):
    config = {"cluster": {"worker": ["b:2", "c:3"], "chief": ["a:1"]}, "task": {"type": task_type, "index": index}}
    environment({"TF_CONFIG": json.dumps(config)})
    assert workers() == ["a:1", "b:2", "c:3"]
    assert (num_workers(), worker_index(), is_chief()) == (3, place, place == 0)


@pytest.mark.parametrize("text", ["host:1", "10.0.0.1:8888", "[::1]:65535", "job-0.service:8888"])
def test_an_address(text):
    assert is_address(text)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":8888", "host:0", "host:65536", "host:-1", "host:http", "::1:8888", "[]:1"]
)
def test_no_address(text):
    assert not is_address(text)
