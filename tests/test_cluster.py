import json
import os
import re
import shutil
import subprocess

import pytest

from keras_replicas import UserError
from keras_replicas.cluster import (
    hostnames,
    is_address,
    is_chief,
    num_workers,
    tf_config,
    whole_number,
    worker_config,
    worker_index,
    workers,
)

SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
SLURM |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n2"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "JOB_NAME": "job", "JOB_SERVICE": "service", "JOB_WORKERS": "2"}
OF_SLURM, OF_KUBERNETES = ["n1:8888", "n2:8888"], ["job-0.service:8888", "job-1.service:8888"]


@pytest.fixture
def environment(monkeypatch):
    """Sets variables; TF_CONFIG, which the code sets itself, is as before after the test."""
    monkeypatch.setenv("TF_CONFIG", "")
    monkeypatch.delenv("TF_CONFIG")
    return lambda variables: [monkeypatch.setenv(*each) for each in variables.items()]


def config_of(addresses, task_type, index):
    return {"TF_CONFIG": json.dumps({"cluster": addresses, "task": {"type": task_type, "index": index}})}


CHIEF_FIRST = {"worker": ["b:2", "c:3"], "chief": ["a:1"]}


@pytest.mark.parametrize(
    ("variables", "addresses", "index"),
    [
        ({}, [], 0),
        (SLURM, OF_SLURM, 1),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, [], 0),  # a single task is a process of its own
        (KUBERNETES, OF_KUBERNETES, 1),
        (SLURM | KUBERNETES, OF_SLURM, 1),
        (SLURM | KUBERNETES | config_of({"worker": ["a:1", "b:2", "c:3"]}, "worker", 2), ["a:1", "b:2", "c:3"], 2),
        (SLURM | KUBERNETES | {"TF_CONFIG": ""}, [], 0),  # how to train alone inside a scheduler's job
        (config_of(CHIEF_FIRST, "chief", 0), ["a:1", "b:2", "c:3"], 0),
        (config_of(CHIEF_FIRST, "worker", 1), ["a:1", "b:2", "c:3"], 2),
    ],
)
def test_who_the_workers_are(variables, addresses, index, environment):
    environment(variables)
    if "chief" not in variables.get("TF_CONFIG", ""):
        assert tf_config() == (worker_config(addresses, index) if addresses else {})
    assert (workers(), num_workers()) == (addresses, max(len(addresses), 1))
    assert (worker_index(), is_chief()) == (index, index == 0)


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
        given = len(places), node_list, tasks_per_node, rank, local_rank, node
        environment(dict(zip(SLURM, map(str, given), strict=True)))
        configs.append(tf_config())
        assert workers()[worker_index()] == f"{node}:{8888 + local_rank}"
    assert all(config["cluster"] == configs[0]["cluster"] for config in configs)
    assert sorted(config["task"]["index"] for config in configs) == list(range(len(places)))


@pytest.mark.parametrize(
    ("given", "missing", "told"),
    [
        *(
            (SLURM, name, "from Slurm's variables .* set TF_CONFIG")
            for name in SLURM
            if "PROCID" not in name and "NUM" not in name
        ),
        (KUBERNETES, "JOB_NAME", "must be set in the Job's manifest .*JOB_NAME"),
        (KUBERNETES, "JOB_WORKERS", "must be set in the Job's manifest .*JOB_WORKERS"),
        (KUBERNETES | {"JOB_WORKERS": "two"}, "", "must be set in the Job's manifest .*two"),
        (KUBERNETES | {"JOB_COMPLETION_INDEX": "2"}, "", "there is no worker 2"),
    ],
)
def test_a_variable_of_a_scheduler_that_is_missing_or_malformed(given, missing, told, environment, monkeypatch):
    environment(given)
    monkeypatch.delenv(missing, raising=False)
    with pytest.raises(UserError, match=told):
        tf_config()


ONE = {"worker": ["a:1"]}
NOT_THERE = [(ONE, "worker", index) for index in (None, "one", 1, -1)]
NOT_THERE += [({kind: ["a:1"]}, kind, 0) for kind in ("master", "workerpool0")] + [({}, "worker", 0)]
NOT_THERE += [
    (cluster, "worker", 0)
    for cluster in ({"worker": ["a:1", "a:1"]}, ["a:1"], {"worker": "a:1"}, {"worker": [1]}, {"worker": ["a"]})
]
NOT_THERE += [(ONE | {"ps": ["b:1"]}, kind, 0) for kind in ("worker", "ps")]


MALFORMED = ["{", "[]", "null", "7", '"text"', '{"cluster": {"worker": ["a:1"]}}']


@pytest.mark.parametrize("text", MALFORMED + [config_of(*each)["TF_CONFIG"] for each in NOT_THERE])
def test_a_malformed_tf_config_is_answered_with_a_right_one(text, environment):
    environment({"TF_CONFIG": text})
    with pytest.raises(UserError, match='TF_CONFIG is malformed .* like {"cluster": {"worker": '):
        tf_config()


def test_workers_go_on_without_the_evaluator_which_ends(environment, capsys):
    environment(config_of(CHIEF_FIRST | {"evaluator": ["d:4"]}, "worker", "1"))
    assert (workers(), worker_index()) == (["a:1", "b:2", "c:3"], 2)
    assert tf_config() == {"cluster": CHIEF_FIRST, "task": {"type": "worker", "index": 1}}
    assert json.loads(os.environ["TF_CONFIG"]) == tf_config()  # which TensorFlow reads
    environment(config_of(CHIEF_FIRST | {"evaluator": ["d:4"]}, "evaluator", 0))
    with pytest.raises(SystemExit) as ended:
        tf_config()
    assert ended.value.code == 0 and "evaluator" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("gpu[01-02]-ib", ["gpu01-ib", "gpu02-ib"]),
        ("r[1-2]n[01-02],login", ["r1n01", "r1n02", "r2n01", "r2n02", "login"]),
        ("n[9-11],m[007]", ["n9", "n10", "n11", "m007"]),
    ],
)
def test_node_lists_are_what_slurm_makes_of_them(nodes, names, tmp_path):
    assert [*hostnames(nodes)] == names
    if shutil.which("scontrol"):
        settings = tmp_path / "slurm.conf"
        settings.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\n")
        command, environment = ["scontrol", "show", "hostnames", nodes], os.environ | {"SLURM_CONF": str(settings)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.stdout.split() == names or "Invalid hostlist" in done.stderr  # to some versions, with a suffix


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


def test_addresses():
    for text in ("host:1", "10.0.0.1:8888", "[::1]:65535", "job-0.service:8888"):
        assert is_address(text), text
    for text in ("", "host", "host:", ":8888", "host:0", "host:65536", "host:-1", "host:http", "::1:8888", "[]:1"):
        assert not is_address(text), text
