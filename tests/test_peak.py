import subprocess
import sys
import time

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


def test_the_compilation_of_a_product_is_not_timed():
    flops = max(matmul_flops_per_second("float32", seconds=0) for _ in range(2))
    assert 1e9 < flops < 1e15


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
