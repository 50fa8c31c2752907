from pathlib import Path

import keras
import pytest
import tensorflow as tf

from common.training import precision
from common.training.precision import choose_precision, has_amx


@pytest.mark.parametrize(
    ("capabilities", "amx", "width", "jit", "chosen"),
    [
        ([(8, 0), (9, 0)], False, 128, True, "mixed_bfloat16"),
        ([(8, 0), (7, 5)], True, 768, False, "float32"),
        ([None], True, 768, False, "float32"),
        ([], True, 768, False, "mixed_bfloat16"),
        ([], True, 768, True, "float32"),
        ([], True, 512, False, "float32"),
        ([], False, 768, False, "float32"),
    ],
)
def test_auto_follows_the_table(capabilities, amx, width, jit, chosen, monkeypatch):
    """GPUs and AMX are stand-ins: the machine that runs this has neither."""
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: capabilities)
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda gpu: {"compute_capability": gpu} if gpu else {}
    )
    monkeypatch.setattr(precision, "has_amx", lambda: amx)
    assert choose_precision("auto", jit, width) == chosen
    assert choose_precision("mixed_float16", jit, width) == "mixed_float16"


def test_floatx_of_the_users_keras_json_does_not_count():
    keras.config.set_floatx("float16")
    try:
        choose_precision("float32", False, 128)
        assert keras.config.floatx() == "float32"
    finally:
        keras.config.set_floatx("float32")


def test_amx_is_read_from_the_processors_flags(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(precision, "Path", lambda path: file if path == "/proc/cpuinfo" else Path(path))
    assert not has_amx()  # no such file, as on a Mac
    file.write_text("flags : fpu avx512f avx512_bf16")
    assert not has_amx()
    file.write_text("flags : fpu avx512f amx_bf16 amx_tile")
    assert has_amx()
