"""A model from a size or a preset, of either architecture, and what is saved of it."""

import errno
import shutil

import keras_hub
import numpy as np
import pytest

from common.data.byte_pairs import train_byte_pairs
from common.data.wordpiece import train_wordpieces
from common.model.backbones import model_width, sinusoids
from common.model.masked_lm import masked_lm_from_preset, masked_lm_from_size, preset_vocabulary
from common.model.saving import save_preset

KINDS = {
    train_wordpieces: (keras_hub.models.BertMaskedLM, keras_hub.models.BertMaskedLMPreprocessor),
    train_byte_pairs: (keras_hub.models.RobertaMaskedLM, keras_hub.models.RobertaMaskedLMPreprocessor),
}


def documents():
    return ["Some words, and some more of the same words." for _ in range(9)]


@pytest.fixture(scope="module", params=KINDS, ids=["BERT", "RoBERTa"])
def saved(request, tmp_path_factory):
    """A model with random weights, its vocabulary, and the preset of both."""
    vocabulary = request.param(documents, 300)
    model = masked_lm_from_size("nano", vocabulary, 0.2, 32)
    folder = tmp_path_factory.mktemp("run") / "preset"
    save_preset(model, vocabulary, 32, folder)
    return model, vocabulary, folder, *KINDS[request.param]


def test_a_size_is_a_model_of_the_vocabularys_kind(saved):
    model, vocabulary, _, kind, _ = saved
    assert isinstance(model, kind) and not model.compiled
    config = model.backbone.get_config()
    told = ("vocabulary_size", "num_layers", "num_heads", "hidden_dim", "intermediate_dim", "dropout")
    assert [config[name] for name in told] == [len(vocabulary.pieces), 1, 1, 64, 256, 0.2]
    assert config["max_sequence_length"] == 512
    assert not any("pooled_dense" in variable.path for variable in model.trainable_variables)
    long = masked_lm_from_size("nano", vocabulary, 0.2, 600)
    assert long.backbone.get_config()["max_sequence_length"] == 600


def test_a_preset_gives_the_model_and_its_vocabulary_again(saved):
    model, vocabulary, folder, kind, preprocessor = saved
    again = masked_lm_from_preset(str(folder), dropout=0.1)
    assert isinstance(again, kind) and again.backbone.dropout == 0.1
    assert masked_lm_from_preset(str(folder)).backbone.dropout == 0
    for mine, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert len(again.trainable_variables) == len(model.trainable_variables)
    assert preset_vocabulary(str(folder)) == vocabulary
    assert model_width(str(folder), "large") == 64 and model_width("", "large") == 1024
    plain = kind.from_preset(str(folder))
    assert isinstance(plain.preprocessor, preprocessor) and plain.preprocessor.sequence_length == 32
    ids = plain.preprocessor.tokenizer("some of the words")
    assert list(ids) == vocabulary.tokenizer().encode("some of the words", add_special_tokens=False).ids


def test_without_room_on_the_disk_nothing_is_written(saved, tmp_path, monkeypatch):
    model, vocabulary, *_ = saved
    size = sum(4 * weight.size for weight in model.get_weights())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=size + 2**20 - 1))
    with pytest.raises(OSError) as error:
        save_preset(model, vocabulary, 32, tmp_path / "preset")
    assert error.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=size + 2**20))
    save_preset(model, vocabulary, 32, tmp_path / "preset")


def test_positions_begin_as_sinusoids():
    """By the formula; and from each position to the next, by one rotation, which is what they are there for."""
    table = sinusoids(40, 6)
    for place, column, value in [(7, 0, np.sin(7)), (7, 3, np.cos(7)), (7, 1, np.sin(7 / 10_000 ** (1 / 3)))]:
        assert table[place, column] == pytest.approx(value)
    rotation, *_ = np.linalg.lstsq(table[:-1], table[1:], rcond=None)
    np.testing.assert_allclose(table[:-1] @ rotation, table[1:], atol=1e-9)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(6), atol=1e-9)
    for train in KINDS:
        model = masked_lm_from_size("nano", train(documents, 300), 0.2, 32)
        (positions,) = [v for v in model.weights if v.path.endswith("position_embedding/embeddings")]
        np.testing.assert_allclose(positions, 0.14 * sinusoids(512, 64), atol=1e-6)
