"""How workers meet, what they tell each other, and who else can reach their ports."""

import json
import os
import socket
import subprocess
import sys

import pytest

from keras_replicas.cluster import all_on_this_machine, worker_config
from keras_replicas.errors import UserError
from keras_replicas.launch import free_addresses
from keras_replicas.workers import _meet, close_to_other_machines
from tests.conftest import ROOT

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
    done = subprocess.run(
        [sys.executable, "-c", WORKER], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0 and "warning: port" not in done.stderr
    assert done.stdout.splitlines() == [str((meets_at, "")), str(("::", "lo"))]


# One of two workers, and what it was told.
OF_TWO = """
import json, os
import tensorflow as tf
from tensorflow.python.eager.context import context
from keras_replicas.cluster import worker_index
from keras_replicas.errors import UserError
from keras_replicas.launch import free_addresses
from keras_replicas.workers import agree, exchange, join

def refused(function, *arguments):
    try:
        function(*arguments)
    except UserError as error:
        return str(error)

join(tf.distribute.experimental.CommunicationOptions())
own, times = worker_index(), context()._coordination_service_config
told = [
    exchange({"worker": own}),
    refused(exchange, {"error": "lost" if own == 1 else None}),
    refused(agree, {"seed": 1}, "is another"),
    refused(agree, {"seed": own, "same": 1, **({"more": 2} if own else {})}, "is another"),
    [times.heartbeat_timeout_in_ms, times.cluster_register_timeout_in_ms],
]
print(json.dumps(told), flush=True)
exchange({})  # before one leaves
os._exit(0)
"""


@pytest.mark.slow
def test_two_workers_tell_each_other():
    addresses = free_addresses(2)
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
    environments = [os.environ | {"TF_CONFIG": json.dumps(worker_config(addresses, index))} for index in range(2)]
    processes = [subprocess.Popen([sys.executable, "-c", OF_TWO], env=each, **options) for each in environments]
    try:
        answers = [json.loads(process.communicate(timeout=100)[0].splitlines()[-1]) for process in processes]
    finally:
        for process in processes:
            process.kill()
    different = "worker 1 is another: seed 1, not 0, more 2, not None"
    assert answers == [[[{"worker": 0}, {"worker": 1}], "lost", None, different, [15_000, 300_000]]] * 2


def test_who_has_not_come_is_named(monkeypatch):
    own, *others = addresses = free_addresses(3)
    monkeypatch.setenv("TF_CONFIG", json.dumps(worker_config(addresses, 0)))
    host, port = others[0].split(":")
    with socket.create_server((host, int(port))) as hanging:  # its machine takes the call, and it says nothing
        hanging.listen()
        with pytest.raises(UserError, match=f"^these workers have not joined within 1 s: {', '.join(sorted(others))}$"):
            _meet(0.9)


def test_a_port_in_use_is_named(monkeypatch):
    (own,) = free_addresses(1)
    monkeypatch.setenv("TF_CONFIG", json.dumps(worker_config([own], 0)))
    host, port = own.split(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(UserError, match=f"^this worker cannot listen at {own} .Address already in use.. Give another"),
    ):
        _meet(1)


@pytest.fixture
def listening():
    """A socket as TensorFlow's, on all interfaces."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
        yield listening


@pytest.fixture
def workers_at(listening, monkeypatch):
    """Puts workers on some hosts; on this machine at first."""

    def put(*hosts):
        addresses = [f"{host}:{listening.getsockname()[1]}" for host in hosts]
        monkeypatch.setenv("TF_CONFIG", json.dumps(worker_config(addresses, 0)))

    put("localhost", "127.0.0.2", "[::1]")
    return put


def interface(listening):
    return listening.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).strip(b"\0")


def test_a_port_is_closed_to_other_machines(listening, capsys):
    close_to_other_machines(listening.getsockname()[1])
    assert interface(listening) == b"lo" and capsys.readouterr().err == ""


@pytest.mark.parametrize("other", ["192.0.2.1", "no-such-host.invalid"])
def test_workers_on_other_machines_are_told_from_those_on_this_one(workers_at, other):
    """Although this machine's own name is of loopback, as `/etc/hosts` often has it."""
    assert all_on_this_machine()
    workers_at("localhost", other)
    assert not all_on_this_machine()


def test_what_cannot_be_closed_is_told(listening, capsys, monkeypatch):
    port = listening.getsockname()[1]
    monkeypatch.setattr(socket, "SO_BINDTODEVICE", 2**20)  # which no system has
    close_to_other_machines(port)
    told = capsys.readouterr().err
    assert told.startswith(f"warning: port {port} is open to other machines, and any client may run code (")
    assert told.count("\n") == 1
    listening.close()
    close_to_other_machines(port)
    assert "none of this process's sockets listens there" in capsys.readouterr().err
