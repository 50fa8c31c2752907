"""From a CSV to a service: what is exported computes what Keras does, of the same texts, without Keras."""

import itertools
import json
import shutil
import sys
import unicodedata
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from tokenizers import Tokenizer

from benchmarks import export as benchmark
from common.data.vocabulary import encode
from keras_replicas import UserError
from recipes._export import _byte_pairs, _word_pieces, export
from tests.conftest import slow
from tests.test_examples import PIECES, tokenizer_of
from tests.test_huggingface import no_two_alike
from tests.test_vocabulary import AWKWARD

HUB = keras_hub.models
TEXTS = [*AWKWARD, "the old cat sees a young dog " * 9, "a dog", "a [SEP] cat [PAD] [CLS]"]
PAIRS = [(first, second) for first in TEXTS[-4:] for second in ("the cat", *TEXTS[-3:])]


@pytest.fixture(scope="module")
def presets(tmp_path_factory):
    """A function of a family, a head and classes: the preset of random numbers, as a recipe saves it, and its model."""

    def of(family, head="TextClassifier", classes=("no", "yes", "maybe")):
        folder, tokenizer = tmp_path_factory.mktemp(family) / "preset", tokenizer_of(family)
        sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32, "max_sequence_length": 32}
        sizes |= {"embedding_dim": 8} if family == "Albert" else {}
        backbone = getattr(HUB, f"{family}Backbone")(tokenizer.vocabulary_size(), **sizes)
        length = 24 if family == "Roberta" else 25  # with an even number of tokens for a pair
        preprocessor = getattr(HUB, f"{family}{head}Preprocessor")(tokenizer, sequence_length=length)
        outputs = [len(classes) or 1] if head == "TextClassifier" else []
        model = getattr(HUB, f"{family}{head}")(backbone, *outputs, preprocessor=preprocessor)
        no_two_alike(model, folder, preprocessor)
        (folder / "labels.json").write_text(json.dumps({"classes": classes, "texts": 1}))
        return str(folder), model

    return of


@pytest.fixture
def made(tmp_path):
    """A function of a preset and a form: an exported graph, as a function of inputs, and what reads texts for it."""

    def of(preset, form):
        for package in ("tf2onnx", "onnxruntime") if form == "onnx" else ():
            pytest.importorskip(package)
        export(preset, folder := tmp_path / form, form)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if form == "saved_model":
            loaded = tf.saved_model.load(str(folder))
            return (lambda x: loaded.serve(x).numpy()), tokenizer
        if form == "litert":
            runner = tf.lite.Interpreter(str(folder / "model.tflite")).get_signature_runner()
            return (lambda x: runner(**x)["output_0"]), tokenizer
        session = pytest.importorskip("onnxruntime").InferenceSession(folder / "model.onnx")
        return (lambda x: session.run(None, x)[0]), tokenizer

    return of


def inputs_of(tokenizer, texts, names):
    rows = tokenizer.encode_batch(texts)
    theirs = {"token_ids": "ids", "padding_mask": "attention_mask", "segment_ids": "type_ids"}
    return {name: np.array([getattr(row, theirs[name]) for row in rows], np.int32) for name in names if name in theirs}


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "Roberta"])
def test_a_text_is_split_as_in_training_whatever_its_characters(family):
    texts = [*AWKWARD, "a[UNK]b [UNK]. [unk] [MASK] \0b", "a <mask> b<mask>\n <mask> <s>"]
    own = [tokenizer_of(family)]
    if family != "Roberta":
        seen = "".join(texts)
        characters = sorted({*seen, *seen.casefold(), *unicodedata.normalize("NFKD", seen.casefold()), "ι"})
        pieces = [
            *PIECES[:5],
            *(piece for part in characters if part.isprintable() and part != " " for piece in (part, f"##{part}")),
        ]
        forms = itertools.product([True, False], repeat=2)
        own = [type(own[0])(pieces, lowercase=lower, strip_accents=strip) for lower, strip in forms]
    for tokenizer in own:
        split = (_byte_pairs if family == "Roberta" else _word_pieces)(tokenizer, True)
        for text, ids in zip(texts, encode(texts, tokenizer), strict=True):
            assert split.encode(text, add_special_tokens=False).ids == ids.tolist(), ascii(text)


@pytest.mark.parametrize("form", ["saved_model", "litert", *slow("onnx")])
@pytest.mark.parametrize("family", ["Bert", *slow("DistilBert", "Roberta")])
def test_a_classifier_computes_what_keras_does_of_the_same_texts(family, form, presets, made):
    """Of one text and of many, of any length, cut and padded, alone and in pairs; of words that are no tokens."""
    preset, model = presets(family)
    graph, tokenizer = made(preset, form)
    for texts in (TEXTS[-2:-1], TEXTS, PAIRS):
        columns = tuple(map(list, zip(*texts, strict=True))) if texts is PAIRS else texts
        expected = {name: np.array(value) for name, value in model.preprocessor(x=columns).items()}
        given = inputs_of(tokenizer, texts, expected)
        for name, value in given.items():
            longest = value.shape[1]
            np.testing.assert_array_equal(value, expected[name][:, :longest], err_msg=name)
            assert not expected["padding_mask"][:, longest:].any()
        np.testing.assert_allclose(graph(given), model.predict(columns, verbose=0), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["saved_model", "litert", "onnx"])
@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_a_masked_language_model_does_too(family, form, presets, made):
    preset, model = presets(family, "MaskedLM")
    graph, tokenizer = made(preset, form)
    own, mask = model.preprocessor.tokenizer, model.preprocessor.tokenizer.mask_token
    for texts in ([f"the {mask} sees"], [f"the old {mask} cat", f"a dog {mask} the young old cat"]):
        given = inputs_of(tokenizer, texts, model.input)
        for text, ids in zip(texts, given["token_ids"].tolist(), strict=True):
            before, after = (part.tolist() for part in encode(text.split(f" {mask}"), own))
            expected = [own.start_token_id, *before, own.mask_token_id, *after, own.end_token_id]
            assert ids[: len(expected)] == expected
        positions = np.argwhere(given["token_ids"] == own.mask_token_id)[:, 1:]
        given["mask_positions"] = positions.astype(np.int32)
        np.testing.assert_allclose(graph(given), model(given, training=False), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [["no", "yes", "maybe"], []], ids=["classes", "regression"])
def test_transformers_computes_the_same_of_a_classifier(classes, presets, tmp_path):
    """But of texts with the name of a special token, which is that token there."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    preset, model = presets("Bert", classes=classes)
    assert export(preset, folder := tmp_path / "made") == f'transformers.pipeline("text-classification", "{folder}")'
    reader = transformers.AutoTokenizer.from_pretrained(folder)
    kind = transformers.AutoModelForSequenceClassification
    theirs, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    for texts in (TEXTS[:-1], [pair for pair in PAIRS if TEXTS[-1] not in pair]):
        columns = tuple(map(list, zip(*texts, strict=True))) if isinstance(texts[0], tuple) else (texts,)
        given = reader(*columns, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            found = theirs.eval()(**given).logits
        np.testing.assert_allclose(found, model.predict(columns if len(columns) > 1 else texts, verbose=0), atol=1e-5)
    answer = transformers.pipeline("text-classification", str(folder))("a dog")[0]
    assert (answer["label"] in classes) == bool(classes)


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(presets, tmp_path, monkeypatch):
    preset, _ = presets("Bert")
    kinds = {"onnx": "GPT2CausalLM", "litert": "AlbertTextClassifier", "huggingface": "RobertaTextClassifier"}
    for form, kind in kinds.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "task.json").write_text(json.dumps({"class_name": kind}))
        shutil.copy(f"{preset}/task.weights.h5", tmp_path / kind)
        with pytest.raises(UserError, match=f"^cannot export .*, a {kind}, to {form}: give a BERT or "):
            export(str(tmp_path / kind), tmp_path / "made", form)
    with pytest.raises(UserError, match="already exists; give a new folder"):
        export(preset, tmp_path, "saved_model")

    def fail(*_, **__):
        raise tf.errors.InternalError(None, None, "no\nroom")

    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"^cannot write .*made \(no\)$"):
        patch.setattr(keras.Model, "export", fail)
        export(preset, tmp_path / "made", "litert")
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"needs tf2onnx: pip install -e '.\[export\]'"):
        patch.setitem(sys.modules, "tf2onnx", None)
        export(preset, tmp_path / "made", "onnx")
    Path(preset, "labels.json").write_text('{"classes": ["no"], "texts": 1}')
    with pytest.raises(UserError, match="is not that of its model, which has 3 outputs"):
        export(preset, tmp_path / "made", "saved_model")
    Path(preset, "labels.json").unlink()
    with pytest.raises(UserError, match="is no classifier that a recipe has saved"):
        export(preset, tmp_path / "made", "saved_model")
    assert {path.name for path in tmp_path.iterdir()} == {*kinds.values()}


@pytest.mark.slow
def test_the_page_leads_from_a_csv_to_services_that_answer_as_keras_does(tmp_path):
    """Its commands, and each of its programs in a process that cannot import Keras."""
    for package in ("tf2onnx", "onnxruntime", "ai_edge_litert", "torch", "transformers"):
        pytest.importorskip(package)
    found = benchmark.chain(tmp_path, rows=12_000)
    assert len(found["seconds"]) == 6 and sum(found["seconds"].values()) < 600
    results = json.loads((tmp_path / "runs/text_classifier/results.json").read_text())
    assert results["val_accuracy"] > 0.9 > results["val_bag_of_words_accuracy"]
    assert len(found["formats"]) == 5
    assert max(each["difference"] for each in found["formats"].values()) < 1e-4
