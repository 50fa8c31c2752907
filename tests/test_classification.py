import math

import numpy as np
import pytest
import sklearn.metrics

from common.data.labelled import Examples, LabelledTexts
from common.data.wordpiece import WordPieces
from common.model.saving import keras_tokenizer
from common.scores.classification import classifier_results, scores_of, write_all_predictions, write_predictions

TOKENIZER = keras_tokenizer(WordPieces(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"], True, True))
BASELINES = ["bag_of_words", "length", "majority"]


def texts_of(labels, test_labels, classes, metrics, **more):
    splits = {
        name: Examples([(word,) for word in ("a", "b", "c", "a b")], part, ["4", "5", "6", "7"])
        for name, part in (("train", labels), ("validation", labels), ("test", test_labels))
    }
    return LabelledTexts(classes, splits, "X.tsv", metrics, **more)


@pytest.mark.parametrize("metrics", [("accuracy",), ("accuracy", "f1"), ("matthews",)])
def test_results_have_the_metrics_of_the_task_for_model_and_baselines(metrics):
    texts = texts_of([1, 0, 1, 1], None, ["no", "yes"], metrics)
    logits = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert list(scores_of(texts, "validation", logits)) == ["val_loss", *(f"val_{name}" for name in metrics)]
    assert scores_of(texts, "test", logits) == {}
    results = classifier_results(texts, {"validation": logits, "test": logits}, TOKENIZER)
    of_baselines = [f"val_{baseline}_{name}" for baseline in BASELINES for name in metrics]
    assert sorted(results) == sorted(["val_loss", *(f"val_{name}" for name in metrics), *of_baselines])
    theirs = {
        "accuracy": sklearn.metrics.accuracy_score,
        "f1": sklearn.metrics.f1_score,
        "matthews": sklearn.metrics.matthews_corrcoef,
    }
    for name in metrics:
        assert results[f"val_{name}"] == pytest.approx(theirs[name]([1, 0, 1, 1], [1, 0, 0, 1]))
        assert results[f"val_majority_{name}"] == pytest.approx(theirs[name]([1, 0, 1, 1], [1, 1, 1, 1]))


def test_results_of_regression():
    texts = texts_of([1.0, 2.0, 4.0, 5.0], [1.0, 1.0, 2.0, 2.0], [], ("pearson", "spearman"))
    numbers = np.array([[1.5], [2.0], [3.0], [5.0]])
    results = classifier_results(texts, {"validation": numbers, "test": numbers}, TOKENIZER)
    names = ["loss", "pearson", "spearman", "mean_loss"]
    names += [f"{baseline}_{name}" for baseline in BASELINES[:2] for name in ("pearson", "spearman")]
    assert sorted(results) == sorted(f"{split}_{name}" for split in ("val", "test") for name in names)
    assert results["val_loss"] == pytest.approx(1.25 / 4) and results["val_spearman"] == pytest.approx(1.0)
    assert results["val_mean_loss"] == pytest.approx(2.5)  # the variance
    assert results["test_mean_loss"] == pytest.approx(0.25 + 1.5**2)  # and the distance of 3, the mean of training
    assert all(map(math.isfinite, results.values()))


def test_predictions_as_glue_wants_them(tmp_path):
    write_predictions(tmp_path / "MRPC.tsv", ["7", "8"], ["1", "0"])
    assert (tmp_path / "MRPC.tsv").read_bytes() == b"index\tprediction\n7\t1\n8\t0\n"
    with pytest.raises(ValueError):
        write_predictions(tmp_path / "MRPC.tsv", ["7", "8"], ["1"])


def test_predicted_classes_are_named_and_numbers_are_within_what_glue_takes(tmp_path):
    logits = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], np.float32)
    texts = texts_of([1, 0, 1, 1], None, ["entailment", "not_entailment"], ("accuracy",))
    write_all_predictions(tmp_path, texts, {"test": logits})
    lines = ["4\tnot_entailment", "5\tentailment", "6\tentailment", "7\tnot_entailment"]
    assert (tmp_path / "X.tsv").read_text().splitlines() == ["index\tprediction", *lines]

    numbers = np.array([[-0.5], [0.1], [3.8], [7.0]], np.float32)
    texts = texts_of([1.0, 2.0, 3.0, 4.0], None, [], ("pearson", "spearman"), limits=(0.0, 5.0))
    write_all_predictions(tmp_path, texts, {"test": numbers, "validation": numbers})
    assert (tmp_path / "X.tsv").read_text() == "index\tprediction\n4\t0.0\n5\t0.1\n6\t3.8\n7\t5.0\n"
    assert (tmp_path / "validation.tsv").read_text() == "index\tprediction\n4\t-0.5\n5\t0.1\n6\t3.8\n7\t7.0\n"
    texts = texts_of([1.0, 2.0, 3.0, 4.0], None, [], ("pearson", "spearman"))
    write_all_predictions(tmp_path, texts, {"test": numbers})
    assert (tmp_path / "X.tsv").read_text() == (tmp_path / "validation.tsv").read_text()
