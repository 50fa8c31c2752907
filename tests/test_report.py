import json
import math

import keras
import numpy as np
import pytest

from common.classification_scores import report as classifier_report
from common.files import write_json
from common.language_model import report
from common.log import print_plan
from common.training import WarmUpPolynomialDecay
from keras_replicas import Batches, data_parallel

RUN = {"steps": 1062, "global_batch_size": 32, "replicas": 2, "seconds": 44.3, "tokens_per_second": 49284.3}
RUN |= {"peak_memory_mb": 1188, "padding_fraction": 0.0004, "train_loss": 3.623}
RUN |= {"learning_rate": {"first": 6.61e-05, "peak": 7.07e-03, "last": 7.4e-06}}
RUN |= {"unknown_fraction": 0.0123, "cut_texts": "12 of 600 texts are cut to 128 tokens"}
RUN |= {"config": {"workdir": "runs/a", "model": None}}
LANGUAGE_MODEL = RUN | {"val_loss": 3.815, "val_perplexity": 45.4, "val_unigram_loss": 6.054, "val_accuracy": 0.344}
LANGUAGE_MODEL |= {"val_bits_per_character": 1.701}
CLASSIFIER = RUN | {"val_loss": 0.5, "val_accuracy": 0.812, "val_f1": 0.75, "val_bag_of_words_accuracy": 0.7}
CLASSIFIER |= {"val_majority_accuracy": 0.684, "val_majority_f1": 0.812}


def test_the_report_of_a_language_model():
    assert report(LANGUAGE_MODEL) == (
        "steps                1062, global batch 32, on 2 replica(s)\n"
        "time                 44 s, 49,284 tokens/s\n"
        "peak memory          1,188 MiB of host memory\n"
        "padding              0.04%\n"
        "learning rate        first 6.61e-05, peak 7.07e-03, last 7.40e-06\n"
        "training loss        3.623, mean over the last epoch\n"
        "unknown tokens       1.23%\n"
        "texts                12 of 600 texts are cut to 128 tokens\n"
        "validation loss      3.815, perplexity 45.4\n"
        "  unigram baseline   6.054: the model is 2.239 nats better\n"
        "validation accuracy  34.4%\n"
        "  bits per character 1.701\n"
        "work directory       runs/a"
    )


def test_the_report_of_a_classifier():
    told = classifier_report(CLASSIFIER | {"test_loss": 0.4, "test_accuracy": 0.8})
    assert "validation accuracy       81.2%, F1 0.750\n  majority-class baseline 68.4%, F1 0.812\n" in told
    assert "  bag-of-words baseline   70.0%\ntest loss                 0.400\ntest accuracy             80.0%\n" in told
    values = {"val_loss": 0.5, "val_mean_loss": 2.0, "val_pearson": 0.9, "val_bag_of_words_pearson": 0.1}
    told = classifier_report(RUN | values)
    assert "  mean baseline                2.000\nvalidation Pearson correlation 0.900\n  bag-of-words" in told


def test_a_file_of_results_gives_the_same_report(tmp_path):
    rates = {"first": math.nan, "peak": math.inf, "last": 0.0}
    odd = LANGUAGE_MODEL | {"val_loss": math.nan, "val_perplexity": math.nan, "learning_rate": rates}
    for results in (LANGUAGE_MODEL, odd):
        write_json(tmp_path / "results.json", results)
        read = json.loads((tmp_path / "results.json").read_text())
        assert report(read) == report(results).replace("inf", "nan")


@pytest.mark.parametrize(
    ("results", "changes", "warned"),
    [
        (LANGUAGE_MODEL, {}, False),
        (LANGUAGE_MODEL, {"val_loss": 6.03}, True),
        (LANGUAGE_MODEL, {"val_loss": math.nan}, True),
        (CLASSIFIER, {}, False),
        (CLASSIFIER, {"val_accuracy": 0.705}, True),  # no more than chance above the bag of words
        (CLASSIFIER, {"val_accuracy": math.nan}, True),
        (CLASSIFIER, {"val_mean_loss": 0.4}, True),
        (RUN, {}, False),
    ],
)
def test_a_model_that_does_not_beat_its_baseline_is_warned_of(results, changes, warned):
    made, whole = classifier_report if results is CLASSIFIER else report, results | changes
    assert warned == ("warning" in made(whole)) == ("show it longer sequences" in made(whole))
    del whole["cut_texts"]
    assert warned == ("warning" in made(whole)) == ("try a third of the learning rate" in made(whole))


class Tokenizer:
    def id_to_token(self, number):
        return f"word{number}"


@pytest.mark.parametrize("classes", [1, 3])
def test_a_plan_shows_the_size_the_rates_and_an_example(classes, capsys):
    ids = np.arange(24).reshape(8, 3)
    x = {"token_ids": ids, "padding_mask": np.repeat([[1, 1, 0]], 8, axis=0)}
    y, weight = (ids, np.repeat([[0.0, 1.0, 0.0]], 8, axis=0)) if classes > 1 else (ids[:, 0], np.ones(8))
    inputs = {name: keras.Input([3], name=name) for name in x}
    model = keras.Model(inputs, keras.layers.Dense(classes)(inputs["token_ids"]))  # a loss for each example or label
    schedule = WarmUpPolynomialDecay(0.1, 20, 0.5)
    loss = "mse" if classes == 1 else lambda y, outputs: (keras.ops.cast(y, "float32") - outputs) ** 2
    model.compile(keras.optimizers.SGD(schedule), loss)
    model, train = data_parallel(model), Batches((x, y, weight), 4, shuffle=False)
    assert print_plan(model, train, schedule, 20, Tokenizer()) == {} and model.steps_done == 3
    told = capsys.readouterr().out
    assert f"{4 * classes} parameters in float32\n20 steps, 2 in an epoch; in the first, 8 tokens\n" in told
    assert f"        11  1.00e-01 {'#' * 40}\n" in told and "        20  1.00e-02 ####\n" in told
    assert "the first sequence's input:\n    word0 word1\n" in told
    assert ("the first sequence's labels:\n    word1\n" in told) == (classes > 1)
    assert "peak memory in the first 3 step(s): " in told
