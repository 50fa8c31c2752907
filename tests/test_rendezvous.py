"""How workers meet, what they tell each other, and who else can reach their ports."""

import json
import os
import re
import socket

import pytest

from keras_replicas.cluster import all_on_this_machine, worker_config
from keras_replicas.errors import UserError
from keras_replicas.launch import free_addresses
from keras_replicas.workers import _meet, close_to_other_machines
from tests.conftest import ROOT, python

# A worker that is alone in its cluster, and the interfaces that its sockets listen on, before and after it has joined.
WORKER = """
import os, socket
import tensorflow as tf
from keras_replicas import workers as rendezvous

def interfaces():
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.fromfd(number, socket.AF_INET6, socket.SOCK_STREAM) as ours:
                if ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    device = ours.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).strip(b"\\0").decode()
                    yield ours.getsockname()[0], device
        except OSError:
            pass

answers = rendezvous._answers
rendezvous._answers = lambda address: print(*interfaces()) or answers(address)
rendezvous.join(tf.distribute.experimental.CommunicationOptions())
print(*interfaces(), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("host", "meets_at"),
    [("localhost", "127.0.0.1"), pytest.param("[::1]", "::1", marks=pytest.mark.slow)],
)
def test_a_worker_at_loopback_listens_to_its_own_machine_alone(host, meets_at):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"{host}:{free.getsockname()[1]}"
    environment = os.environ | {"TF_CONFIG": json.dumps(worker_config([address], 0))}
    done = python("-c", WORKER, env=environment, timeout=150)
    assert done.returncode == 0 and "warning: port" not in done.stderr
    assert done.stdout.splitlines() == [str((meets_at, "")), str(("::", "lo"))]


# One of two workers, whose data and weights are its own, and what it was told.
OF_TWO = """
import json, sys
import keras, numpy as np
from tensorflow.python.eager.context import context
from keras_replicas import Checkpoints, UserError, agree, data_parallel, exchange, make_strategy, worker_index

def refused(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except UserError as error:
        return str(error)

own = worker_index()
with make_strategy().scope():
    model = data_parallel(keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    model.set_weights([np.full([2, 1], own), np.zeros(1)])
times = context()._coordination_service_config
told = [
    exchange({"worker": own}),
    refused(exchange, {"error": "lost" if own == 1 else None}),
    refused(agree, {"seed": 1}, "is another"),
    refused(agree, {"seed": own, "same": 1, **({"more": 2} if own else {})}, "is another"),
    [times.heartbeat_timeout_in_ms, times.cluster_register_timeout_in_ms],
    refused(Checkpoints(sys.argv[1], model=model).restore),
    refused(model.fit, np.full([4, 2], own), np.ones([4, 1]), verbose=0),
]
print(json.dumps(told), flush=True)
exchange({})  # before one leaves
"""


@pytest.mark.slow
def test_two_workers_tell_each_other_and_both_refuse_other_data_or_weights(tmp_path):
    (tmp_path / "tell.py").write_text(OF_TWO)
    words = ["launch", "--workers", 2, "--log-dir", tmp_path, tmp_path / "tell.py", tmp_path / "saved"]
    done = python("-m", "keras_replicas", *words, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300)
    different = "worker 1 is another: seed 1, not 0, more 2, not None"
    for printed in (done.stdout, (tmp_path / "worker-1.log").read_text()):
        *told, weights, data = json.loads(next(line for line in printed.splitlines() if line.startswith("[[")))
        assert told == [[{"worker": 0}, {"worker": 1}], "lost", None, different, [15_000, 300_000]]
        assert re.search(r"worker 1 starts from different weights .*: checksum of the weights \d+, not \d+$", weights)
        assert data.startswith("worker 1 has other data than the chief: give every worker the same whole batches")


def test_a_port_in_use_is_named(monkeypatch):
    (own,) = free_addresses(1)
    monkeypatch.setenv("TF_CONFIG", json.dumps(worker_config([own], 0)))
    host, port = own.split(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(UserError, match=f"^this worker cannot listen at {own} .Address already in use.. Give another"),
    ):
        _meet(1)


@pytest.mark.parametrize("other", ["192.0.2.1", "no-such-host.invalid"])
def test_workers_on_other_machines_are_told_from_those_on_this_one(other, monkeypatch):
    """Although this machine's own name is of loopback, as `/etc/hosts` often has it."""
    for addresses in (["localhost:1", "127.0.0.2:1", "[::1]:1"], ["localhost:1", f"{other}:1"]):
        monkeypatch.setenv("TF_CONFIG", json.dumps(worker_config(addresses, 0)))
        assert all_on_this_machine() == (f"{other}:1" not in addresses)


def test_what_cannot_be_closed_is_told(capsys, monkeypatch):
    listening = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)  # as TensorFlow's
    port = listening.getsockname()[1]
    monkeypatch.setattr(socket, "SO_BINDTODEVICE", 2**20)  # which no system has
    close_to_other_machines(port)
    told = capsys.readouterr().err
    assert told.startswith(f"warning: port {port} is open to other machines, and any client may run code (")
    assert told.count("\n") == 1
    listening.close()
    close_to_other_machines(port)
    assert "none of this process's sockets listens there" in capsys.readouterr().err
