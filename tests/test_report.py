import json
import math

import pytest

from common.classification_scores import report as classifier_report
from common.files import write_json
from common.language_model import report

RUN = {"steps": 1062, "global_batch_size": 32, "replicas": 2, "seconds": 44.3, "tokens_per_second": 49284.3}
RUN |= {"peak_memory_mb": 1188, "padding_fraction": 0.0004, "train_loss": 3.623}
RUN |= {"learning_rate": {"first": 6.61e-05, "peak": 7.07e-03, "last": 7.4e-06}}
RUN |= {"unknown_fraction": 0.0123, "cut_texts": "12 of 600 texts are cut to 128 tokens"}
RUN |= {"config": {"workdir": "runs/a", "model": None}}
LANGUAGE_MODEL = RUN | {"val_loss": 3.815, "val_perplexity": 45.4, "val_unigram_loss": 6.054, "val_accuracy": 0.344}
LANGUAGE_MODEL |= {"val_bits_per_character": 1.701}
CLASSIFIER = RUN | {"val_loss": 0.5, "val_accuracy": 0.812, "val_f1": 0.75, "val_bag_of_words_accuracy": 0.7}
CLASSIFIER |= {"val_majority_accuracy": 0.684, "val_majority_f1": 0.812}


def test_the_report_tells_what_the_model_did_not_see():
    """tests/test_readme.py has the other lines, as docs/what-a-run-leaves.md shows them."""
    told = "unknown tokens       1.23%\ntexts                12 of 600 texts are cut to 128 tokens\n"
    assert told in report(LANGUAGE_MODEL)


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
    told = (classifier_report if results is CLASSIFIER else report)(results | changes)
    assert warned == ("warning" in told)
