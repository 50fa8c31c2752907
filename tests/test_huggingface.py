"""Hugging Face transformers' form: what is written is read back to the bit, and transformers computes the same."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import keras
import keras_hub
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.data.byte_pairs import train_byte_pairs
from common.data.labelled import LabelledTexts
from common.data.vocabulary import encode, train_wordpieces
from common.model import causal_lm
from common.model.causal_lm import causal_lm_for_generation, continuations
from common.model.classifier import make_classifier, make_preprocessor
from common.model.masked_lm import masked_lm_from_preset, masked_lm_from_size, preset_tokenizer
from common.model.presets import save_task
from common.model.sizes import check_model
from recipes import _export as exporting
from recipes._export import export
from recipes._fill_mask import fill_mask, print_filled_masks
from recipes._generate import make_sampler
from tests.conftest import assert_same
from tests.test_vocabulary import AWKWARD

models = keras_hub.models
SENTENCES = (
    "Returns a [MASK] with the same shape as the input.",
    "The function raises a [MASK] if the argument is not valid.",
    "If [MASK] is given, the result is a list.",
    "[MASK] is a statement, and so are names, numbers and (brackets)!",
)


def no_two_alike(model, folder, preprocessor):
    """Saves a model in which no two numbers are alike: nothing can stand in another's place."""
    rng = np.random.default_rng(0)
    for variable in model.weights:
        variable.assign(rng.normal(variable.path.endswith("gamma"), 0.2, variable.shape))
    save_task(model, preprocessor, folder)
    return str(folder)


def random_preset(tokenizer, folder):
    roberta = isinstance(tokenizer, models.RobertaTokenizer)
    kind = models.RobertaMaskedLMPreprocessor if roberta else models.BertMaskedLMPreprocessor
    model = masked_lm_from_size("tiny", tokenizer, dropout=0.1, seq_length=32)
    return no_two_alike(model, folder, kind(tokenizer, sequence_length=32))


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpieces(lambda: iter(SENTENCES), "sentences", 300)


@pytest.fixture(scope="module")
def byte_pairs():
    return train_byte_pairs(lambda: iter(SENTENCES), "sentences", 300)


@pytest.fixture(scope="module")
def preset(tokenizer, tmp_path_factory):
    return random_preset(tokenizer, tmp_path_factory.mktemp("saved") / "preset")


@pytest.fixture(scope="module")
def exported(preset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "a/b"
    assert export(preset, folder) == f'transformers.pipeline("fill-mask", "{folder}")'
    return str(folder)


def as_it_is(tokenizer):
    return tokenizer.get_vocabulary(), tokenizer.lowercase, tokenizer.strip_accents


def test_what_is_written_is_read_back_to_the_bit(preset, exported, tokenizer, tmp_path):
    before, after = (masked_lm_from_preset(folder, dropout=0.3) for folder in (preset, exported))
    assert_same(after.get_weights(), before.get_weights())
    assert after.backbone.dropout == 0.3
    assert as_it_is(preset_tokenizer(exported)) == as_it_is(preset_tokenizer(preset)) == as_it_is(tokenizer)
    check_model(exported, None, 512)
    with pytest.raises(ValueError, match="513 tokens are more than the 512 positions of the preset"):
        check_model(exported, None, 513)
    by_keras_hub = models.BertTextClassifier.from_preset(exported, num_classes=2)  # by its own converter
    assert_same(by_keras_hub.backbone.get_weights(), before.backbone.get_weights())
    assert by_keras_hub.preprocessor.tokenizer.get_vocabulary() == tokenizer.get_vocabulary()
    modes = {path.stat().st_mode & 0o777 for path in Path(exported).iterdir()}
    assert len(modes) == 1 and modes.pop() & 0o400
    for lowercase, strip_accents in ((False, False), (True, False), (False, True)):
        other = models.BertTokenizer(tokenizer.get_vocabulary(), lowercase=lowercase, strip_accents=strip_accents)
        folder = tmp_path / f"{lowercase}{strip_accents}"
        export(random_preset(other, tmp_path / "preset"), folder)
        assert as_it_is(preset_tokenizer(str(folder))) == as_it_is(other)


def test_checkpoints_of_others_are_read(preset, exported, tokenizer, tmp_path, monkeypatch):
    """Names as older checkpoints have them; without pooler and vocab.txt, as transformers 5 saves, or with it alone."""
    folder = shutil.copytree(exported, tmp_path / "older")
    tensors, older = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if "LayerNorm" in name:
            name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
        if "pooler" not in name:
            older[name.replace("predictions.bias", "predictions.decoder.bias")] = tensor
    save_file(older, folder / "model.safetensors")
    (folder / "vocab.txt").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"strip_accents": None}))

    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(folder))
    before, after = masked_lm_from_preset(preset), masked_lm_from_preset("hf://user/name")
    for model in (before, after):
        model.backbone.pooled_dense.set_weights([np.zeros((128, 128)), np.zeros(128)])
    assert_same(after.get_weights(), before.get_weights())
    assert as_it_is(preset_tokenizer("hf://user/name")) == as_it_is(tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match=f"^cannot load {folder} \\(.*tokenizer.json\\)$"):
        preset_tokenizer(str(folder))
    shutil.copy(Path(exported, "vocab.txt"), folder)
    assert as_it_is(preset_tokenizer(str(folder))) == as_it_is(tokenizer)
    save_file({name: t for name, t in tensors.items() if "cls." not in name}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="it lacks cls.predictions.bias: give a BERT with its head"):
        masked_lm_from_preset(str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "distilbert"}))
    with pytest.raises(ValueError, match="is a distilbert in Hugging Face's form: give a BERT, or a preset that Ker"):
        preset_tokenizer(str(folder))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_text("damaged")
    with pytest.raises(ValueError, match=f"^cannot load {folder} \\(.*\\)$"):
        masked_lm_from_preset(str(folder))


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_an_encoder_alone_is_a_classifiers(prefix, preset, exported, tokenizer, tmp_path, capsys):
    """With and without a pooler, which a masked language model of transformers does not have."""
    folder = shutil.copytree(exported, tmp_path / "encoder")
    tensors = load_file(folder / "model.safetensors")
    encoder = {f"{prefix}{name[5:]}": tensor for name, tensor in tensors.items() if name.startswith("bert.")}
    expected = masked_lm_from_preset(preset).backbone.get_weights()
    texts = LabelledTexts(["0", "1"], {})
    data = SimpleNamespace(preprocessor=make_preprocessor(str(folder), None, 16), texts=texts)
    assert as_it_is(data.preprocessor.tokenizer) == as_it_is(tokenizer)
    for pooler in (True, False):
        kept = {name: tensor for name, tensor in encoder.items() if pooler or "pooler" not in name}
        save_file(kept, folder / "model.safetensors")
        backbone = make_classifier(str(folder), "", data).backbone
        assert ("has no pooler: it begins with random weights" in capsys.readouterr().out) != pooler
        same = [np.array_equal(mine, theirs) for mine, theirs in zip(backbone.get_weights(), expected, strict=True)]
        assert same.count(False) == (0 if pooler else 2)
        assert backbone.pooled_dense.trainable
    del kept[f"{prefix}embeddings.LayerNorm.weight"]
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(ValueError, match="lacks bert.embeddings.LayerNorm.weight: give a BERT\\)"):
        make_classifier(str(folder), "", data)


def test_a_folder_is_complete_or_absent(preset, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="already exists; give a new folder"):
        export(preset, tmp_path.parent)
    with pytest.raises(ValueError, match="cannot write .*Not a directory"):
        (tmp_path / "file").write_text("")
        export(preset, tmp_path / "file/under")
    (tmp_path / ".hf.unfinished/mine").mkdir(parents=True)  # as of an export that was killed

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "save_file", full_disk)
    for name in ("hf", "other"):
        with pytest.raises(ValueError, match="No space left on device"):
            export(preset, tmp_path / name)
    assert {path.name for path in tmp_path.rglob("*")} == {"file", ".hf.unfinished", "mine"}


def test_a_random_head_is_neither_exported_nor_used(preset, exported, byte_pairs, tmp_path, capsys):
    headless, backbone, classifier = (str(tmp_path / name) for name in ("headless", "backbone", "classifier"))
    shutil.copytree(preset, headless)
    Path(headless, "task.weights.h5").unlink()
    models.BertBackbone.from_preset(preset).save_to_preset(backbone)
    models.BertTextClassifier.from_preset(preset, num_classes=2).save_to_preset(classifier)
    why = {headless: "task.weights.h5", backbone: "task.json", classifier: "labels.json|a BertTextClassifier"}
    why |= {"none": "preset none"}
    for other, reason in why.items():
        with pytest.raises(ValueError, match=f"^(cannot load )?{other}.*({reason})"):
            export(other, tmp_path / "hf")
        told = f"^cannot load {other} as a BertMaskedLM or RobertaMaskedLM that KerasHub saved \\(.*({reason}).*\\)$"
        with pytest.raises(ValueError, match=told):
            print_filled_masks(other, ["A [MASK]."])
    with pytest.raises(ValueError, match="task.json"):
        export(exported, tmp_path / "hf")
    assert not (tmp_path / "hf").exists() and capsys.readouterr().out == ""
    for whole in (exported, random_preset(byte_pairs, tmp_path / "roberta")):
        print_filled_masks(whole, ["A [MASK]."])
        assert "A [MASK]." in capsys.readouterr().out


@pytest.mark.slow
def test_transformers_computes_the_same(preset, exported, tokenizer):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model, other = masked_lm_from_preset(preset), transformers.BertForMaskedLM.from_pretrained(exported).eval()
    of_theirs = transformers.AutoTokenizer.from_pretrained(exported)

    def gap():
        """The largest difference of logits, over all tokens."""
        gaps = []
        for sentence in SENTENCES:
            ids = np.array([of_theirs(sentence)["input_ids"]])
            inputs = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": 1 + 0 * ids}
            logits = model(inputs | {"mask_positions": np.arange(ids.size)[None]}, training=False)
            with torch.no_grad():
                gaps.append(np.abs(np.array(logits) - other(torch.tensor(ids)).logits.numpy()).max())
        return max(gaps)

    pipeline = transformers.pipeline("fill-mask", exported)
    for sentence in SENTENCES:
        (guesses,) = fill_mask(model, tokenizer, sentence)
        for their, our in zip(pipeline(sentence, top_k=5), guesses, strict=True):
            assert their.pop("score") == pytest.approx(our.pop("score"), abs=1e-3)
            assert (their["token"], their["token_str"]) == (our["token"], our["token_str"])
    assert gap() < 2e-3
    # What the module says differs is all that differs.
    model.masked_lm_head._intermediate_dense.activation = lambda x: keras.activations.gelu(x, approximate=True)
    model.masked_lm_head._intermediate_layer_norm.epsilon = 1e-12
    assert gap() < 1e-4

    texts = [*AWKWARD, "an [UNK] word"]
    for text, ids in zip(texts, encode(texts, tokenizer), strict=True):
        assert of_theirs(text)["input_ids"] == [tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]
    assert of_theirs.mask_token == "[MASK]" and len(set(of_theirs.all_special_tokens)) == 5
    assert of_theirs.model_max_length == 512


@pytest.fixture(scope="module")
def gpt2(byte_pairs, tmp_path_factory):
    """The preset of a GPT-2 with random weights."""
    preprocessor = causal_lm.make_preprocessor("", byte_pairs, 64)
    model = causal_lm.make_causal_lm("", "tiny", preprocessor, 0.0)
    return no_two_alike(model, tmp_path_factory.mktemp("gpt2") / "preset", preprocessor)


@pytest.mark.slow
def test_transformers_computes_the_same_of_a_gpt2_and_writes_the_same(gpt2, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    assert export(gpt2, tmp_path / "hf").startswith('transformers.pipeline("text-generation", ')
    model = causal_lm_for_generation(gpt2)
    theirs, info = transformers.GPT2LMHeadModel.from_pretrained(f"{tmp_path}/hf", output_loading_info=True)
    assert not any(info.values())
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{tmp_path}/hf")
    end = model.preprocessor.tokenizer.end_token_id
    assert theirs.config.bos_token_id == theirs.config.eos_token_id == tokenizer.eos_token_id == end
    for text in ("You may add Your (copyright) notice; 12345.", "the  Work\n\nis it", *AWKWARD[2:5]):
        ids = model.preprocessor.generate_preprocess([text], 512)
        length = int(np.sum(ids["padding_mask"]))
        assert tokenizer(text)["input_ids"] == np.array(ids["token_ids"])[0, :length].tolist()
        own = model({name: np.array(value) for name, value in ids.items()})[0, :length]
        with torch.no_grad():
            logits = theirs.eval()(torch.tensor([tokenizer(text)["input_ids"]])).logits[0]
        assert np.ptp(logits) > 10
        np.testing.assert_allclose(own, logits, atol=1e-4)
    for text in ("You may add Your (copyright) notice; 12345.", "the  Work\n\nis it"):
        written = next(continuations(model, [text], make_sampler("greedy"), tokens=12))
        asked = tokenizer(text, return_tensors="pt")
        again = theirs.generate(**asked, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
        assert tokenizer.decode(again, skip_special_tokens=True, clean_up_tokenization_spaces=False) == written


def test_keras_hub_reads_an_exported_gpt2(gpt2, tmp_path):
    export(gpt2, tmp_path / "hf")
    hf = f"{tmp_path}/hf"
    own = models.GPT2Backbone.from_preset(gpt2)
    again = causal_lm.make_causal_lm(hf, "", causal_lm.make_preprocessor(hf, None, 64), 0.0)
    assert_same(again.backbone.get_weights(), own.get_weights())
    check_model(hf, None, 512)
    with pytest.raises(ValueError, match="513 tokens are more than the 512 positions"):
        check_model(hf, None, 513)
