import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorflow as tf

from common.devices import peak
from common.devices.peak import device_peak, matmul_flops_per_second


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """What was measured; each time twice as much as before."""
    found = [1e12]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(peak, "matmul_flops_per_second", lambda dtype: found.append(found[-1] * 2) or found[-1])
    return found


def test_a_peak_is_measured_once_for_a_machine_and_a_format(measured, monkeypatch):
    assert device_peak("float32") == device_peak("float32") == 2e12
    assert device_peak("bfloat16") == 4e12
    monkeypatch.setattr(peak, "num_cores", lambda: 1000)
    assert device_peak("float32") == 8e12
    monkeypatch.setattr(tf, "__version__", "0")
    assert device_peak("float32") == 16e12


@pytest.mark.parametrize("content", [b"", b"2e1x", b"-1", b"nan", b"inf", b"\xff\xfe"])
def test_a_damaged_file_is_made_anew(measured, tmp_path, content):
    device_peak("float32")
    (file,) = tmp_path.glob("*/*-peak")
    file.write_bytes(content)
    assert device_peak("float32") == device_peak("float32") == 4e12


def test_a_cache_that_cannot_be_written_does_not_matter(measured, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert device_peak("float32") == 2e12


def test_the_cores_are_those_that_this_process_may_use():
    may_use = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(may_use)})
        assert peak.num_cores() == 1
    finally:
        os.sched_setaffinity(0, may_use)
    assert peak.num_cores() == len(may_use)


def test_a_device_is_called_by_its_model(monkeypatch):
    assert peak.device_name() == peak.cpu_name()
    assert f": {peak.cpu_name()}\n" in Path("/proc/cpuinfo").read_text()
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["first", "second"])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {"device_name": f"the {gpu}"})
    assert peak.device_name() == "the first"
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {})
    assert peak.device_name() == "GPU"


@pytest.mark.parametrize("lines", [None, "processor : 0\n"], ids=["no file", "no model"])
def test_a_cpu_without_a_model_is_called_by_its_architecture(monkeypatch, lines):
    """On macOS, and on ARM."""

    def read(path):
        if lines is None:
            raise FileNotFoundError
        return lines

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert peak.cpu_name() == platform.machine() != ""


def test_the_compilation_of_a_product_is_not_timed():
    flops = max(matmul_flops_per_second("float32", seconds=0) for _ in range(2))
    assert 1e9 < flops < 1e15


def test_the_peak_is_at_least_the_speed_of_one_product_and_not_beyond_belief():
    n = 2048
    matrix = tf.random.normal([n, n])
    taken = []
    for _ in range(10):
        began = time.process_time()
        tf.matmul(matrix, matrix).numpy()
        taken.append((time.process_time() - began) / peak.num_cores())
    assert 0.7 < matmul_flops_per_second("float32") / (2 * n**3 / min(taken)) < 3


def test_what_other_processes_take_of_the_cores_does_not_change_the_peak():
    """By the wall clock, the peak would be a fifth."""
    quiet = matmul_flops_per_second("float32", seconds=1.0)
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(4 * peak.num_cores())]
    try:
        time.sleep(0.2)
        busy = matmul_flops_per_second("float32", seconds=1.0)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert busy == pytest.approx(quiet, rel=0.2)  # within 0.05 as a rule
