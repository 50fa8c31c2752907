"""The three recipes that fine-tune are the same job: by `fit`, by a Controller, and by an explicit loop."""

import csv
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.faults import weights_of
from common.data.labelled import role_pairs
from recipes import glue_controller, glue_custom_loop, text_classifier

ROOT = Path(__file__).parent.parent
RECIPES = pytest.mark.parametrize("recipe", [glue_controller, glue_custom_loop], ids=lambda recipe: recipe.__name__)
REGRESSION = {"label_column": "alike", "regression": True}
RECIPES_IN_TIERS = pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(text_classifier, marks=pytest.mark.slow, id="text_classifier"),
        pytest.param(glue_controller, marks=pytest.mark.slow, id="glue_controller"),
        pytest.param(glue_custom_loop, marks=pytest.mark.long, id="glue_custom_loop"),
    ],
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Files of one's own: a few generated pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    for split, rows in role_pairs().items():
        with (folder / f"{split}.csv").open("w", newline="") as file:
            rows = [(*row, 3 * row[2] + len(row[0]) % 8 / 4) for row in rows[: 200 if split == "train" else 44]]
            csv.writer(file).writerows([("first", "second", "same", "alike"), *rows])
    return folder


@pytest.fixture
def small(pairs, tmp_path):
    return {
        "task": "own",
        "data": str(pairs),
        "text_columns": "first,second",
        "label_column": "same",
        "workdir": str(tmp_path / "run"),
        "model": "nano",
        "vocabulary_size": 300,
        "seq_length": 32,
        "batch_size": 8,
        "epochs": 4,
    }


def steps_of(results):
    lines = Path(results["config"]["workdir"], "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def predictions_of(results, split="validation"):
    return Path(results["config"]["workdir"], "predictions", f"{split}.tsv").read_text()


def numbers_in(predictions):
    lines = predictions.splitlines()
    assert lines[0] == "index\tprediction" and [line.split("\t")[0] for line in lines[1:]] == list(
        map(str, range(len(lines) - 1))
    )
    return [float(np.float32(line.split("\t")[1])) for line in lines[1:]]


@pytest.mark.slow
def test_controller_loop_and_fit_agree(small, tmp_path):
    by_fit, *others = (
        recipe.train_and_evaluate(recipe.Config(**small | {"workdir": str(tmp_path / recipe.__name__), "replicas": 2}))
        for recipe in (text_classifier, glue_controller, glue_custom_loop)
    )
    losses = [step["loss"] for step in steps_of(by_fit)]
    assert len(losses) == 52
    for other in others:
        assert [step["loss"] for step in steps_of(other)] == pytest.approx(losses, rel=1e-5)
        assert numbers_in(predictions_of(other)) == pytest.approx(numbers_in(predictions_of(by_fit)), rel=1e-4)
        for name in ("train_loss", "val_loss", "val_accuracy", "val_f1", "val_bag_of_words_accuracy"):
            assert other[name] == pytest.approx(by_fit[name], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "replicas"), [({}, (1, 4)), (REGRESSION, (1, 2))], ids=["classes", "regression"])
def test_replicas_train_as_one_device_does(small, kind, replicas, tmp_path):
    recipe = glue_custom_loop  # with which the Controller and fit agree, see above
    results = [
        recipe.train_and_evaluate(
            recipe.Config(
                **small
                | kind
                | {"workdir": str(tmp_path / str(n)), "replicas": n, "batch_size": 16 // n}
                | {"dropout": 0.0, "lr_scaling": "none", "learning_rate": 1e-3, "max_steps": 20}
            )
        )
        for n in replicas
    ]
    one, several = ([step["loss"] for step in steps_of(each)] for each in results)
    assert several == pytest.approx(one, rel=1e-6)
    assert results[1]["val_loss"] == pytest.approx(results[0]["val_loss"], rel=1e-6)
    whole, weights = (weights_of(Path(each["config"]["workdir"])) for each in results)
    for name, weight in whole.items():
        np.testing.assert_allclose(weights[name], weight, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "recipe", [glue_controller, pytest.param(glue_custom_loop, marks=pytest.mark.slow)], ids=lambda r: r.__name__
)
def test_what_a_run_leaves_behind(recipe, small, pairs):
    config = recipe.Config(**small | {"max_steps": 20, "replicas": 2})
    results = recipe.train_and_evaluate(config)
    assert recipe.train_and_evaluate(config) == results  # complete: not trained again
    with (pairs / "validation.csv").open() as file:
        rows = list(csv.DictReader(file))
    labels = [int(row["same"]) for row in rows]
    predicted = [int(line.split("\t")[1]) for line in predictions_of(results).splitlines()[1:]]
    assert results["val_accuracy"] == pytest.approx(accuracy_score(labels, predicted), abs=1e-6)
    assert results["val_f1"] == pytest.approx(f1_score(labels, predicted), abs=1e-6)
    assert results["val_majority_accuracy"] == pytest.approx(max(np.bincount(labels)) / len(labels))
    rates = results["learning_rate"]
    assert rates["peak"] == pytest.approx(2**0.5 * 5e-4) and rates["last"] == pytest.approx(2**0.5 * 5e-4 / 18)

    workdir = Path(config.workdir)
    # KerasHub alone loads the preset, tokenises, and gives the same.
    plain = keras_hub.models.TextClassifier.from_preset(str(workdir / "preset"))
    theirs = plain.predict((([row["first"] for row in rows], [row["second"] for row in rows])), verbose=0)
    assert theirs.argmax(axis=1).tolist() == predicted

    board = EventAccumulator(str(workdir / "tensorboard"), {"tensors": 0})
    board.Reload()
    tags = set(board.Tags()["tensors"])
    assert {"train/loss", "train/learning_rate", "validation/val_accuracy", "validation/confusion"} <= tags
    table = board.Tensors("validation/confusion")[-1].tensor_proto.string_val[0].decode()
    cells = [int(cell) for cell in re.findall(r"(?<=\| )\d+(?= \|)", table.split("---")[-1])]
    assert cells[1::3] + cells[2::3] == [
        sum(pair == (true, guess) for pair in zip(labels, predicted, strict=True))
        for guess in (0, 1)
        for true in (0, 1)
    ]


@pytest.mark.slow
@RECIPES
def test_what_a_run_of_regression_leaves_behind(recipe, small, pairs):
    config = recipe.Config(**small | REGRESSION | {"max_steps": 20, "replicas": 2})
    results = recipe.train_and_evaluate(config)
    with (pairs / "validation.csv").open() as file:
        rows = list(csv.DictReader(file))
    labels = np.array([float(row["alike"]) for row in rows])
    predicted = np.array(numbers_in(predictions_of(results)))
    assert results["val_pearson"] == pytest.approx(pearsonr(labels, predicted)[0], abs=1e-6)
    assert results["val_spearman"] == pytest.approx(spearmanr(labels, predicted)[0], abs=1e-6)
    assert results["val_loss"] == pytest.approx(np.mean((labels - predicted) ** 2), rel=1e-5)
    with (pairs / "train.csv").open() as file:
        mean = np.mean([float(row["alike"]) for row in csv.DictReader(file)])
    assert results["val_mean_loss"] == pytest.approx(np.mean((labels - mean) ** 2))
    assert {name for name in results if "accuracy" in name or "f1" in name} == set()
    assert [set(step) & {"loss", "accuracy"} for step in steps_of(results)] == [{"loss"}] * 20

    workdir = Path(config.workdir)
    json.loads((workdir / "results.json").read_text(), parse_constant=pytest.fail)
    plain = keras_hub.models.TextClassifier.from_preset(str(workdir / "preset"))
    theirs = plain.predict((([row["first"] for row in rows], [row["second"] for row in rows])), verbose=0)
    np.testing.assert_allclose(theirs[:, 0], predicted, atol=1e-4)
    if recipe is glue_controller:
        assert json.loads((workdir / "best.json").read_text())["val_pearson"] >= results["val_pearson"]
    board = EventAccumulator(str(workdir / "tensorboard"), {"tensors": 0})
    board.Reload()
    tags = set(board.Tags()["tensors"])
    assert {"train/loss", "validation/val_loss", "validation/val_pearson"} <= tags
    assert not any("accuracy" in tag or "confusion" in tag for tag in tags)


def test_a_task_has_its_own_metrics(small, tmp_path):
    rows = role_pairs()["validation"][:40]
    for name, part in (("train", rows), ("dev", rows[:10])):
        (tmp_path / f"{name}.tsv").write_text("".join(f"x\t{label}\t\t{text}\n" for _, text, label in part))
    options = {"task": "cola", "data": str(tmp_path), "text_columns": "", "label_column": "", "max_steps": 2}
    results = glue_controller.train_and_evaluate(glue_controller.Config(**small | options))
    metrics = {name for name in results if name.startswith("val_")}
    baselines = {f"val_{name}_matthews" for name in ("majority", "length", "bag_of_words")}
    assert metrics == {"val_loss", "val_matthews"} | baselines and results["val_majority_matthews"] == 0.0
    assert json.loads((tmp_path / "run/best.json").read_text()).keys() == {"val_matthews"}


@pytest.mark.slow
def test_half_precision(small, tmp_path):
    losses = []
    for policy in ("float32", "mixed_float16"):
        options = small | {"workdir": str(tmp_path / policy), "precision": policy, "max_steps": 26, "dropout": 0.0}
        results = glue_controller.train_and_evaluate(glue_controller.Config(**options, replicas=2))
        losses.append(np.mean([step["loss"] for step in steps_of(results)[-5:]]))
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.slow
def test_a_masked_language_model_is_fine_tuned(small, tmp_path, wikitext):
    from recipes import bert_mlm

    options = {"corpus": str(wikitext), "workdir": str(tmp_path / "mlm"), "vocabulary_size": 300, "seq_length": 32}
    bert_mlm.train_and_evaluate(bert_mlm.Config(**options, model="nano", max_steps=3, batch_size=8))
    config = glue_controller.Config(**small | {"model": None, "preset": str(tmp_path / "mlm/preset"), "max_steps": 1})
    results = glue_controller.train_and_evaluate(config)
    assert results["learning_rate"]["peak"] == pytest.approx(2**0.5 * 0.024 / 64)
    pretrained, tuned = weights_of(tmp_path / "mlm"), weights_of(Path(config.workdir))
    moved = [
        np.abs(tuned[name] - weight).max()
        for name, weight in pretrained.items()
        if name in tuned and tuned[name].shape == weight.shape and "embedding" in name
    ]
    assert moved and max(moved) < 1e-3


@pytest.mark.slow
def test_the_test_split_of_glue_is_predicted(tmp_path):
    rows = role_pairs()["validation"][:40]
    for name, part in (("train", rows), ("dev", rows[:10])):
        lines = "".join(f"{label}\t1\t2\t{first}\t{second}\n" for first, second, label in part)
        (tmp_path / f"{name}.tsv").write_text("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + lines)
    lines = "".join(f"{i}\t1\t2\t{first}\t{second}\n" for i, (first, second, _) in enumerate(rows[:7]))
    (tmp_path / "test.tsv").write_text("\ufeffindex\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + lines)
    options = {"task": "mrpc", "data": str(tmp_path), "workdir": str(tmp_path / "run"), "model": "nano", "max_steps": 2}
    results = glue_custom_loop.train_and_evaluate(glue_custom_loop.Config(**options, vocabulary_size=300, batch_size=4))
    written = (tmp_path / "run/predictions/MRPC.tsv").read_text().splitlines()
    assert written[0] == "index\tprediction" and [line.split("\t")[0] for line in written[1:]] == list("0123456")
    assert "test_accuracy" not in results


def command(recipe, small, workdir, *more):
    options = {"checkpoint_every": 4} | small | {"workdir": workdir}
    words = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    words = [word for word in words if word != "True"]
    return [sys.executable, "-m", "recipes", *more, recipe.__name__.split(".")[1], *words]


def lines_in(path):
    return path.read_text().count("\n") if path.exists() else 0


def validations_in(workdir):
    """Of TensorBoard: the loss after each epoch, and at which steps the mistakes are shown."""
    board = EventAccumulator(str(workdir / "tensorboard"), {"tensors": 0})
    board.Reload()
    losses = {event.step: float(tf.make_ndarray(event.tensor_proto)) for event in board.Tensors("validation/val_loss")}
    matrices = "validation/confusion" in board.Tags()["tensors"] and board.Tensors("validation/confusion")
    return losses, {event.step for event in matrices or []}


def same_bits(ours, theirs):
    ours, theirs = (json.loads((workdir / "results.json").read_text()) for workdir in (ours, theirs))
    assert steps_of(ours) == steps_of(theirs) and predictions_of(ours) == predictions_of(theirs)
    found, expected = (weights_of(Path(results["config"]["workdir"])) for results in (ours, theirs))
    assert found.keys() == expected.keys() and len(found) > 20
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
    return ours


@RECIPES_IN_TIERS
def test_killed_it_goes_on_with_the_same_bits(recipe, small, tmp_path):
    """Killed in a process of its own; it goes on in this one."""
    small |= {"checkpoint_every": 4} | ({"steps_per_loop": 3} if recipe is glue_controller else {})
    recipe.train_and_evaluate(recipe.Config(**small | {"workdir": str(tmp_path / "whole")}))
    sig, status = (signal.SIGTERM, 143) if recipe is text_classifier else (signal.SIGKILL, -9)
    workdir = tmp_path / sig.name
    begun = subprocess.Popen(command(recipe, small, workdir, "run"), stdout=subprocess.DEVNULL)
    while begun.poll() is None and lines_in(workdir / "steps.jsonl") < 21:
        time.sleep(0.002)
    begun.send_signal(sig)
    assert begun.wait(600) == status
    recipe.train_and_evaluate(recipe.Config(**small | {"workdir": str(workdir)}))
    assert 16 <= same_bits(workdir, tmp_path / "whole")["resumed_from_step"] < 52
    if recipe is not text_classifier:
        assert validations_in(workdir) == validations_in(tmp_path / "whole")


@RECIPES_IN_TIERS
def test_two_workers_train_as_one_process_does(recipe, small, tmp_path):
    options = small | {"dropout": 0.0, "max_steps": 20}
    words = command(recipe, options, tmp_path / "two", "launch", "--workers", "2")
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    two = json.loads((tmp_path / "two/results.json").read_text())
    one = recipe.train_and_evaluate(recipe.Config(**options | {"workdir": str(tmp_path / "one")}))
    assert two["workers"] == 2
    assert numbers_in(predictions_of(two)) == pytest.approx(numbers_in(predictions_of(one)), rel=1e-5)
    assert [step["loss"] for step in steps_of(two)] == pytest.approx([s["loss"] for s in steps_of(one)], rel=1e-6)
