"""Models from a size or a preset, of every kind, and what is saved of them."""

import errno
import json
import shutil
from types import SimpleNamespace

import keras
import keras_hub
import numpy as np
import pytest

from common.data.byte_pairs import train_byte_pairs
from common.data.labelled import Examples, LabelledTexts
from common.data.vocabulary import train_wordpieces
from common.model import causal_lm, classifier
from common.model.causal_lm import causal_lm_for_generation, continuations, print_continuations
from common.model.masked_lm import load_json, masked_lm_from_preset, masked_lm_from_size, preset_tokenizer
from common.model.presets import ADAPTERS, save_task, sinusoids
from common.model.sizes import check_model, dimensions
from keras_replicas import UserError
from keras_replicas.cluster import worker_config
from recipes._fill_mask import fill_mask, print_filled_masks
from recipes._generate import make_sampler
from tests.conftest import assert_same

TEXT = "Some words, and some more of the same words."
models = keras_hub.models
KINDS = {
    train_wordpieces: (models.BertMaskedLM, models.BertMaskedLMPreprocessor),
    train_byte_pairs: (models.RobertaMaskedLM, models.RobertaMaskedLMPreprocessor),
}


def trained(train):
    return train(lambda: (TEXT for _ in range(9)), "nine texts", 300)


@pytest.fixture(scope="module", params=KINDS, ids=["BERT", "RoBERTa"])
def saved(request, tmp_path_factory):
    """A model with random weights, its preprocessor, and the preset of both."""
    kind, preprocessor = KINDS[request.param]
    preprocessor = preprocessor(trained(request.param), sequence_length=32)
    model = masked_lm_from_size("nano", preprocessor.tokenizer, 0.2, 32)
    folder = tmp_path_factory.mktemp("run") / "preset"
    save_task(model, preprocessor, folder)
    return model, preprocessor, folder, kind


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """The preset of a GPT-2 with random weights."""
    preprocessor = causal_lm.make_preprocessor("", trained(train_byte_pairs), 16)
    folder = tmp_path_factory.mktemp("gpt2") / "preset"
    save_task(causal_lm.make_causal_lm("", "nano", preprocessor, 0.0), preprocessor, folder)
    return str(folder)


def test_a_size_is_a_model_of_the_tokenizers_kind(saved):
    model, preprocessor, _, kind = saved
    assert type(model) is kind and not model.compiled
    config = model.backbone.get_config()
    told = ("vocabulary_size", "num_layers", "num_heads", "hidden_dim", "intermediate_dim", "dropout")
    assert [config[name] for name in told] == [preprocessor.tokenizer.vocabulary_size(), 1, 1, 64, 256, 0.2]
    assert config["max_sequence_length"] == 512
    assert not any("pooled_dense" in variable.path for variable in model.trainable_variables)
    long = masked_lm_from_size("nano", preprocessor.tokenizer, 0.2, 600)
    assert long.backbone.get_config()["max_sequence_length"] == 600


def test_a_preset_gives_the_model_and_its_tokenizer_again(saved):
    model, preprocessor, folder, kind = saved
    again = masked_lm_from_preset(str(folder), dropout=0.1, dtype="mixed_bfloat16")
    assert type(again) is kind and not again.compiled and again.backbone.dropout == 0.1
    assert again.masked_lm_head.compute_dtype == "bfloat16"
    assert_same(again.get_weights(), model.get_weights())
    assert masked_lm_from_preset(str(folder)).backbone.dropout == 0
    assert len(again.trainable_variables) == len(model.trainable_variables)
    plain = kind.from_preset(str(folder))
    assert type(plain.preprocessor) is type(preprocessor) and plain.preprocessor.sequence_length == 32
    for tokenizer in (preset_tokenizer(str(folder)), plain.preprocessor.tokenizer):
        assert type(tokenizer) is type(preprocessor.tokenizer)
        assert list(tokenizer(TEXT)) == list(preprocessor.tokenizer(TEXT))
    with pytest.raises(UserError, match="513 tokens are more than the 512 positions of the preset"):
        masked_lm_from_preset(str(folder), 513)
    for other in (str(folder / "assets"), "no_such_preset"):
        with pytest.raises(ValueError, match=f"^cannot load the preset {other} \\(.*\\). Give a KerasHub name"):
            masked_lm_from_preset(other)


def test_masks_are_filled_in_the_sentence(saved, capsys):
    """The likeliest tokens by KerasHub's own head, for two masks of which each shows the other."""
    model, preprocessor, folder, _ = saved
    tokenizer = preprocessor.tokenizer
    first, second = fill_mask(model, tokenizer, "Some [MASK], and the same [MASK].", top=300)
    for guesses in (first, second):
        assert sum(guess["score"] for guess in guesses) == pytest.approx(1, abs=1e-4)
        assert [guess["score"] for guess in guesses] == sorted((g["score"] for g in guesses), reverse=True)
        assert all(guess["token_str"] == tokenizer.detokenize([guess["token"]]) for guess in guesses)
    word = "words" if tokenizer.mask_token == "[MASK]" else " words"
    told = [next(g["sequence"] for g in guesses if g["token_str"] == word) for guesses in (first, second)]
    mask = tokenizer.mask_token
    assert told == [f"Some words, and the same {mask}.", f"Some {mask}, and the same words."]
    piece = next((g for g in first if g["token_str"].startswith("##")), {"sequence": "Some", "token_str": "##"})
    assert piece["sequence"].startswith("Some" + piece["token_str"][2:])
    ids = [tokenizer.start_token_id, *tokenizer("Some"), tokenizer.mask_token_id, *tokenizer(" words.")]
    row = np.array([[*ids, tokenizer.end_token_id]])
    inputs = {"token_ids": row, "segment_ids": 0 * row, "padding_mask": 1 + 0 * row}
    inputs["mask_positions"] = np.array([[ids.index(tokenizer.mask_token_id)]])
    logits = np.array(model({name: inputs[name] for name in model.input}))[0, 0]
    ((best,),) = fill_mask(model, tokenizer, f"Some {mask} words.", top=1)
    assert best["token"] == logits.argmax()
    for sentence, why in (("Some words.", "^no .* in 'Some words.'; put one"), ("[MASK]" * 600, "has 602 tokens")):
        with pytest.raises(ValueError, match=why):
            fill_mask(model, tokenizer, sentence)
    print_filled_masks(str(folder), ["A [MASK]."])
    assert capsys.readouterr().out.count("    0.0") == 5


def test_without_room_on_the_disk_nothing_is_written(saved, tmp_path, monkeypatch):
    model, preprocessor, *_ = saved
    size = sum(4 * weight.size for weight in model.get_weights())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=size + 2**20 - 1))
    with pytest.raises(OSError) as error:
        save_task(model, preprocessor, tmp_path / "preset")
    assert error.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=size + 2**20))
    with monkeypatch.context() as patch:
        patch.setenv("TF_CONFIG", json.dumps(worker_config(["a:1", "b:1"], 1)))
        save_task(model, preprocessor, tmp_path / "preset")
    assert not list(tmp_path.iterdir())  # it is not the chief
    save_task(model, preprocessor, tmp_path / "preset")
    assert (tmp_path / "preset/task.weights.h5").is_file()


def test_slips_with_presets_are_named(saved, tmp_path, capsys):
    folder = saved[2]
    (folder.parent / "config.json").write_text("{}")
    for load in (masked_lm_from_preset, preset_tokenizer, load_json, lambda given: check_model(given, None, 32)):
        with pytest.raises(UserError, match=f"{folder.parent} is the folder of a run: give {folder}$"):
            load(str(folder.parent))
    shutil.copytree(folder, tmp_path / "preset")
    (tmp_path / "preset/task.weights.h5").unlink()
    masked_lm_from_preset(str(tmp_path / "preset"))
    assert "has no task.weights.h5: the head begins with random weights" in capsys.readouterr().err
    for name in ("model.weights.h5", "config.json"):
        (tmp_path / "preset" / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
        with pytest.raises(UserError, match=f"{name} is a pointer of Git LFS, not the file: run `git lfs pull`"):
            masked_lm_from_preset(str(tmp_path / "preset"))
        shutil.copy(folder / name, tmp_path / "preset")


def test_positions_begin_as_sinusoids(saved, gpt2):
    table = sinusoids(40, 6)
    for place, column, value in [(7, 0, np.sin(7)), (7, 3, np.cos(7)), (7, 1, np.sin(7 / 10_000 ** (1 / 3)))]:
        assert table[place, column] == pytest.approx(value)
    for model in (saved[0], models.GPT2CausalLM.from_preset(gpt2)):
        (positions,) = [v for v in model.weights if v.path.endswith("position_embedding/embeddings")]
        np.testing.assert_allclose(positions, 0.14 * sinusoids(512, 64), atol=1e-6)


def test_a_size_or_a_preset_is_checked_without_loading_it(saved, tmp_path):
    preset = str(saved[2])
    check_model(preset, None, 512)
    check_model("", "gpt2-xl", 5000)
    assert list(dimensions("gpt2-xl").values()) == [48, 25, 1600, 6400]
    own, odd, other = (tmp_path / name for name in ("own.json", "odd.json", "config.json"))
    sizes = {"num_layers": 3, "num_heads": 2, "hidden_dim": 10, "intermediate_dim": 7}
    own.write_text(json.dumps(sizes))
    assert dimensions(str(own)) == sizes
    odd.write_text(json.dumps(sizes | {"num_heads": 3}))
    other.write_text('{"config": {}, "model_type": "vit"}')
    for arguments, why in (
        (("", "tiny", 32, 8), "adapters need a preset: name one, or leave out the rank"),
        ((preset, "tiny", 32), "brings its own model: leave out the size tiny"),
        ((preset, None, 513), "513 tokens are more than the 512 positions of the preset"),
        ((str(tmp_path), None, 32), r"is no preset of a language model \(.*max_pos.*\); give a folder"),
        (("", "huge", 32), "the size huge is neither nano, .*, nor a JSON file"),
        (("", str(odd), 32), "hidden_dim a multiple of num_heads"),
        (("", str(other), 32), "must have exactly num_layers"),
    ):
        with pytest.raises(ValueError, match=why) as error:
            check_model(*arguments)
        assert "--" not in str(error.value) and "\n" not in str(error.value)


def test_a_causal_model_has_the_vocabulary_with_gpt2s_end(gpt2):
    tokenizer = trained(train_byte_pairs)
    own = causal_lm.make_preprocessor("", tokenizer, 16).tokenizer
    assert type(own) is models.GPT2Tokenizer and own.end_token_id == tokenizer.end_token_id
    assert list(own(TEXT)) == list(tokenizer(TEXT)) and own.vocabulary_size() == tokenizer.vocabulary_size()
    assert causal_lm.make_preprocessor(gpt2, tokenizer, 24).sequence_length == 24
    with pytest.raises(ValueError, match="has another vocabulary than the data"):
        causal_lm.make_preprocessor(gpt2, train_byte_pairs(lambda: iter(["none"]), "another", 270), 16)
    with pytest.raises(ValueError, match="needs byte pairs; this vocabulary is a BertTokenizer"):
        causal_lm.make_preprocessor("", trained(train_wordpieces), 16)
    with pytest.raises(ValueError, match="513 tokens are more than the 512 positions of the preset"):
        causal_lm.make_causal_lm(gpt2, "", causal_lm.make_preprocessor(gpt2, None, 513), 0.0)
    longer = models.GPT2Tokenizer({**own.vocabulary, "one more": own.vocabulary_size()}, own.merges)
    with pytest.raises(ValueError, match="the files of the preset .* do not belong together: its tokenizer has"):
        causal_lm.make_causal_lm(gpt2, "", models.GPT2CausalLMPreprocessor(longer, sequence_length=16), 0.0)


def test_adapters_alone_are_trained_saved_and_merged(gpt2, tmp_path):
    preprocessor = causal_lm.make_preprocessor(gpt2, None, 16)
    model = causal_lm.make_causal_lm(gpt2, "", preprocessor, 0.1, lora_rank=2)
    assert type(model) is models.GPT2CausalLM and not model.compiled and model.backbone.dropout == 0.1
    assert {v.name for v in model.trainable_variables} == {"lora_kernel_a", "lora_kernel_b"}
    for variable in model.trainable_variables:
        variable.assign(keras.random.normal(variable.shape, seed=1))
    save_task(model, preprocessor, tmp_path / "preset")
    ids = {"token_ids": np.arange(8)[None], "padding_mask": np.ones([1, 8])}
    adapted = models.GPT2CausalLM.from_preset(gpt2, compile=False)
    before = np.array(adapted(ids))
    adapted.backbone.load_lora_weights(str(tmp_path / "preset" / ADAPTERS))
    for other in (adapted, models.GPT2CausalLM.from_preset(str(tmp_path / "preset"), compile=False)):
        np.testing.assert_allclose(model(ids), other(ids), atol=1e-5)
    assert np.abs(before - model(ids)).max() > 0.1


def test_a_text_is_continued_the_same_way_each_time(gpt2, tmp_path, capsys):
    model, prompts = causal_lm_for_generation(gpt2), ["Some", "the same words"]
    sampler = make_sampler("top-p", temperature=2.0, seed=3)
    together = list(continuations(model, prompts, sampler, tokens=3))
    assert together == [next(continuations(model, [prompt], sampler, tokens=3)) for prompt in prompts]
    assert all(text.startswith(prompt) for text, prompt in zip(together, prompts, strict=True))
    assert together != list(continuations(model, prompts, make_sampler("top-p", temperature=2.0, seed=4), tokens=3))
    assert next(continuations(model, prompts, sampler, tokens=1)) != prompts[0]
    print_continuations(gpt2, ["Some", TEXT * 9])
    assert "tokens or more: it may have 1 to 15" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(ValueError, match="top-k has k=999, but the vocabulary has"):
        next(continuations(model, prompts, make_sampler(k=999)))
    for wrong in ({"k": 0}, {"p": 1.5}, {"temperature": 0.0}, {"seed": -1}, {"name": "best"}):
        with pytest.raises(ValueError, match="must be|or more"):
            make_sampler(**wrong)
    model.backbone.layers[-1].set_weights([np.full(64, np.nan)] * 2)
    with pytest.raises(ValueError, match="the model has diverged"):
        next(continuations(model, prompts, sampler))


def data(preprocessor, classes=("a", "b"), labels=(0, 1)):
    texts = LabelledTexts([*classes], {"train": Examples([("one", "another")] * 2, [*labels], [])})
    return SimpleNamespace(preprocessor=preprocessor, texts=texts)


def test_a_classifier_begins_at_the_mean_with_a_new_head(saved, gpt2, tmp_path, monkeypatch):
    model, _, preset, kind = saved
    preprocessor = classifier.make_preprocessor(str(preset), None, 16)
    regressor = classifier.make_classifier(str(preset), "", data(preprocessor, [], [2.0, 3.0]), dropout=0.3)
    assert type(regressor).__name__ == kind.__name__.replace("MaskedLM", "TextClassifier") and not regressor.compiled
    assert regressor.backbone.dropout == regressor.dropout == 0.3
    assert_same(regressor.backbone.get_weights(), model.backbone.get_weights())
    assert np.array(regressor(preprocessor([TEXT]))).item() == pytest.approx(2.5, abs=1)
    adapted = classifier.make_classifier(str(preset), "", data(preprocessor, ["a", "b", "c"]), lora_rank=2)
    trained_layers = {v.path.split("/")[-2 if "dense" in v.path else -1] for v in adapted.trainable_variables}
    assert trained_layers <= {"lora_kernel_a", "lora_kernel_b", "pooled_dense", "kernel", "bias"}
    assert len(adapted.trainable_variables) == 8  # two adapters; the pooler and the head, with their biases
    classifier.save_classifier(adapted, data(None, ["a", "b", "c"]).texts, tmp_path / "preset")
    assert json.loads((tmp_path / "preset/labels.json").read_text()) == {"classes": ["a", "b", "c"], "texts": 2}
    again = models.TextClassifier.from_preset(str(tmp_path / "preset"))
    np.testing.assert_allclose(again(preprocessor([TEXT])), adapted(preprocessor([TEXT])), atol=1e-5)
    (tmp_path / "preset/config.json").write_text('{"model_type": "bert"}')
    monkeypatch.chdir(tmp_path / "preset")  # without a preset, the current folder is none
    own = classifier.make_preprocessor("", trained(train_wordpieces), 16)
    assert type(classifier.make_classifier("", "nano", data(own))) is models.BertTextClassifier
    with pytest.raises(ValueError, match="^cannot load the preset .* find a subclass of TextClassifier"):
        classifier.make_preprocessor(gpt2, None, 16)
    with pytest.raises(ValueError, match="600 tokens are more than the 512 positions"):
        classifier.make_classifier(str(preset), "", data(classifier.make_preprocessor(str(preset), None, 600)))
