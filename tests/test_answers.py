"""Prompts with answers: what is read of `.jsonl` files, and what a model is given of it."""

import json
from types import SimpleNamespace

import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from common.data.answers import Answers, chat_form, encode
from common.data.byte_pairs import train_byte_pairs
from common.data.dialogues import check_texts, is_dialogues, read_dialogues, said_in
from common.data.packed_text import beginnings, fingerprint, separators
from common.data.sharded_text import find_text_shards
from common.model import backbones
from common.model.causal_lm import make_preprocessor
from common.model.generate import make_sampler
from common.model.sizes import check_model
from common.training.scaling import Scaled
from keras_replicas.errors import UserError
from recipes import causal_lm

CHAT = [("system", "Be brief."), ("user", "Who?"), ("assistant", "Me."), ("user", "Why?"), ("assistant", "So.")]


def documents():
    return iter(["Who is it? It is me, and why it is so nobody asks. Be brief."] * 9)


@pytest.fixture(scope="module")
def gpt2():
    return make_preprocessor("", train_byte_pairs(documents, 300), 64).tokenizer


def with_tokens(tokenizer, *tokens):
    """The tokenizer of another family, whose vocabulary has these too."""
    vocabulary = tokenizer.vocabulary | {token: len(tokenizer.vocabulary) + i for i, token in enumerate(tokens)}
    return keras_hub.models.QwenTokenizer(vocabulary, tokenizer.merges)


def told(encoded, tokenizer):
    """The tokens of the first dialogue, and which of them are labels, as text."""
    length = encoded.lengths[0]
    tokens = [tokenizer.id_to_token(int(i)) for i in encoded.ids[0, :length]]
    text = "".join(f"[{t}]" if label else t for t, label in zip(tokens, encoded.is_label[0, :length], strict=True))
    return text.replace("][", "").replace("Ġ", " ").replace("Ċ", "\n")


def test_a_prompt_and_its_response_stand_as_they_are(gpt2):
    dialogue = [("prompt", "Who is it? "), ("response", "It is me")]
    assert told(encode([dialogue], gpt2, 65), gpt2) == "<|endoftext|>Who is it? [It is me<|endoftext|>]"


def test_a_start_token_of_its_own_begins_a_dialogue(gpt2):
    gemma = with_tokens(gpt2, "<bos>")
    gemma.start_token_id = gemma.token_to_id("<bos>")
    shown = told(encode([[("prompt", "Who? "), ("response", "Me")]], gemma, 65), gemma)
    assert shown == "<bos>Who? [Me<|endoftext|>]"
    gemma.start_token_id = None
    shown = told(encode([[("prompt", "Who? "), ("response", "Me")]], gemma, 65), gemma)
    assert shown == "Who? [Me<|endoftext|>]"


def test_messages_have_the_speakers_names_where_the_tokenizer_has_no_form(gpt2):
    assert told(encode([CHAT], gpt2, 200), gpt2) == (
        "<|endoftext|>system: Be brief.\nuser: Who?\nassistant: [Me.\n]user: Why?\nassistant: [So.\n<|endoftext|>]"
    )


def test_messages_have_the_tokenizers_own_form(gpt2):
    chat_ml = with_tokens(gpt2, "<|im_start|>", "<|im_end|>")
    assert told(encode([CHAT[1:3]], chat_ml, 65), chat_ml) == (
        "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n[Me.<|im_end|>\n<|endoftext|>]"
    )
    gemma = with_tokens(gpt2, "<start_of_turn>", "<end_of_turn>")
    assert told(encode([CHAT[1:3]], gemma, 65), gemma) == (
        "<start_of_turn>user\nWho?<end_of_turn>\n<start_of_turn>model\n[Me.<end_of_turn>\n<|endoftext|>]"
    )
    llama = with_tokens(gpt2, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    assert chat_form(llama) == ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")
    assert chat_form(with_tokens(gpt2, "<|im_start|>")) == chat_form(gpt2)  # a part of a form is none


def test_what_is_too_long_is_cut_and_left_out_without_an_answer(gpt2, capsys):
    long, short = ([("prompt", "why " * n), ("response", "so")] for n in (60, 2))
    preprocessor = SimpleNamespace(tokenizer=gpt2, sequence_length=8)
    data = Answers.of({"train": [long, short], "validation": [short]}, preprocessor)
    assert data.sizes() == {"train": 1, "validation": 1} and data.splits["train"].ids.shape[1] <= 9
    assert capsys.readouterr().out == "train: 1 of 2 prompts leave no room for an answer, and are left out\n"
    with pytest.raises(UserError, match="train: no prompt leaves room for an answer in --seq-length 8. Give more"):
        Answers.of({"train": [long], "validation": [short]}, preprocessor)
    assert data.prompts(1) == ["why why "]


@pytest.mark.parametrize("length", [3, 8, 20])
def test_prompts_leave_room_for_a_model_to_add_to_them(gpt2, length):
    preprocessor = SimpleNamespace(tokenizer=gpt2, sequence_length=length)
    full = "why " * length
    while len(gpt2(full)) >= length:  # the answer's first token is the last one of the sequence
        full = full[:-1]
    dialogues = [[("prompt", prompt), ("response", "so")] for prompt in (full, "")]
    data = Answers.of({"train": dialogues, "validation": dialogues}, preprocessor)
    row = np.array([gpt2.end_token_id, *gpt2("why " * 30)])
    for prompts in (data.prompts(), beginnings(row, preprocessor, 3)):
        (prompt,) = prompts  # the empty one is left out
        assert full.startswith(prompt) and 1 <= len(gpt2(prompt)) <= max(1, length // 2)


def test_prompts_are_the_beginnings_of_documents_up_to_their_ends(gpt2):
    preprocessor, end = SimpleNamespace(tokenizer=gpt2, sequence_length=32), gpt2.end_token_id
    parts = [gpt2(text) for text in ("So.", "", "why 語 so", "Be brief.", "Who?")]
    row = np.array([end, *(token for ids in parts for token in [*ids, end])])
    first, second, third = beginnings(row, preprocessor, 3)  # the empty document is none
    assert (first, second) == ("So.", "why ") and "Be brief.".startswith(third)  # 語 has three tokens: it is not cut


@pytest.mark.parametrize("few_lengths", [False, True])
def test_rows_are_each_dialogue_once_and_padded_little(gpt2, few_lengths):
    dialogues = [[("prompt", "why " * (i % 17)), ("response", f"so {i}")] for i in range(37)]
    preprocessor = SimpleNamespace(tokenizer=gpt2, sequence_length=64)
    data = Answers.of({"train": dialogues, "validation": dialogues}, preprocessor, few_lengths)
    steps = data.steps("train", 8)
    whole = list(data.rows("train", Scaled(8, 8), seed=1).take(2 * steps))
    assert len({row.shape[1] for row, _, _ in whole}) > 1 or few_lengths
    for epoch in (whole[:steps], whole[steps:]):
        said = sorted(
            tuple(row[token].tolist())
            for rows, tokens, _ in epoch
            for row, token in zip(rows.numpy(), tokens.numpy(), strict=True)
            if token.any()
        )
        part = data.splits["train"]
        assert said == sorted(tuple(row[:n].tolist()) for row, n in zip(part.ids, part.lengths, strict=True))
    halves = [list(data.rows("train", Scaled(4, 8), 1, first_step=3, num_shards=2, shard=i).take(4)) for i in (0, 1)]
    for (ids, *_), *parts in zip(whole[3:], *halves, strict=False):
        assert sorted(map(tuple, np.concatenate([part[0] for part in parts]).tolist())) == sorted(
            map(tuple, ids.numpy().tolist())
        )
    for ids, is_token, is_label in data.rows("validation", Scaled(8, 8), None):
        assert (ids.shape[1] - 1) % (32 if few_lengths else 4) == 0 or ids.shape[1] == part.ids.shape[1]
        assert not tf.reduce_any(is_label & ~is_token)


@pytest.mark.parametrize(
    "settings", ["null", '"x"', '{"config": []}', '{"config": {"max_sequence_length": null, "vocabulary_size": 5}}']
)
def test_a_folder_with_another_config_is_no_preset(tmp_path, settings):
    (tmp_path / "config.json").write_text(settings)
    with pytest.raises(UserError, match="is not a preset of a language model; give a folder made by save_to_preset"):
        check_model(str(tmp_path), None, 32)


def test_data_inside_the_work_directory_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    file = tmp_path / "data/train.jsonl"
    file.write_text("")
    for data in (tmp_path / "data", file):
        with pytest.raises(UserError, match="is inside the work directory"):
            causal_lm.Config(workdir=str(tmp_path), data=str(data))


def test_a_preset_that_is_no_transformer_is_refused(monkeypatch):
    monkeypatch.setattr(backbones, "from_preset", lambda *_, **__: SimpleNamespace(hidden_size=8))
    with pytest.raises(UserError, match="the preset rwkv7 has a SimpleNamespace: give one of a plain transformer"):
        backbones.model_width("rwkv7", "tiny")


def test_what_else_a_split_and_a_tokenizer_are_told_by(gpt2):
    preprocessor = SimpleNamespace(tokenizer=gpt2, sequence_length=64)
    one, other = (
        Answers.of(dict.fromkeys(("train", "validation"), [[("prompt", a), ("response", b)]]), preprocessor)
        for a, b in (("so", " why"), ("", "so why"))
    )
    np.testing.assert_array_equal(one.splits["train"].ids, other.splits["train"].ids)
    assert one.checksums() != other.checksums()  # the labels differ
    assert fingerprint(gpt2) != fingerprint(keras_hub.models.QwenTokenizer(gpt2.vocabulary, gpt2.merges))
    assert separators(SimpleNamespace(start_token_id=2, end_token_id=3)) == [3, 2]
    assert (
        separators(SimpleNamespace(start_token_id=None, end_token_id=3))
        == [3]
        == separators(SimpleNamespace(start_token_id=3, end_token_id=3))
    )


@pytest.mark.parametrize("name", ["top-k", "top-p", "random"])
def test_a_sampler_has_its_seed_and_temperature(name):
    sampler = make_sampler(name, temperature=0.5, seed=7)
    assert (sampler.seed, sampler.temperature) == (7, 0.5)


def test_other_bad_data(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        check_texts("nothing.jsonl", "docstrings", "runs/x")
    with pytest.raises(UserError, match="--data brings its own text: leave out --corpus, or --data"):
        check_texts("my.jsonl", "wikitext-2", "runs/x")
    (tmp_path / "text.csv").write_text("a")
    with pytest.raises(UserError, match=r"text.csv is neither a folder of shards nor a .jsonl file"):
        find_text_shards(str(tmp_path / "text.csv"), 32)
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "response": "b"}')
    with pytest.raises(UserError, match="too few dialogues: none is left for (train|validation)$"):
        read_dialogues(str(tmp_path / "one.jsonl"))
