"""The files in recipes/cluster, under the schedulers that they are for."""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import steps_in
from benchmarks.hosts import ADDRESSES, on, two_hosts
from keras_replicas import UserError
from keras_replicas.cluster import PORT
from tests.conftest import ROOT, python, wait_until

FILES = ROOT / "recipes/cluster"
STEPS = 600  # of a few milliseconds: enough of them to stop a run in the middle
OPTIONS = ["bert_mlm", "--corpus", str(ROOT / "LICENSE"), "--model", "nano", "--vocabulary-size", "300"]
OPTIONS += f"--seq-length 16 --batch-size 4 --epochs 100 --checkpoint-every 10 --max-steps {STEPS}".split()
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # `python` is this one


def is_training(workdir, since=0):
    """Whether some steps are done since, and not all."""
    assert not (workdir / "results.json").exists()
    return steps_in(workdir) > since + 10


def worker_pid(workdir):
    """The process of one of the run's workers."""
    return int(ask("pgrep", "--newest", "--full", f"^[^ ]*python.* -m recipes run bert_mlm .*{workdir}"))


def assert_complete_after_a_stop(workdir):
    results = json.loads((workdir / "results.json").read_text())
    assert (results["workers"], results["replicas"], results["steps"]) == (2, 2, STEPS)
    assert results["versions"]["keras"] == importlib.metadata.version("keras") > "3"
    assert results["resumed_from_step"] > 0
    steps = [json.loads(line)["step"] for line in (workdir / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))


@contextlib.contextmanager
def started(command, log, **keywords):
    """A process, which is over after the block."""
    with log.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **keywords)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        process.kill()
        process.wait()


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Slurm's daemons, for a cluster of this machine; in the environment, what its commands need to find them."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
    if missing or os.getuid():
        pytest.skip(f"needs root, and these programs of Slurm: {', '.join(missing) or 'all found'}")
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
    (folder / "slurm.conf").write_text(f"""\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
# A job is queued again only when its credentials are past: 5 seconds, not 120.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName=localhost CPUs=2
PartitionName=all Nodes=localhost Default=YES
""")
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    munge_files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    log = folder / "daemons.log"
    with (
        started(["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge_files], log),
        started(["slurmctld", "-D"], log),
        started(["slurmd", "-D"], log),
    ):
        wait_until(lambda: "idle" in ask("sinfo", "--noheader", "--format=%T"), log)
        yield
        subprocess.run(["scancel", "--user=root"], check=False)
        wait_until(lambda: ask("squeue", "--noheader") == "", log)


def ask(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def submit(workdir, *options):
    """The job's number and its log."""
    log = workdir.with_suffix(".log")
    allocation = ["--parsable", "--nodes=1", "--ntasks-per-node=2", f"--output={log}"]
    command = ["sbatch", *allocation, FILES / "slurm.sbatch", *OPTIONS, "--workdir", workdir, *options]
    return subprocess.check_output(command, cwd=ROOT, env=os.environ | {"PATH": PATH}, text=True).strip(), log


@pytest.mark.long
@pytest.mark.parametrize("stop", ["scontrol requeue", "kill"])
def test_a_slurm_job_that_was_stopped_or_lost_a_worker_goes_on(stop, slurm, tmp_path):
    """A requeue, which sends SIGTERM, as a preemption and the time limit do; SIGKILL to one worker."""
    workdir = tmp_path / "run"
    job, log = submit(workdir)
    wait_until(lambda: is_training(workdir), log)
    if stop == "kill":
        os.kill(worker_pid(workdir), signal.SIGKILL)
    else:
        subprocess.run([*stop.split(), job], check=True)
    wait_until(lambda: "JobState=COMPLETED" in ask("scontrol", "show", "job", job), log)
    assert "Restarts=1 " in ask("scontrol", "show", "job", job)
    assert_complete_after_a_stop(workdir)
    assert log.read_text().count("Stopped by a signal") == (0 if stop == "kill" else 2)


@pytest.mark.slow
def test_slurm_runs_wrong_input_once_and_a_cancelled_job_no_more(slurm, tmp_path):
    job, log = submit(tmp_path / "wrong", "--max-steps", "-1")
    wait_until(lambda: "JobState=FAILED" in ask("scontrol", "show", "job", job), log)
    assert "Restarts=0 BatchFlag=1 Reboot=0 ExitCode=2:0" in ask("scontrol", "show", "job", job)
    job, log = submit(tmp_path / "cancelled")
    wait_until(lambda: is_training(tmp_path / "cancelled"), log)
    subprocess.run(["scancel", job], check=True)
    wait_until(lambda: "JobState=CANCELLED" in ask("scontrol", "show", "job", job), log)
    assert "Restarts=0" in ask("scontrol", "show", "job", job)


@pytest.fixture
def ray_cluster(tmp_path):
    """Two nodes of Ray with a CPU each; the variables that lead to them."""
    pytest.importorskip("ray")
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex(), "RAY_USAGE_STATS_ENABLED": "0"}
    environment = os.environ | {"PATH": PATH} | variables
    with contextlib.ExitStack() as nodes:
        head = ["--head", "--include-dashboard=false", f"--port={address.split(':')[1]}"]
        for name, flags in (("head", head), ("node", [f"--address={address}"])):
            log = tmp_path / f"{name}.log"
            nodes.enter_context(started(["ray", "start", *flags, "--num-cpus=1", "--block"], log, env=environment))
            wait_until(lambda log=log: "Ray runtime started" in log.read_text(), log)
        yield environment | {"RAY_ADDRESS": address}


@pytest.mark.parametrize("words", ["--workers 0", "--workers 1 --max-restarts -1", "--workers 1 --gpus -1"])
def test_ray_is_not_begun_with_a_wrong_option(words):
    pytest.importorskip("ray")
    done = python(FILES / "ray_launch.py", *words.split(), "bert_mlm", timeout=60)
    assert done.returncode == 2 and re.fullmatch(r"error: --[\w-]+ must be at least \d\n", done.stderr)


@pytest.mark.long
def test_ray(ray_cluster, tmp_path):
    """SIGTERM to the program stops the workers; the same command goes on, and again where one is killed."""
    workdir, log = tmp_path / "run", tmp_path / "ray.log"
    command = [sys.executable, FILES / "ray_launch.py", "--workers", "2", "--max-restarts", "1"]
    command += [*OPTIONS, "--workdir", workdir]
    with started(command, log, cwd=ROOT, env=ray_cluster) as program:
        wait_until(lambda: is_training(workdir), log)
        program.terminate()
        assert program.wait(timeout=300) == 128 + signal.SIGTERM, log.read_text()
    done = steps_in(workdir)
    with started(command, log, cwd=ROOT, env=ray_cluster) as program:
        wait_until(lambda: is_training(workdir, done), log)
        os.kill(worker_pid(workdir), signal.SIGKILL)
        assert program.wait(timeout=600) == 0, log.read_text()
    assert_complete_after_a_stop(workdir)
    assert "STRICT_SPREAD" in log.read_text()
    with started([*command, "--max-steps", "-1"], log, cwd=ROOT, env=ray_cluster) as program:
        assert program.wait(timeout=300) == 2, log.read_text()


@pytest.mark.slow
def test_parameter_servers_survive_a_worker(tmp_path):
    """The page as it is: of two workers one is killed, and the other does its steps."""
    words = [sys.executable, FILES / "parameter_servers.py", "--local", "2", "--steps", "2000"]
    log = tmp_path / "log"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with started(words, log, env=environment) as page:
        wait_until(lambda: "step 200:" in log.read_text(), log)
        tasks = Path(f"/proc/{page.pid}/task/{page.pid}/children").read_text().split()
        os.kill(int(tasks[0]), signal.SIGKILL)
        assert page.wait(timeout=600) == 0, log.read_text()
        assert not any(Path(f"/proc/{task}").exists() for task in tasks)
    losses = [float(loss) for loss in re.findall(r"^step \d+00: loss (\S+)$", log.read_text(), re.MULTILINE)]
    assert len(losses) == 20 and losses[-1] < 0.1 < losses[0]
    assert "warning: port" not in log.read_text()


@pytest.fixture
def manifest():
    """The documents of the Kubernetes manifest by their kind."""
    yaml = pytest.importorskip("yaml")
    return {part["kind"]: part for part in yaml.safe_load_all((FILES / "kubernetes.yaml").read_text())}


@pytest.mark.slow
def test_kubernetes_knows_every_word_of_the_manifest_and_its_parts_name_each_other(manifest):
    client = pytest.importorskip("kubernetes").client.ApiClient()
    assert list(manifest) == ["PersistentVolumeClaim", "Service", "Job"]
    for kind, part in manifest.items():
        model = client.deserialize(json.dumps(part), f"V1{kind}", "application/json")
        assert client.sanitize_for_serialization(model) == part  # what it does not know is lost on the way
    claim, service, job = manifest.values()
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    variables = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name} and variables["JOB_NAME"] == name
    assert variables["JOB_SERVICE"] == pod["subdomain"] == service["metadata"]["name"]
    assert variables["JOB_WORKERS"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert [port["port"] for port in service["spec"]["ports"]] == [PORT]
    claims = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert claim["metadata"]["name"] in claims and {volume["name"] for volume in pod["volumes"]} == mounts


@pytest.fixture
def hosts():
    """Two hosts with a network between them, as two pods have it."""
    with contextlib.ExitStack() as after:
        try:
            yield after.enter_context(two_hosts())
        except UserError as error:
            pytest.skip(str(error))


@pytest.mark.slow
def test_the_pods_of_the_manifest_train_together(manifest, hosts, tmp_path):
    """One pod alone is told to stop, as where its node is drained; all end with the status that the Job ignores."""
    pod = manifest["Job"]["spec"]["template"]["spec"]
    variables = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
    names, log = tmp_path / "hosts", tmp_path / "pods.log"
    of_service = (f"{ADDRESSES[i]} {variables['JOB_NAME']}-{i}.{variables['JOB_SERVICE']}\n" for i in range(2))
    names.write_text("127.0.0.1 localhost\n" + "".join(of_service))
    mount = pod["containers"][0]["volumeMounts"][0]["mountPath"]
    words = [word.replace(mount, str(tmp_path)) for word in pod["containers"][0]["command"]]
    workdir = Path(words[words.index("--workdir") + 1])
    command = ["sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(names), *words, *OPTIONS[1:]]
    for status in (143, 0):
        with contextlib.ExitStack() as running:
            pods = []
            for index, host in enumerate(hosts):
                environment = os.environ | variables | {"PATH": PATH, "JOB_COMPLETION_INDEX": str(index)}
                pods.append(running.enter_context(started(on(host, *command), log, cwd=ROOT, env=environment)))
            if status:
                wait_until(lambda: is_training(workdir), log)
                os.kill(worker_pid(workdir), signal.SIGTERM)
            assert [each.wait(timeout=600) for each in pods] == [status, status], log.read_text()
    ignored = [rule["onExitCodes"]["values"] for rule in manifest["Job"]["spec"]["podFailurePolicy"]["rules"][:2]]
    assert ignored == [[2], [143]]
    assert_complete_after_a_stop(workdir)
