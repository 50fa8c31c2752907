import math
import os
import platform
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from common.files import finite
from common.model.sizes import dimensions
from common.run import speed
from common.run.results import report
from common.scores.language_model import perplexity
from keras_replicas.strategy import make_strategy


@pytest.mark.parametrize("replicas", [1, 4])
def test_the_peak_is_that_of_the_cores_which_logical_devices_share(monkeypatch, replicas):
    monkeypatch.setattr(speed, "device_peak", lambda dtype: {"float32": 1e12}[dtype])
    backbone = SimpleNamespace(**dimensions("tiny"), vocabulary_size=500)
    model = SimpleNamespace(backbone=backbone, distribute_strategy=make_strategy(replicas))
    flops = speed.model_flops(model, SimpleNamespace(seq_length=128, mask_rate=0.15))
    assert flops == (speed.flops_per_token(128, 512, 2, 500, 128, 0.15), 1e12)
    assert flops.utilisation(0.5 * 1e12 / flops.per_token) == pytest.approx(0.5)


@pytest.mark.parametrize(("lora_rank", "products"), [(None, 6), (8, 4)])
def test_a_classifiers_flops_are_those_of_all_layers_but_the_last(monkeypatch, lora_rank, products):
    monkeypatch.setattr(speed, "device_peak", lambda dtype: 1e12)
    model = SimpleNamespace(
        backbone=SimpleNamespace(**dimensions("mini"), vocabulary_size=500), distribute_strategy=make_strategy(1)
    )
    flops = speed.model_flops(model, SimpleNamespace(seq_length=128, lora_rank=lora_rank))
    assert flops.per_token == products * 3 * (4 * 256**2 + 2 * 256 * 1024)


def test_the_arithmetic_of_a_token_is_that_of_the_papers():
    layers = 5 * (4 * 2**2 + 2 * 2 * 3)  # weights in matrices
    head = 2**2 + 2 * 7
    attention = 12 * 5 * 2 * 11
    assert speed.flops_per_token(2, 3, 5, 7, 11, 0.5) == 6 * layers + attention + 6 * 0.5 * head
    assert speed.flops_per_token(768, 3072, 12, 30522, 0, 0.0) == 6 * 84_934_656  # BERT-base's encoder


@pytest.mark.parametrize(("lora_rank", "products"), [(None, 6), (8, 4)])
def test_a_causal_models_flops_are_those_of_its_kernels_and_embeddings(monkeypatch, lora_rank, products):
    """Nano GPT-2 by hand: a layer of width 64, 500 tokens."""
    monkeypatch.setattr(speed, "device_peak", lambda dtype: 1e12)
    backbone = keras_hub.models.GPT2Backbone(500, **dimensions("nano"), max_sequence_length=32)
    if lora_rank:
        backbone.enable_lora(lora_rank)
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    monkeypatch.setattr(type(model), "distribute_strategy", make_strategy(1))
    flops = speed.model_flops(model, SimpleNamespace(seq_length=32, lora_rank=lora_rank))
    kernels = 4 * 64**2 + 2 * 64 * 256  # query, key, value, output; the inner layer's two
    assert flops.per_token == products * (kernels + 64 * 500) + 12 * 64 * 32


def test_the_peak_of_memory_is_that_of_the_system(monkeypatch):
    """Linux counts it in KiB; macOS in bytes."""
    np.ones(2**23).sum()  # 64 MiB
    status = Path("/proc/self/status").read_text()
    assert speed.peak_memory_mb() == pytest.approx(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024, rel=0.05)
    here = speed.peak_memory_mb()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert speed.peak_memory_mb() == pytest.approx(here / 1024, rel=0.05)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """What was measured; each time twice as much as before."""
    found = [1e12]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(speed, "matmul_flops_per_second", lambda dtype: found.append(found[-1] * 2) or found[-1])
    return found


def test_a_peak_is_measured_once_for_a_machine_and_a_format(measured, monkeypatch):
    assert speed.device_peak("float32") == speed.device_peak("float32") == 2e12
    assert speed.device_peak("bfloat16") == 4e12
    monkeypatch.setattr(speed, "num_cores", lambda: 1000)
    assert speed.device_peak("float32") == 8e12
    monkeypatch.setattr(tf, "__version__", "0")
    assert speed.device_peak("float32") == 16e12


@pytest.mark.parametrize("content", [b"", b"2e1x", b"-1", b"nan", b"inf", b"\xff\xfe"])
def test_a_damaged_file_is_made_anew(measured, tmp_path, content):
    speed.device_peak("float32")
    (file,) = tmp_path.glob("*/*-peak")
    file.write_bytes(content)
    assert speed.device_peak("float32") == speed.device_peak("float32") == 4e12


def test_a_cache_that_cannot_be_written_does_not_matter(measured, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert speed.device_peak("float32") == 2e12


def test_the_cores_are_those_that_this_process_may_use():
    may_use = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(may_use)})
        assert speed.num_cores() == 1
    finally:
        os.sched_setaffinity(0, may_use)
    assert speed.num_cores() == len(may_use)


def test_a_device_is_called_by_its_model(monkeypatch):
    assert speed.device_name() == speed.cpu_name()
    assert f": {speed.cpu_name()}\n" in Path("/proc/cpuinfo").read_text()
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["first", "second"])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {"device_name": f"the {gpu}"})
    assert speed.device_name() == "the first"
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {})
    assert speed.device_name() == "GPU"


@pytest.mark.parametrize("lines", [None, "processor : 0\n"], ids=["no file", "no model"])
def test_a_cpu_without_a_model_is_called_by_its_architecture(monkeypatch, lines):
    """On macOS, and on ARM."""

    def read(path):
        if lines is None:
            raise FileNotFoundError
        return lines

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert speed.cpu_name() == platform.machine() != ""


def test_the_compilation_of_a_product_is_not_timed():
    flops = max(speed.matmul_flops_per_second("float32", seconds=0) for _ in range(2))
    assert 1e9 < flops < 1e15


def results_of_a_run(**entries):
    """What `report` needs, and more entries of `results.json`."""
    results = {
        "learning_rate": {"first": 0.0, "peak": 1e-4, "last": 1e-5},
        "mfu": 0.4,
        "peak_flops_per_second": 434e9,
        "peak_memory_mb": 1234,
        "config": {"workdir": "runs/x"},
    }
    others = (
        "steps",
        "global_batch_size",
        "replicas",
        "seconds",
        "tokens_per_second",
        "padding_fraction",
        "train_loss",
    )
    return dict.fromkeys(others, 1) | results | entries


def test_a_report_tells_of_speed_and_memory():
    text = report(results_of_a_run())
    assert "MFU                40% of 0.43 TFLOP/s, the measured peak" in text and "1,234 MiB" in text


@pytest.mark.parametrize(
    ("loss", "told"), [(6.071, True), (6.054, True), (6.04, True), (5.9, False), (math.nan, True), (1e9, True)]
)
def test_a_report_says_where_a_language_model_does_not_beat_the_unigram_baseline(loss, told):
    scores = {"val_loss": loss, "val_accuracy": 0.1, "val_perplexity": perplexity(loss), "val_unigram_loss": 6.054}
    text = report(finite(results_of_a_run(**scores)))  # as they are read again from results.json
    assert (
        "the model does not beat its baseline" in text and "--learning-rate" in text and "or more --epochs" in text
    ) == told
    assert "  unigram baseline   6.054: the model is 0.017 nats worse" in text or loss != 6.071


@pytest.mark.parametrize(("accuracy", "told"), [(0.5, True), (0.809, True), (0.82, False)])
def test_a_report_says_where_a_classifier_does_not_beat_the_best_baseline(accuracy, told):
    scores = {"loss": 0.5, "accuracy": accuracy, "f1": 0.5, "majority_accuracy": 0.5, "length_accuracy": 0.8}
    scores |= {"bag_of_words_accuracy": 0.6}  # as in a run from before the baselines had the other metrics
    text = report(results_of_a_run(**{f"val_{name}": value for name, value in scores.items()}))
    assert ("the model does not beat its baseline" in text) == told
    assert re.search(rf"validation accuracy +{accuracy:.1%}, F1 0.500\n  majority-class baseline +50.0%\n", text)


def test_a_report_has_a_tasks_metrics_of_the_model_and_of_its_baselines():
    scores = {"loss": 0.5, "accuracy": 0.9, "f1": 0.88}
    for name in ("majority", "length", "bag_of_words"):
        scores |= {f"{name}_accuracy": 0.5, f"{name}_f1": 0.25}
    text = report(results_of_a_run(**{f"val_{name}": value for name, value in scores.items()}))
    assert re.search(r"validation accuracy +90.0%, F1 0.880\n  majority-class baseline +50.0%, F1 0.250\n", text)
    scores = {"loss": 0.5, "matthews": 0.9, "majority_matthews": 0.0, "length_matthews": 0.1}
    text = report(results_of_a_run(**{f"test_{name}": value for name, value in scores.items()}))
    assert re.search(
        r"test Matthews correlation +0.900\n  majority-class baseline +0.000\n  length-only b.* 0.100\n", text
    )
    assert "accuracy" not in text


@pytest.mark.parametrize(
    ("loss", "pearson", "told"),
    [(1.0, 0.8, False), (1.0, 0.305, True), (2.3, 0.8, True), (math.nan, math.nan, True), (1.0, -0.8, True)],
)
def test_a_report_says_where_regression_does_not_beat_the_best_baseline(loss, pearson, told):
    scores = {"loss": loss, "mean_loss": 2.25, "pearson": pearson, "spearman": 0.7}
    scores |= {"length_pearson": 0.1, "length_spearman": 0.9, "bag_of_words_pearson": 0.3, "bag_of_words_spearman": 0.2}
    text = report(finite(results_of_a_run(**{f"val_{name}": value for name, value in scores.items()})))
    assert ("the model does not beat its baseline" in text) == told
    assert re.search(rf"validation loss +{loss:.3f}\n  mean baseline +2.250\n", text)
    assert re.search(rf"\nvalidation Pearson correlation +{pearson:.3f}, Spearman 0.700\n  length-only", text)
    assert re.search(r"  bag-of-words baseline +0.300, Spearman 0.200\n", text) and "majority" not in text
