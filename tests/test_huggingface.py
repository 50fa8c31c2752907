"""Hugging Face transformers' form: what is written is read back to the bit, and transformers computes the same."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import huggingface_hub
import keras
import keras_hub
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.data.byte_pairs import train_byte_pairs
from common.data.corpora import open_corpus
from common.data.labelled import Examples, LabelledTexts
from common.data.text_batches import EncodedTexts
from common.data.wordpiece import WordPieces, train_wordpieces
from common.model import causal_lm as causal
from common.model.backbones import model_width
from common.model.classifier import make_classifier, make_preprocessor
from common.model.export import export_bert
from common.model.export_gpt2 import export_gpt2
from common.model.fill_mask import fill_mask, print_filled_masks
from common.model.generate import causal_lm_for_generation, continuations, make_sampler
from common.model.masked_lm import masked_lm_from_preset, masked_lm_from_size, preset_vocabulary
from common.model.saving import save_preset, save_task
from keras_replicas.errors import UserError
from recipes import __main__, bert_mlm, causal_lm

SENTENCES = (
    "Returns a [MASK] with the same shape as the input.",
    "The function raises a [MASK] if the argument is not valid.",
    "This layer is applied to the [MASK] of the model.",
    "If [MASK] is given, the result is a list.",
    "The default value of the argument is [MASK].",
    "[MASK] is a statement, and so is return.",
    "An integer or a list of [MASK].",
    "A class [MASK] defines the methods of its objects.",
    "Names, numbers, (brackets) and a [MASK]!",
    "The optimizer updates the [MASK] with the gradients; see the documentation for what that means.",
)
AWKWARD = (
    "",
    " \t \n",
    "Crème brûlée, naïve coöperation, Ångström, e\u0301 and é, İstanbul, straße",
    "今日は良い天気 mixed中文text 한국어 ไทย",
    "🙂🙃 👩‍👩‍👧 flags 🇳🇱",
    "x" * 100 + " " + "y" * 101 + " Donaudampfschifffahrtsgesellschaftskapitän",
    "don't self.attr __init__ a-b 1,000.5 $x += y**2 \u200bzero\u00a0width\x07 bell \ufffd",
    "an [UNK] word",
)


def random_preset(vocabulary, folder):
    """A model of 2 layers and 2 heads in which no two numbers are alike: nothing can stand in another's place."""
    model = masked_lm_from_size("tiny", vocabulary, dropout=0.1, seq_length=32)
    rng = np.random.default_rng(0)
    for variable in model.weights:
        around = 1.0 if "gamma" in variable.path else 0.0
        variable.assign(rng.normal(around, 0.2, variable.shape))
    save_preset(model, vocabulary, 32, folder)
    return str(folder)


@pytest.fixture(scope="module")
def vocabulary(wikitext):
    return train_wordpieces(open_corpus(str(wikitext))["train"], 300)


@pytest.fixture(scope="module")
def preset(vocabulary, tmp_path_factory):
    return random_preset(vocabulary, tmp_path_factory.mktemp("saved") / "preset")


@pytest.fixture(scope="module")
def exported(preset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "a/b"
    export_bert(preset, folder)
    return str(folder)


def assert_same_weights(model, other):
    for weight, value, expected in zip(model.weights, model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected, err_msg=weight.path)


def test_what_is_written_is_read_back_to_the_bit(preset, exported, vocabulary, tmp_path):
    before, after = (masked_lm_from_preset(folder) for folder in (preset, exported))
    assert_same_weights(after, before)
    assert preset_vocabulary(exported) == preset_vocabulary(preset) == vocabulary
    assert model_width(exported, "nano") == 128
    assert all(masked_lm_from_preset(folder, dropout=0.3).backbone.dropout == 0.3 for folder in (preset, exported))
    assert bert_mlm.Config(preset=exported, seq_length=512)
    with pytest.raises(UserError, match="--seq-length 513 is more than the 512 positions of the preset"):
        bert_mlm.Config(preset=exported, seq_length=513)
    for sentence in SENTENCES[:2]:
        assert fill_mask(after, vocabulary, sentence) == fill_mask(before, vocabulary, sentence)
    save_preset(after, preset_vocabulary(exported), 32, tmp_path / "again")
    assert_same_weights(keras_hub.models.BertMaskedLM.from_preset(str(tmp_path / "again"), compile=False), before)


def test_keras_hubs_own_converter_reads_the_same_backbone(preset, exported):
    backbone = keras_hub.models.BertBackbone.from_preset(exported)
    assert_same_weights(backbone, keras_hub.models.BertBackbone.from_preset(preset))


def test_checkpoints_of_others_are_read(preset, exported, vocabulary, tmp_path, monkeypatch):
    """Names as older checkpoints have them; without a pooler and vocab.txt, as transformers 5 saves."""
    folder = shutil.copytree(exported, tmp_path / "older")
    tensors = load_file(folder / "model.safetensors")
    older = {}
    for name, tensor in tensors.items():
        if "LayerNorm" in name:
            name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
        if "pooler" not in name:
            older[name.replace("predictions.bias", "predictions.decoder.bias")] = tensor
    save_file(older, folder / "model.safetensors")
    (folder / "vocab.txt").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"strip_accents": None}))

    def download(repo_id, filename):
        if not (folder / filename).exists():
            raise huggingface_hub.errors.EntryNotFoundError(repo_id)
        return str(folder / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    before, after = masked_lm_from_preset(preset), masked_lm_from_preset("hf://user/name")
    for model in (before, after):
        model.backbone.pooled_dense.set_weights([np.zeros((128, 128)), np.zeros(128)])
    assert_same_weights(after, before)
    assert preset_vocabulary("hf://user/name") == vocabulary

    save_file({name: t for name, t in tensors.items() if "cls." not in name}, folder / "model.safetensors")
    with pytest.raises(UserError, match="lacks cls.predictions.bias; give a BERT masked language model"):
        masked_lm_from_preset(str(folder))
    (folder / "model.safetensors").write_text("damaged")
    (folder / "tokenizer.json").unlink()
    for read in (masked_lm_from_preset, preset_vocabulary):
        with pytest.raises(UserError, match=f"^cannot load {folder} \\(.*\\)$"):
            read(str(folder))


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_an_encoder_alone_is_a_classifiers(prefix, preset, exported, tmp_path, capsys):
    """With and without a pooler, which a masked language model of transformers does not have."""
    folder = shutil.copytree(exported, tmp_path / "encoder")
    tensors = load_file(folder / "model.safetensors")
    encoder = {f"{prefix}{name[5:]}": tensor for name, tensor in tensors.items() if name.startswith("bert.")}
    expected = masked_lm_from_preset(preset).backbone.get_weights()
    preprocessor = make_preprocessor(str(folder), None, 16)
    assert preprocessor.tokenizer.get_vocabulary() == preset_vocabulary(preset).pieces
    texts = LabelledTexts(["no", "yes"], {"train": Examples([("a",)], [0], ["0"])}, "")
    data = EncodedTexts.of(texts, preprocessor)
    for pooler in (True, False):
        kept = {name: tensor for name, tensor in encoder.items() if pooler or "pooler" not in name}
        save_file(kept, folder / "model.safetensors")
        backbone = make_classifier(str(folder), "", data, 0.1).backbone
        assert ("has no pooler: it begins with random weights" in capsys.readouterr().out) != pooler
        same = [np.array_equal(mine, theirs) for mine, theirs in zip(backbone.get_weights(), expected, strict=True)]
        assert same.count(False) == (0 if pooler else 2)
        assert backbone.pooled_dense.trainable
    with pytest.raises(UserError, match="lacks cls.predictions.bias; give a BERT masked language model"):
        masked_lm_from_preset(str(folder))
    del kept[f"{prefix}embeddings.LayerNorm.weight"]
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(UserError, match="lacks bert.embeddings.LayerNorm.weight; give a BERT"):
        make_classifier(str(folder), "", data, 0.1)


def test_a_folder_that_has_its_vocabulary_in_vocab_txt_alone(exported, vocabulary, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "older")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    bert_mlm.Config(preset=str(folder))  # checks it
    assert preset_vocabulary(str(folder)) == vocabulary
    (folder / "vocab.txt").unlink()
    with pytest.raises(UserError, match="older has no tokenizer.json or vocab.txt, the tokenizer"):
        bert_mlm.Config(preset=str(folder))


def test_whether_case_and_accents_count_survives(vocabulary, tmp_path):
    for lowercase, strip_accents in ((False, False), (True, False), (False, True)):
        other = dataclasses.replace(vocabulary, lowercase=lowercase, strip_accents=strip_accents)
        folder = tmp_path / f"{lowercase}{strip_accents}"
        export_bert(random_preset(other, tmp_path / "preset"), folder)
        assert preset_vocabulary(str(folder)) == other


def test_the_command_says_how_to_load(preset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recipes", "export", preset, f"{tmp_path}/hf"])
    __main__.main()
    assert capsys.readouterr().out == (
        f"{tmp_path}/hf: config.json model.safetensors tokenizer.json tokenizer_config.json vocab.txt\n"
        f'Load it: transformers.pipeline("fill-mask", "{tmp_path}/hf")\n'
    )


def test_a_folder_is_complete_or_absent(preset, exported, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="already exists; give a new folder"):
        export_bert(preset, tmp_path.parent)
    with pytest.raises(UserError, match="cannot write .*Not a directory"):
        (tmp_path / "file").write_text("")
        export_bert(preset, tmp_path / "file/under")
    (tmp_path / ".hf.unfinished").write_text("mine")

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("common.model.export.save", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        export_bert(preset, tmp_path / "hf")
    assert {path.name for path in tmp_path.iterdir()} == {"file", ".hf.unfinished"}


def test_what_is_no_masked_language_model_is_refused(preset, exported, tmp_path):
    backbone = str(tmp_path / "backbone")
    keras_hub.models.BertBackbone.from_preset(preset).save_to_preset(backbone)
    classifier = str(tmp_path / "classifier")
    keras_hub.models.BertTextClassifier.from_preset(preset, num_classes=2).save_to_preset(classifier)
    for other in ("no_such_preset", str(tmp_path), backbone, classifier, exported):
        with pytest.raises(UserError, match=f"^cannot load {other} as a BertMaskedLM that KerasHub saved \\(.*\\)$"):
            export_bert(other, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_masks_are_not_filled_by_a_random_head(preset, exported, wikitext, tmp_path, monkeypatch, capsys):
    headless, backbone, classifier = (str(tmp_path / name) for name in ("headless", "backbone", "classifier"))
    shutil.copytree(preset, headless)
    Path(headless, "task.weights.h5").unlink()
    keras_hub.models.BertBackbone.from_preset(preset).save_to_preset(backbone)
    keras_hub.models.BertTextClassifier.from_preset(preset, num_classes=2).save_to_preset(classifier)
    why = {headless: "task.weights.h5", backbone: "task.json", classifier: "it is a BertTextClassifier"}
    for other, reason in why.items():
        told = f"^cannot load {other} as a BertMaskedLM or RobertaMaskedLM that KerasHub saved \\(.*{reason}.*\\)$"
        monkeypatch.setattr("sys.argv", ["recipes", "fill-mask", "A [MASK].", "--preset", other])
        with pytest.raises(UserError, match=told):
            __main__.main()
    assert capsys.readouterr().out == ""
    byte_pairs = train_byte_pairs(open_corpus(str(wikitext))["train"], 300)
    for whole in (preset, exported, random_preset(byte_pairs, tmp_path / "roberta")):
        print_filled_masks(whole, ["A [MASK]."])
        assert "A [MASK]." in capsys.readouterr().out


@pytest.mark.slow
def test_transformers_computes_the_same(preset, exported, vocabulary, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model, other = masked_lm_from_preset(preset), transformers.BertForMaskedLM.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)

    def gap():
        """The largest difference of logits, over all tokens."""
        gaps = []
        for sentence in SENTENCES:
            ids = np.array([tokenizer(sentence)["input_ids"]])
            inputs = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": 1 + 0 * ids}
            logits = model(inputs | {"mask_positions": np.arange(ids.size)[None]}, training=False)
            with torch.no_grad():
                gaps.append(np.abs(np.array(logits) - other(torch.tensor(ids)).logits.numpy()).max())
        return max(gaps)

    pipeline = transformers.pipeline("fill-mask", exported)
    for sentence in SENTENCES:
        (guesses,) = fill_mask(model, vocabulary, sentence)
        theirs = pipeline(sentence, top_k=5)
        for their, our in zip(theirs, guesses, strict=True):
            assert their.pop("score") == pytest.approx(our.pop("score"), abs=1e-3) and their == our
    assert gap() < 2e-3
    # What the module says differs is all that differs.
    model.masked_lm_head._intermediate_dense.activation = lambda x: keras.activations.gelu(x, approximate=True)
    model.masked_lm_head._intermediate_layer_norm.epsilon = 1e-12
    assert gap() < 1e-4

    special = WordPieces.special
    for lowercase, strip_accents in ((True, True), (False, False), (True, False), (False, True)):
        cased = dataclasses.replace(vocabulary, lowercase=lowercase, strip_accents=strip_accents)
        folder = tmp_path / f"{lowercase}{strip_accents}"
        export_bert(random_preset(cased, tmp_path / "preset"), folder)
        theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), cased.tokenizer()
        for text in AWKWARD:
            ids = ours.encode(text, add_special_tokens=False).ids
            assert theirs(text)["input_ids"] == [
                cased.pieces.index(special.start),
                *ids,
                cased.pieces.index(special.end),
            ]
        assert theirs.mask_token == special.mask and set(theirs.all_special_tokens) == set(special)
        assert theirs.model_max_length == 512

    # The tokenizer beside the shards, of either kind.
    for vocabulary in (cased, train_byte_pairs(lambda: iter(AWKWARD * 5), 500)):
        (tmp_path / "tokenizer.json").write_text(vocabulary.tokenizer().to_str())
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
        for text in AWKWARD:
            ids = vocabulary.tokenizer().encode(text, add_special_tokens=False).ids
            assert theirs(text, add_special_tokens=False)["input_ids"] == ids


@pytest.fixture(scope="module")
def gpt2(wikitext, tmp_path_factory):
    """The preset of a GPT-2 with random weights."""
    vocabulary = train_byte_pairs(open_corpus(str(wikitext))["train"], 300)
    model = causal.make_causal_lm("", "tiny", causal.make_preprocessor("", vocabulary, 64), 0.0)
    rng = np.random.default_rng(0)
    for variable in model.weights:
        variable.assign(rng.normal(variable.path.endswith("gamma"), 0.2, variable.shape))
    folder = tmp_path_factory.mktemp("gpt2") / "preset"
    save_task(model, model.preprocessor, folder)
    return str(folder)


@pytest.mark.slow
def test_transformers_computes_the_same_of_a_gpt2_and_writes_the_same(gpt2, tmp_path, monkeypatch, capsys):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", ["recipes", "export", gpt2, f"{tmp_path}/hf"])
    __main__.main()
    names = "config.json merges.txt model.safetensors tokenizer.json tokenizer_config.json vocab.json"
    assert capsys.readouterr().out == (
        f'{tmp_path}/hf: {names}\nLoad it: transformers.pipeline("text-generation", "{tmp_path}/hf")\n'
    )
    model = causal_lm_for_generation(gpt2)
    theirs, info = transformers.GPT2LMHeadModel.from_pretrained(f"{tmp_path}/hf", output_loading_info=True)
    assert not any(info.values())
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{tmp_path}/hf")
    for text in ("You may add Your (copyright) notice; 12345.", "the  Work\n\nis it"):
        ids = model.preprocessor.generate_preprocess([text], 64)
        length = int(np.sum(ids["padding_mask"]))
        assert tokenizer(text)["input_ids"] == np.array(ids["token_ids"])[0, :length].tolist()
        own = model({name: np.array(value) for name, value in ids.items()})[0, :length]
        with torch.no_grad():
            logits = theirs.eval()(torch.tensor([tokenizer(text)["input_ids"]])).logits[0]
        assert np.ptp(logits) > 10
        np.testing.assert_allclose(own, logits, atol=1e-4)
        written = continuations(model, [text], make_sampler("greedy"), tokens=12)[0]
        asked = tokenizer(text, return_tensors="pt")
        again = theirs.generate(**asked, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
        assert tokenizer.decode(again, skip_special_tokens=True, clean_up_tokenization_spaces=False) == written


def test_keras_hub_reads_an_exported_gpt2(gpt2, tmp_path):
    export_gpt2(gpt2, tmp_path / "hf")
    again, own = (keras_hub.models.GPT2Backbone.from_preset(folder) for folder in (f"{tmp_path}/hf", gpt2))
    assert_same_weights(again, own)
    assert causal_lm.Config(preset=f"{tmp_path}/hf", seq_length=512)
    with pytest.raises(UserError, match="--seq-length 513 is more than the 512 positions"):
        causal_lm.Config(preset=f"{tmp_path}/hf", seq_length=513)


def test_what_is_no_gpt2_is_refused(preset, tmp_path):
    for other in (preset, "no_such_preset"):
        with pytest.raises(UserError, match=f"^cannot load {other} as a GPT2CausalLM that KerasHub saved$"):
            export_gpt2(other, tmp_path / "hf")
