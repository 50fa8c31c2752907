"""All six recipes: what a run computes, whatever the replicas, workers and kills; and what it leaves behind."""

import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.data.labelled import role_pairs
from recipes import bert_mlm
from tests.conftest import ROOT

LANGUAGE_MODELS = ["bert_mlm", "bert_from_scratch", "causal_lm"]
OF_TEXTS = ["text_classifier", "glue_controller", "glue_custom_loop"]
FIT = [*LANGUAGE_MODELS, "text_classifier"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Files of one's own: a few generated pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    for split, rows in role_pairs().items():
        lines = [f"{first},{second},{same}" for first, second, same in rows[: 201 if split == "train" else 44]]
        (folder / f"{split}.csv").write_text("\n".join(["first,second,same", *lines]))
    return folder


@pytest.fixture
def options(pairs, wikitext, tmp_path):
    """A function of a recipe's name and of changes: options of a run that takes seconds."""

    def of(name, **changes):
        small = {"model": "nano", "vocabulary_size": 300, "seq_length": 32, "batch_size": 8, "dropout": 0.0}
        small |= {"workdir": str(tmp_path / "run"), "max_steps": 9, "checkpoint_every": 4, "learning_rate": 1e-3}
        if name in LANGUAGE_MODELS:
            return small | {"corpus": str(wikitext)} | changes
        columns = {"text_columns": "first,second", "label_column": "same"}
        return small | {"task": "own", "data": str(pairs)} | columns | changes

    return of


def train(name, of):
    recipe = importlib.import_module(f"recipes.{name}")
    return recipe.train_and_evaluate(recipe.Config(**of))


def command(name, of, verb="run", *words):
    flags = [f"--{option.replace('_', '-')}={value}" for option, value in of.items() if not isinstance(value, bool)]
    flags += [f"--{option.replace('_', '-')}" for option, value in of.items() if value is True]
    return [sys.executable, "-m", "recipes", verb, *words, name, *flags]


def lines_of(workdir):
    path = Path(workdir, "steps.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def losses_of(workdir):
    return [line["loss"] for line in lines_of(workdir)]


def weights_of(workdir):
    weights = {}
    for path in sorted(Path(workdir, "preset").glob("*.weights.h5")):
        with h5py.File(path) as file:
            file.visititems(
                lambda name, item: weights.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
            )
    assert len(weights) > 10
    return weights


def same_weights(ours, theirs):
    ours, theirs = weights_of(ours), weights_of(theirs)
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in theirs)


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *OF_TEXTS])
def test_replicas_do_not_change_what_is_computed(name, options, tmp_path):
    """The last batch of an epoch divides by neither 2 nor 3."""
    shared = {"lr_scaling": "none", "max_steps": 0, "epochs": 1}
    found = []
    for replicas in (1, 2, 3) if name == "bert_mlm" else (1, 2):
        of = options(
            name, workdir=str(tmp_path / str(replicas)), replicas=replicas, batch_size=24 // replicas, **shared
        )
        found.append(train(name, of))
        assert found[-1]["replicas"] == replicas and found[-1]["global_batch_size"] == 24
        np.testing.assert_allclose(losses_of(tmp_path / str(replicas)), losses_of(tmp_path / "1"), rtol=2e-5)
        assert found[-1]["val_loss"] == pytest.approx(found[0]["val_loss"], rel=2e-5)


def test_fit_a_controller_and_a_loop_compute_the_same(options, tmp_path):
    for name in OF_TEXTS:
        train(name, options(name, workdir=str(tmp_path / name), max_steps=0, epochs=2, replicas=2))
        np.testing.assert_allclose(losses_of(tmp_path / name), losses_of(tmp_path / OF_TEXTS[0]), rtol=1e-5)


@pytest.mark.parametrize("change", [{"accumulate": 2}, {"jit": True}, {"accumulate": 4, "replicas": 1}], ids=str)
@pytest.mark.parametrize("name", ["bert_mlm", "text_classifier"])
def test_how_a_step_is_computed_does_not_change_what_is(name, change, options, tmp_path):
    plain = train(name, options(name, workdir=str(tmp_path / "plain"), replicas=change.get("replicas", 2)))
    other = train(name, options(name, **{"replicas": 2} | change))
    assert other["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-5)
    np.testing.assert_allclose(losses_of(tmp_path / "run"), losses_of(tmp_path / "plain"), rtol=1e-5)


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *OF_TEXTS])
def test_what_a_run_leaves(name, options, tmp_path, capsys):
    of = options(name, epochs=2, max_steps=0, replicas=2)
    results = train(name, of)
    workdir = tmp_path / "run"
    saved = json.loads((workdir / "results.json").read_text())
    assert (
        saved == json.loads(json.dumps(results))
        and saved["recipe"] == name
        and saved["config"]["workdir"] == str(workdir)
    )
    for entry in ("replicas", "workers", "global_batch_size", "steps", "seconds", "tokens_per_second", "train_loss"):
        assert saved[entry] > 0, entry
    assert saved["resumed_from_step"] is None and 0 <= saved["padding_fraction"] < 1 and saved["versions"]["keras"]
    lines = lines_of(workdir)
    assert [line["step"] for line in lines] == [*range(1, saved["steps"] + 1)]
    rates = [line["learning_rate"] for line in lines]
    assert saved["learning_rate"] == {"first": rates[0], "peak": max(rates), "last": rates[-1]}
    assert max(rates) == pytest.approx(1e-3 * 2**0.5) and 0 < rates[-1] < rates[0]
    board = EventAccumulator(str(workdir / "tensorboard"), {"tensors": 0})
    board.Reload()
    shown = {event.step: float(tf.make_ndarray(event.tensor_proto)) for event in board.Tensors("train/loss")}
    if name != "glue_controller":  # whose loops show their means
        assert shown == pytest.approx({line["step"]: line["loss"] for line in lines})
    if name in LANGUAGE_MODELS:
        assert saved["val_perplexity"] == pytest.approx(np.exp(saved["val_loss"])) and saved["test_unigram_loss"] > 0
        assert saved["val_bits_per_character"] > 0
        task = keras_hub.models.CausalLM if name == "causal_lm" else keras_hub.models.MaskedLM
        task.from_preset(str(workdir / "preset"))
    else:
        assert {"val_bag_of_words_accuracy", "val_length_f1", "val_majority_accuracy"} <= saved.keys()
        table = (workdir / "predictions/validation.tsv").read_text().splitlines()
        assert len(table) == 45 and table[0] == "index\tprediction"
        keras_hub.models.TextClassifier.from_preset(str(workdir / "preset"))
        assert (workdir / "best/task.json").exists() == (name == "glue_controller")
    capsys.readouterr()
    assert train(name, of) == saved  # again
    assert "is complete; --overwrite starts afresh" in capsys.readouterr().out


@pytest.mark.parametrize("name", FIT)
def test_a_dry_run_prints_the_plan_and_writes_nothing(name, options, tmp_path, capsys):
    assert train(name, options(name, dry_run=True)) == {}
    said = capsys.readouterr().out
    for expected in (
        "parameters in float32",
        "9 steps",
        "learning rate by step",
        "'s input:",
        "peak memory in the first 3",
    ):
        assert expected in said, said
    assert not (tmp_path / "run").exists()


def test_it_goes_on_from_its_own_preset(options, tmp_path):
    first = train("bert_mlm", options("bert_mlm", max_steps=40, learning_rate=5e-3))
    preset = {"preset": str(tmp_path / "run/preset"), "model": None, "workdir": str(tmp_path / "next")}
    assert train("bert_mlm", options("bert_mlm", **preset))["val_loss"] < first["val_loss"] + 0.05
    assert json.loads((tmp_path / "next/results.json").read_text())["learning_rate"]["peak"] == pytest.approx(
        1e-3 * 2**0.5
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sent"), [*((name, signal.SIGKILL) for name in (*LANGUAGE_MODELS, *OF_TEXTS)), ("bert_mlm", signal.SIGTERM), ("glue_controller", signal.SIGTERM), ("glue_custom_loop", signal.SIGTERM)])  # fmt: skip
def test_a_run_that_was_stopped_ends_with_the_same_bits(name, sent, options, tmp_path):
    """Stopped in a process of its own, at any step; it goes on in this one, with dropout."""
    of = options(
        name, max_steps=60, epochs=9, dropout=0.1, **({"steps_per_loop": 3} if name == "glue_controller" else {})
    )
    train(name, of | {"workdir": str(tmp_path / "whole")})
    begun = subprocess.Popen(command(name, of), cwd=ROOT, stdout=subprocess.DEVNULL)
    while begun.poll() is None and len(lines_of(of["workdir"])) < 21:
        time.sleep(0.002)
    begun.send_signal(sent)
    assert begun.wait(600) == (143 if sent == signal.SIGTERM else -9)
    results = train(name, of)
    assert 16 <= results["resumed_from_step"] < 60 and results["steps"] == 60
    assert lines_of(of["workdir"]) == lines_of(tmp_path / "whole")
    same_weights(of["workdir"], tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_from_scratch", "causal_lm", "text_classifier", "glue_controller"])
def test_two_workers_compute_what_one_process_does(name, options, tmp_path):
    of = options(name)
    done = subprocess.run(command(name, of, "launch", "--workers", "2"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "run/results.json").read_text())
    one = train(name, of | {"workdir": str(tmp_path / "one"), "replicas": 2})
    assert (two["workers"], two["replicas"], one["workers"]) == (2, 2, 1)
    np.testing.assert_allclose(losses_of(tmp_path / "run"), losses_of(tmp_path / "one"), rtol=1e-6)
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-6)


@pytest.mark.slow
def test_with_another_number_of_workers_it_goes_on_as_one_run(options, tmp_path):
    """Two workers, then three, then one process; each is stopped, but the last."""
    of = options("bert_mlm", batch_size=12, max_steps=60, epochs=9, checkpoint_every=5)
    train("bert_mlm", of | {"workdir": str(tmp_path / "whole"), "replicas": 2})
    for workers, steps in ((2, 11), (3, 31)):
        words = command("bert_mlm", of | {"replicas": 1}, "launch", "--workers", str(workers))
        begun = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while begun.poll() is None and len(lines_of(of["workdir"])) < steps:
            time.sleep(0.01)
        begun.terminate()
        assert begun.wait(600) == 143
    results = train("bert_mlm", of | {"replicas": 1})
    assert results["resumed_from_step"] >= 31 and results["global_batch_size"] == 24
    np.testing.assert_allclose(losses_of(of["workdir"]), losses_of(tmp_path / "whole"), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_learns(precision, options):
    results = train("bert_mlm", options("bert_mlm", precision=precision, max_steps=200, epochs=99, learning_rate=5e-3))
    assert results["val_loss"] < results["val_unigram_loss"]


@pytest.mark.long
@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *OF_TEXTS])
def test_the_default_run_learns(name, tmp_path):
    results = train(name, {"workdir": str(tmp_path / "run")})
    if name in LANGUAGE_MODELS:
        assert results["val_loss"] < results["val_unigram_loss"] - 1.9
    else:
        assert results["val_accuracy"] > 0.95


def test_options_cannot_be_changed():
    with pytest.raises(AttributeError):
        bert_mlm.Config().seed = 1
