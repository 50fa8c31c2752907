import math
import random

import keras_hub
import numpy as np
import pytest

from common import classification_scores
from common.classification_scores import classifier_results, scores_of, write_predictions
from common.data.examples import EncodedTexts
from common.data.labelled import Examples, LabelledTexts, Task

WORDS = [f"w{number}" for number in range(50)]
TOKENIZER = keras_hub.models.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS], lowercase=True)
PREPROCESSOR = keras_hub.models.BertTextClassifierPreprocessor(TOKENIZER, sequence_length=64)


def texts_of(labels, test_labels, classes, metrics, texts=("w0", "w1", "w2", "w0 w1"), **more):
    splits = {
        name: Examples([(text,) for text in texts], part, ["4", "5", "6", "7"])
        for name, part in (("train", labels), ("validation", labels), ("test", test_labels))
    }
    return LabelledTexts(classes, splits, Task((), "X.tsv", metrics, **more))


def test_results_have_the_metrics_of_the_task_for_model_and_baselines():
    metrics = ("matthews", "accuracy", "f1")
    texts = texts_of([1, 0, 1, 1], None, ["no", "yes"], metrics)
    logits = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    results = classifier_results(EncodedTexts(texts, PREPROCESSOR), {"validation": logits, "test": logits})
    names = [f"val_{of}{name}" for of in ("", "majority_", "bag_of_words_") for name in metrics]
    assert sorted(results) == sorted(["val_loss", *names])  # none of the test split, which has no labels
    assert [results[f"val_majority_{name}"] for name in metrics] == pytest.approx([0, 0.75, 6 / 7])


def test_results_of_regression():
    texts = texts_of([1.0, 2.0, 4.0, 5.0], [1.0, 1.0, 2.0, 2.0], [], ("pearson", "spearman"))
    numbers = np.array([[1.5], [2.0], [3.0], [5.0]])
    results = classifier_results(EncodedTexts(texts, PREPROCESSOR), {"validation": numbers, "test": numbers})
    names = ["loss", "mean_loss", "pearson", "spearman", "bag_of_words_pearson", "bag_of_words_spearman"]
    assert sorted(results) == sorted(f"{split}_{name}" for split in ("val", "test") for name in names)
    assert results["val_loss"] == pytest.approx(1.25 / 4) and results["val_spearman"] == pytest.approx(1.0)
    assert results["val_mean_loss"] == pytest.approx(2.5)  # the variance
    assert results["test_mean_loss"] == pytest.approx(0.25 + 1.5**2)  # and the distance of 3, the mean of training


def test_scores_of_classes():
    """Of two classes, F1 is that of class 1 (of class 0 it is 0.8 here); of more, the mean over all."""
    metrics = ("accuracy", "f1", "matthews")
    texts = texts_of([0, 1, 0, 0], None, ["no", "yes"], metrics)
    large = np.array([[1000, 0], [0, 1000], [0, 1000], [1000, 0]])
    expected = {"val_loss": 250.0, "val_accuracy": 0.75, "val_f1": 2 / 3, "val_matthews": 1 / 3**0.5}
    assert scores_of(texts, "validation", large) == pytest.approx(expected)
    assert scores_of(texts, "validation", -large[[1, 1, 1, 1]])["val_matthews"] == 0  # a single class
    texts = texts_of([0, 1, 2, 0], None, ["a", "b", "c", "d"], metrics)
    scores = scores_of(texts, "validation", np.log(np.full((4, 4), 0.1) + 0.6 * np.eye(4)[[0, 2, 2, 1]]))
    assert scores["val_f1"] == pytest.approx((2 / 3 + 0 + 2 / 3 + 0) / 4)
    assert scores["val_loss"] == pytest.approx(-math.log(0.7) / 2 - math.log(0.1) / 2)


@pytest.mark.filterwarnings("error")
def test_a_correlation_with_a_constant_is_0():
    for labels, numbers in (([0.1] * 4, range(4)), ([0.5, 1.0, 2.0, 3.0], [2.7] * 4), ([0.1] * 4, [0.1] * 4)):
        texts = texts_of(labels, None, [], ("pearson", "spearman"))
        scores = scores_of(texts, "validation", np.array(numbers, np.float32)[:, None])
        assert (scores["val_pearson"], scores["val_spearman"]) == (0, 0) and math.isfinite(scores["val_loss"])


def bag_of_words(make_example, classes=2, metrics=("accuracy",), preprocessor=PREPROCESSOR):
    splits = {}
    for seed, (split, count) in enumerate({"train": 1500, "validation": 500}.items()):
        draw = random.Random(seed)
        rows = [make_example(draw) for _ in range(count)]
        examples = [tuple(" ".join(f"w{word}" for word in text) for text in row[:-1]) for row in rows]
        splits[split] = Examples(examples, [row[-1] for row in rows], [])
    texts = LabelledTexts([*map(str, range(classes))], splits, Task((), metrics=metrics))
    data, outputs = EncodedTexts(texts, preprocessor), {"validation": np.zeros((500, classes or 1))}
    results = classifier_results(data, outputs)
    assert results == classifier_results(data, outputs)
    return results[f"val_bag_of_words_{metrics[0]}"]


def words(draw, count):
    return [draw.randrange(50) for _ in range(count)]


def test_which_text_a_word_is_in_and_which_are_shared_tell():
    def placed(draw):
        texts, label = (words(draw, 4), words(draw, 4)), draw.randrange(2)
        texts[label].append(7)
        texts[1 - label].append(8)
        return *texts, label

    def shared(draw):
        label = draw.randrange(2)
        first = draw.sample(range(50), 4)
        others = sorted(set(range(50)) - set(first))
        return first, draw.sample(first, 4) if label else draw.sample(others, 4), label

    assert bag_of_words(placed) > 0.95
    assert bag_of_words(shared) > 0.95


def test_baselines_see_what_the_model_sees(capsys):
    def last_word(draw):
        label = draw.randrange(2)
        return [*words(draw, 40), 7 if label else 8], label

    assert bag_of_words(last_word) > 0.75
    short = keras_hub.models.BertTextClassifierPreprocessor(TOKENIZER, sequence_length=32)
    assert bag_of_words(last_word, preprocessor=short) < 0.6
    assert "train: 1500 of 1500 texts are cut to 32 tokens (median 43, 95 % " in capsys.readouterr().out


def test_many_classes_have_a_baseline_that_is_bounded(monkeypatch):
    monkeypatch.setattr(classification_scores, "LogisticRegression", None)  # which would take one fit for each class

    def of_class(draw):
        label = draw.randrange(60)
        return [label % 50, label // 50, *words(draw, 2)], label

    assert bag_of_words(of_class, 60) > 0.2


@pytest.mark.parametrize(("scale", "offset"), [(1e4, 1e6), (1e-3, -5.0)])
def test_numbers_are_learned_in_any_unit(scale, offset):
    def example(draw):
        text = words(draw, 10)
        return text, offset + scale * (sum(text) / 50 + draw.gauss(0, 0.5))

    assert bag_of_words(example, 0, ("pearson",)) > 0.8


def test_predicted_classes_are_named_and_numbers_are_within_what_glue_takes(tmp_path):
    logits = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], np.float32)
    write_predictions(tmp_path / "new", texts_of([1, 0, 1, 1], None, ["entailment", "not"], ()), {"test": logits})
    assert (tmp_path / "new/X.tsv").read_bytes() == b"index\tprediction\n4\tnot\n5\tentailment\n6\tentailment\n7\tnot\n"
    numbers = np.array([[-0.5], [0.1], [3.8], [7.0]], np.float32)
    texts = texts_of([1.0, 2.0, 3.0, 4.0], None, [], (), limits=(0.0, 5.0))
    write_predictions(tmp_path, texts, {"test": numbers, "validation": numbers})
    assert (tmp_path / "X.tsv").read_text() == "index\tprediction\n4\t0.0\n5\t0.1\n6\t3.8\n7\t5.0\n"
    assert (tmp_path / "validation.tsv").read_text() == "index\tprediction\n4\t-0.5\n5\t0.1\n6\t3.8\n7\t7.0\n"
    with pytest.raises(ValueError):
        write_predictions(tmp_path, texts, {"test": numbers[:3]})
