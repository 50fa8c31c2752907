"""The whole road, small: text, tokenizer, shards, training, filled masks; stopped and gone on; on two workers."""

import json
import subprocess
import sys
import time
from pathlib import Path

import keras_hub
import numpy as np
import pytest
from common.data.stream import one_epoch

from common.model.fill_mask import fill_mask
from common.model.masked_lm import masked_lm_from_preset, preset_vocabulary
from common.training import Scaled
from common.training import WarmUpPolynomialDecay
from keras_replicas.errors import UserError
from recipes import bert_from_scratch
from tests.conftest import ROOT


@pytest.fixture
def options(small):
    """A run of seconds, of a step less than two epochs."""
    return small | {"batch_size": 32, "shards": 4, "epochs": 2, "max_steps": 30, "checkpoint_every": 4}


def train(options, **changes):
    return bert_from_scratch.train_and_evaluate(bert_from_scratch.Config(**(options | changes)))


def steps_of(workdir):
    return [json.loads(line) for line in (Path(workdir) / "steps.jsonl").read_text().splitlines()]


def weights_of(workdir):
    return masked_lm_from_preset(f"{workdir}/preset").get_weights()


def command(options, *words):
    options = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "recipes", *words, "bert_from_scratch", *options]


@pytest.mark.parametrize("architecture", ["bert", pytest.param("roberta", marks=pytest.mark.slow)])
def test_text_becomes_a_model_that_fills_masks(architecture, options, tmp_path):
    size = tmp_path / "size.json"
    size.write_text(json.dumps({"num_layers": 1, "num_heads": 3, "hidden_dim": 48, "intermediate_dim": 100}))
    results = train(options, architecture=architecture, model=str(size), decay_power=2.0)
    assert results["steps"] == 30 and results["train_loss"] < steps_of(options["workdir"])[0]["loss"] - 0.1
    assert {"val_loss", "val_unigram_loss", "test_accuracy"} <= set(results)
    preset = f"{options['workdir']}/preset"
    plain = keras_hub.models.MaskedLM.from_preset(preset, compile=False)
    assert type(plain).__name__ == {"bert": "BertMaskedLM", "roberta": "RobertaMaskedLM"}[architecture]
    assert (plain.backbone.num_heads, plain.backbone.hidden_dim, plain.backbone.intermediate_dim) == (3, 48, 100)
    assert f"{results['val_loss']:.3f}" in Path(preset, "README.md").read_text()
    (guesses,) = fill_mask(masked_lm_from_preset(preset), preset_vocabulary(preset), "The value [MASK] a list.")
    assert len(guesses) == 5 and guesses[0]["score"] > guesses[4]["score"] > 0
    assert guesses[0]["sequence"].lower().startswith("the value") and guesses[0]["sequence"].endswith(" a list.")
    rates = [step["learning_rate"] for step in steps_of(options["workdir"])]
    schedule = WarmUpPolynomialDecay(2**0.5 * 0.64 / 48, 3, 30, power=2.0)
    np.testing.assert_allclose(rates, [float(schedule(step)) for step in range(30)], rtol=1e-6)


@pytest.mark.slow
def test_an_epoch_reads_every_token_once_and_replicas_change_nothing(options, tmp_path):
    one, four = (
        train(
            options,
            replicas=replicas,
            batch_size=88 // replicas,
            lr_scaling="none",
            epochs=1,
            max_steps=0,
            workdir=str(tmp_path / str(replicas)),
        )
        for replicas in (1, 4)
    )
    splits = json.loads((tmp_path / "1/data/manifest.json").read_text())["splits"]
    assert sum(step["tokens"] for step in steps_of(tmp_path / "1")) == splits["train"]["sequences"] * 32
    assert four["val_loss"] == pytest.approx(one["val_loss"], rel=1e-6)
    for a, b in zip(steps_of(tmp_path / "1"), steps_of(tmp_path / "4"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6) and a["tokens"] == b["tokens"]


def test_validation_masks_by_a_rate_of_its_own(options):
    config = bert_from_scratch.Config(**options)
    shards = bert_from_scratch.make_datasets(config)
    for split, slots in (("train", 10), ("validation", 5)):  # 30 % and 15 % of 32
        batches = bert_from_scratch.masked_batches(config, shards, split, Scaled(4, 4))
        _, labels, _ = next(iter(one_epoch(batches, 1)))
        assert labels.shape == (4, slots)


def test_shards_of_something_else_are_refused(options, tmp_path):
    def make_datasets(**changes):
        return bert_from_scratch.make_datasets(bert_from_scratch.Config(**(options | changes)))

    data = make_datasets().folder
    (tmp_path / "other.txt").write_text("another text")
    for changes, message in (
        (
            {"seq_length": 64},
            "manifest.json: its shards have seq_length 32, not 64. Remove them, or give another --data",
        ),
        ({"architecture": "roberta"}, "have architecture 'bert', not 'roberta'"),
        ({"vocabulary_size": 400}, "have vocabulary_size 300, not 400"),
        ({"corpus": str(tmp_path / "other.txt")}, "have corpus '"),
    ):
        with pytest.raises(UserError, match=message):
            make_datasets(data=data, **changes)
    (shard,) = Path(data).glob("train-00001-of-00004-*.tfrecord")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    with pytest.raises(UserError, match=f"{shard} is damaged. Remove it; it will be written again"):
        make_datasets()
    shard.write_bytes(whole[:5000])
    with pytest.raises(UserError, match=f"{shard} is cut short"):
        make_datasets()
    shard.unlink()
    make_datasets()
    assert shard.read_bytes() == whole


@pytest.mark.slow
def test_a_run_that_was_killed_ends_with_the_same_bits(options, tmp_path):
    """SIGKILL while shards are written, and again while it trains; then the same command, in a process each."""
    options |= {"dropout": 0.1, "max_steps": 0, "epochs": 8}
    train(options, workdir=str(tmp_path / "whole"))

    def killed_when(seen):
        process = subprocess.Popen(command(options, "run"), cwd=ROOT, stdout=subprocess.DEVNULL)
        while not seen():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait()

    workdir = Path(options["workdir"])
    killed_when(lambda: list(workdir.glob("data/train-00002-*.tfrecord")) or list(workdir.glob("data/validation*")))
    killed_when(lambda: (workdir / "steps.jsonl").is_file() and len(steps_of(workdir)) > 30)
    train(options)
    for split in ("train", "validation", "test"):
        files = sorted((tmp_path / "whole/data").glob(f"{split}*"))
        assert len(files) >= 4
        for file in files:
            assert (workdir / "data" / file.name).read_bytes() == file.read_bytes()
    assert not (workdir / "tokens").exists()
    assert steps_of(workdir) == steps_of(tmp_path / "whole")
    for ours, theirs in zip(weights_of(workdir), weights_of(tmp_path / "whole"), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.long
def test_two_workers_compute_what_one_process_does(options, tmp_path):
    one = train(options, workdir=str(tmp_path / "one"), lr_scaling="none")
    done = subprocess.run(
        command(options | {"lr_scaling": "none"}, "launch", "--workers", "2"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    two = json.loads(Path(options["workdir"], "results.json").read_text())
    assert two["workers"] == 2 and done.stdout.count("tokenising train") == 1
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-6)
    for a, b in zip(steps_of(tmp_path / "one"), steps_of(options["workdir"]), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
