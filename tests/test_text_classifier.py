"""The recipe `text_classifier`, for several families of models, each from a tiny preset with random weights."""

import gc
import io
import shutil
from collections import Counter

import keras
import keras_hub
import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
from common.data.byte_pairs import train_byte_pairs
from common.data.text_batches import EncodedTexts
from common.data.wordpiece import train_wordpieces
from common.model.lora import enable_lora

from common.data.labelled import Examples, LabelledTexts
from common.data.labelled import role_pairs
from common.model.classifier import make_classifier, make_preprocessor
from common.model.saving import keras_tokenizer
from keras_replicas import checkpoints
from keras_replicas.errors import UserError
from recipes import text_classifier
from recipes._classify import classify
from tests.test_glue_recipes import pairs, predictions_of, steps_of  # noqa: F401

HUB = keras_hub.models
SIZE = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "intermediate_dim": 64, "max_sequence_length": 32}
SLOW = pytest.mark.slow
FAMILIES = ["Bert", "Roberta", "DistilBert", "Albert", "DebertaV3"]


def sentences():
    return (text for pair in role_pairs()["train"] for text in pair[:2])


def sentence_pieces(**special):
    model = io.BytesIO()
    ids = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3, "bos_piece": "[CLS]", "eos_piece": "[SEP]"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(), model_writer=model, vocab_size=200, hard_vocab_limit=False,
        user_defined_symbols="[MASK]", minloglevel=2, **ids, **special,
    )  # fmt: skip
    return model.getvalue()


def tokenizer_of(family):
    if family == "Roberta":
        return keras_tokenizer(train_byte_pairs(sentences, 300))
    if family == "Albert":
        return HUB.AlbertTokenizer(sentence_pieces(pad_piece="<pad>", unk_piece="<unk>"))
    if family == "DebertaV3":
        return HUB.DebertaV3Tokenizer(sentence_pieces(pad_piece="[PAD]", unk_piece="[UNK]"))
    return getattr(HUB, f"{family}Tokenizer")(train_wordpieces(sentences, 300).pieces, lowercase=True)


@pytest.fixture(scope="module")
def presets(tmp_path_factory):
    """A function of a family's name: the folder of its preset, and the backbone."""
    made = {}

    def preset(family):
        if family not in made:
            tokenizer = tokenizer_of(family)
            own = {"embedding_dim": 16, "num_groups": 1, "num_inner_repetitions": 1} if family == "Albert" else {}
            backbone = getattr(HUB, f"{family}Backbone")(tokenizer.vocabulary_size(), **SIZE, **own)
            preprocessor = getattr(HUB, f"{family}TextClassifierPreprocessor")(tokenizer, sequence_length=16)
            folder = tmp_path_factory.mktemp(family) / "preset"
            getattr(HUB, f"{family}TextClassifier")(backbone, 3, preprocessor=preprocessor).save_to_preset(str(folder))
            made[family] = folder, backbone
        return made[family]

    return preset


@pytest.fixture
def small(pairs, tmp_path):  # noqa: F811
    return {
        "task": "own",
        "data": str(pairs),
        "text_columns": "first,second",
        "label_column": "same",
        "workdir": str(tmp_path / "run"),
        "seq_length": 32,
        "batch_size": 8,
        "dropout": 0.0,
        "max_steps": 6,
        "checkpoint_every": 4,
    }


def train(options, **others):
    gc.collect()  # a run holds its folder as long as the process lives: one before that nobody uses any more lets it go
    return text_classifier.train_and_evaluate(text_classifier.Config(**options | others))


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.long if f in ("DistilBert",) else SLOW) for f in FAMILIES]
)
def test_every_family_trains_alike_on_one_and_two_replicas_and_is_saved(family, presets, small, tmp_path, capsys):
    folder, _ = presets(family)
    two = train(small, preset=str(folder), replicas=2, lr_scaling="none")
    if family in ("Roberta", "DebertaV3"):
        one = train(small, preset=str(folder), batch_size=16, replicas=1, workdir=str(tmp_path / "one"))
        losses = [[step["loss"] for step in steps_of(results)] for results in (one, two)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-5)

    saved = tmp_path / "run/preset"
    kind = getattr(HUB, f"{family}TextClassifier")
    plain = HUB.TextClassifier.from_preset(str(saved))
    assert type(plain) is kind and plain.num_classes == 2 and plain.preprocessor.sequence_length == 32
    rows = role_pairs()["validation"][:44]
    logits = plain.predict(tuple([row[i] for row in rows] for i in range(2)), verbose=0)
    said = ["index\tprediction", *(f"{i}\t{row.argmax()}" for i, row in enumerate(logits))]
    assert predictions_of(two).splitlines() == said

    capsys.readouterr()
    classify(str(saved), list(rows[0][:2]), "", "", "")
    header, answer = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert header == ["index", "prediction", "0", "1"]
    np.testing.assert_allclose([float(p) for p in answer[2:]], tf.nn.softmax(logits[0]), atol=1e-4)

    best = HUB.TextClassifier.from_preset(str(tmp_path / "run/best"))  # of one epoch, the last
    np.testing.assert_array_equal(best.predict(tuple([row[i] for row in rows] for i in range(2)), verbose=0), logits)


@SLOW
@pytest.mark.parametrize("family", ["Bert", "DebertaV3"])
def test_lora_trains_adapters_and_the_head_alone(family, presets, small, tmp_path):
    folder, backbone = presets(family)
    results = train(small, preset=str(folder), lora_rank=4, replicas=2, learning_rate=0.01)
    again = HUB.TextClassifier.from_preset(str(tmp_path / "run/preset")).backbone
    before, after = ({weight.path: np.array(weight) for weight in each.weights} for each in (backbone, again))
    assert before.keys() == after.keys()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert {"pooled_dense/kernel"} <= changed or family == "DebertaV3"
    assert all("/query/" in name or "/value/" in name or "pooled_dense" in name for name in changed)
    assert results["steps"] == 6


@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert"])
def test_the_gradient_is_that_of_the_plain_class(family, presets):
    """Although the last layer computes the first token's output alone."""
    folder, _ = presets(family)
    preprocessor = make_preprocessor(str(folder), None, 16)
    rows = [("a short text",), ("a text that is longer than the first one is",)]
    data = EncodedTexts.of(
        LabelledTexts(["no", "yes"], {"train": Examples(rows, [0, 1], ["0", "1"])}, ""), preprocessor
    )
    ours = make_classifier(str(folder), "", data, 0.0)
    plain = getattr(HUB, f"{family}TextClassifier")(HUB.Backbone.from_preset(str(folder), dropout=0.0), 2, dropout=0.0)
    plain.set_weights(ours.get_weights())

    def gradients(model):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(data.inputs["train"], training=True)[:, 1])
        return tape.gradient(
            loss, [variable.value for variable in model.trainable_variables], unconnected_gradients="zero"
        )

    last = ours.backbone.transformer_layers[-1]
    assert last(tf.zeros([2, 5, 32]), padding_mask=tf.ones([2, 5], tf.int32)).shape == (2, 1, 32)
    for one, other in zip(gradients(ours), gradients(plain), strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(one), tf.convert_to_tensor(other), atol=1e-6)


def test_a_generator_is_refused(tmp_path):
    tokenizer = HUB.GPT2Tokenizer({"a": 0, "<|endoftext|>": 1, "aa": 2}, ["a a"])
    backbone = HUB.GPT2Backbone(3, **SIZE)
    model = HUB.GPT2CausalLM(backbone, preprocessor=HUB.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8))
    model.save_to_preset(str(tmp_path / "gpt"))
    with pytest.raises(UserError, match="is a GPT2Backbone, for which KerasHub has no text classifier"):
        make_preprocessor(str(tmp_path / "gpt"), None, 8)


@SLOW
def test_a_file_of_examples_is_classified(presets, small, tmp_path, capsys):
    results = train(small, preset=str(presets("Bert")[0]))
    table, empty = tmp_path / "table.tsv", tmp_path / "empty.csv"
    empty.write_text("first,second\n")
    classify(str(tmp_path / "run/preset"), [], f"{small['data']}/validation.csv", "first, second", str(table))
    rows = [line.split("\t") for line in table.read_text().splitlines()]
    assert ["\t".join(row[:2]) for row in rows] == predictions_of(results).splitlines()
    assert all(abs(sum(map(float, row[2:])) - 1) < 1e-3 for row in rows[1:])
    assert "table.tsv: 44 predictions" in capsys.readouterr().out
    for texts, data, columns, told in (
        ([], "", "", "give one text, or two"),
        (["a", "b", "c"], "", "", r"takes 2 text\(s\) of an example, not 3"),
        (["a"], "", "", r"takes 2 text\(s\) of an example, not 1"),
        (["a"], "file.csv", "a", "give one text, or two"),
        (["a"], "", "a", "--data and --text-columns"),
        ([], "file.csv", "", "--data and --text-columns"),
        ([], "file.csv", "a,b,c", "must be one name, or two separated by a comma; got a,b,c"),
        ([], "file.csv", "a,a", "must be one name, or two"),
        ([], str(empty), "first,second", "empty.csv has no examples"),
        (["a", "\udcff"], "", "", "the example: text 2 must be a string"),
    ):
        with pytest.raises(UserError, match=told):
            classify(str(tmp_path / "run/preset"), texts, data, columns, "")
    with pytest.raises(UserError, match="table.tsv already exists; give a new file"):
        classify(str(tmp_path / "run/preset"), ["a", "b"], "", "", str(table))
    with pytest.raises(UserError, match="no classifier that a recipe has saved"):
        classify(str(presets("Bert")[0]), ["a"], "", "", "")
    for labels, told in (
        ('{"a": 1}', "no classifier"),
        ("[]", "no classifier"),
        ('{"classes": 5, "texts": 2}', "no classifier"),
        ('{"classes": ["a"], "texts": 2}', "has 1 classes, the model 2"),
    ):
        (tmp_path / "run/preset/labels.json").write_text(labels)
        with pytest.raises(UserError, match=told):
            classify(str(tmp_path / "run/preset"), ["a", "b"], "", "", "")
    shutil.copy(tmp_path / "run/best/labels.json", tmp_path / "run/preset")
    (tmp_path / "run/preset/task.weights.h5").unlink()
    with pytest.raises(UserError, match="no classifier that a recipe has saved"):
        classify(str(tmp_path / "run/preset"), ["a", "b"], "", "", "")


@SLOW
def test_a_run_that_lost_its_results_after_its_last_step_is_finished(small, tmp_path, monkeypatch):
    """In the middle of an epoch, and without what is not the best."""
    small |= {"model": "nano", "vocabulary_size": 300, "max_steps": 16, "epochs": 2}  # an epoch has 13
    results = train(small)
    for name in ("results.json", "best.json"):
        (tmp_path / "run" / name).unlink()
    monkeypatch.setattr(checkpoints, "_completed", Counter())  # as in a new process
    assert train(small)["val_loss"] == results["val_loss"]
    assert not (tmp_path / "run/best.json").exists()  # no epoch ended
    saved = tmp_path / "run/checkpoints"
    for path in (tmp_path / "run/results.json", *saved.glob("ckpt-16*"), *saved.glob("end*")):
        path.unlink()
    monkeypatch.setattr(checkpoints, "_completed", Counter())
    (tmp_path / "run/best.json").write_text('{"val_loss": 0.0}')
    shutil.rmtree(tmp_path / "run/best")
    again = train(small)
    assert (again["resumed_from_step"], again["val_loss"]) == (13, results["val_loss"])
    assert not (tmp_path / "run/best").exists()


def test_the_default_rate_of_a_preset_falls_with_its_width():
    lora = {"preset": "p", "lora_rank": 8}
    for options, width, rate in ({}, 128, 5e-4), ({"preset": "p"}, 400, 6e-5), (lora, 384, 4e-4):
        assert text_classifier.Config(**options).peak_rate(width) == pytest.approx(rate)
        assert text_classifier.Config(**options, learning_rate=0.1).peak_rate(width) == 0.1


@pytest.mark.parametrize("jit", [False, True])
def test_with_jit_there_are_few_lengths(small, jit):
    config = text_classifier.Config(**small | {"vocabulary_size": 300, "jit": jit})
    assert text_classifier.make_datasets(config).few_lengths is jit


def test_lora_is_refused_where_there_is_none():
    backbone = HUB.FNetBackbone(10, 1, 8, 8, max_sequence_length=4)
    with pytest.raises(UserError, match="--lora-rank: KerasHub has no LoRA for a FNetBackbone; leave it out"):
        enable_lora(backbone, 2)


def test_more_tokens_than_positions_are_refused(presets):
    folder, _ = presets("Bert")
    texts = LabelledTexts(["no", "yes"], {"train": Examples([("a",)], [0], ["0"])}, "")
    data = EncodedTexts.of(texts, make_preprocessor(str(folder), None, 33))
    with pytest.raises(UserError, match="--seq-length 33 is more than the 32 positions of the preset"):
        make_classifier(str(folder), "", data, 0.0)


def test_in_mixed_precision_its_numbers_are_in_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        texts = LabelledTexts([], {"train": Examples([("a",)] * 2, [1999.0, 2001.5], ["0", "1"])}, "")
        data = EncodedTexts.of(texts, make_preprocessor("", train_wordpieces(sentences, 300), 16))
        model = make_classifier("", "nano", data, 0.0)
    finally:
        keras.config.set_dtype_policy("float32")
    model.output_dense.kernel.assign(0 * model.output_dense.kernel)
    assert float(model(data.preprocessor(x=(["a"],)))[0, 0]) == 2000.25


def test_a_size_is_a_bert_and_regression_begins_at_the_mean_of_the_training_labels():
    preprocessor = make_preprocessor("", train_wordpieces(sentences, 300), 600)
    for classes, labels, bias in ((list("abc"), [0, 1, 2], [0, 0, 0]), ([], [1.0, 2.0, 4.5], [2.5])):
        texts = LabelledTexts(classes, {"train": Examples([("a",)] * 3, labels, ["0", "1", "2"])}, "")
        model = make_classifier("", "nano", EncodedTexts.of(texts, preprocessor), 0.3)
        assert isinstance(model, HUB.BertTextClassifier) and not model.compiled
        assert model.backbone.dropout == model.dropout == 0.3 and model.backbone.max_sequence_length == 600
        assert model.output_dense.bias.numpy().tolist() == bias
