import keras_hub
import numpy as np
import pytest

from common.data.answers import CHAT_FORMS, PLAIN, answer_rows, chat_form, marked_ids
from common.data.byte_pairs import train_byte_pairs
from common.data.vocabulary import encode
from keras_replicas import UserError

SAID = [("system", "Be kind."), ("user", "Who are you?"), ("assistant", "A model.")]
SAID += [("user", "Bye."), ("assistant", "Bye!")]
PROMPT = [("prompt", "1 + 1 = "), ("response", "2")]


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_pairs(lambda: iter([text for _, text in SAID + PROMPT]), "said", 300)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def with_tokens(tokens):
    """A byte-pair tokenizer that has these tokens, too."""
    words = {"<|endoftext|>": 0, "t": 1, "h": 2, "th": 3} | {token: 4 + i for i, token in enumerate(tokens)}
    return keras_hub.models.GPT2Tokenizer(words, ["t h"])


def text_of(tokenizer, ids):
    return tokenizer.detokenize(ids.tolist())


def row_of(rows, example=0):
    ids, is_token, is_label = (part.numpy()[0] for part in rows.read(np.array([example])))
    return ids[is_token], is_label[is_token]


def test_a_row_is_a_dialogue_with_labels_on_the_answers_alone(tokenizer):
    rows = answer_rows({"train": [SAID, PROMPT], "validation": [PROMPT]}, tokenizer, 200)
    ids, is_label = row_of(rows["train"])
    told = "system: Be kind.\nuser: Who are you?\nassistant: A model.\nuser: Bye.\nassistant: Bye!\n"
    assert text_of(tokenizer, ids) == f"<s>{told}</s>"
    assert text_of(tokenizer, ids[is_label]) == "A model.\nBye!\n</s>"  # where each ends is learned, too
    ids, is_label = row_of(rows["train"], 1)
    assert text_of(tokenizer, ids) == "<s>1 + 1 = 2</s>" and text_of(tokenizer, ids[is_label]) == "2</s>"
    assert len(rows["train"]) == 2 and len(rows["validation"]) == 1


def test_the_form_is_the_one_that_the_tokenizer_has_tokens_for(tokenizer):
    gemma, chat_ml, llama = (
        ["<start_of_turn>", "<end_of_turn>"],
        ["<|im_start|>", "<|im_end|>"],
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    )
    found = [chat_form(with_tokens(tokens)) for tokens in (gemma, chat_ml, llama, gemma[:1])]
    assert found == [*CHAT_FORMS, PLAIN] and chat_form(tokenizer) == PLAIN
    marked = marked_ids("<|im_start|>th<|im_end|>", with_tokens(chat_ml))
    assert marked.tolist() == [4, 3, 5] and marked.dtype == np.int32


def test_a_long_dialogue_is_cut_and_without_a_label_left_out(tokenizer, capsys):
    long = [("prompt", "Who are you? " * 20), ("response", "A model.")]
    start = next(encode(["1 + 1 = "], tokenizer))
    rows = answer_rows({"train": [long, PROMPT], "validation": [PROMPT]}, tokenizer, len(start) + 2)
    assert capsys.readouterr().out == "train: 1 of 2 prompts leave no room for an answer, and are left out\n"
    ids, is_label = row_of(rows["train"])
    assert text_of(tokenizer, ids[is_label]) == "2" and len(rows["train"]) == 1
    with pytest.raises(UserError, match="train: no prompt leaves room for an answer in 19 tokens: take longer rows"):
        answer_rows({"train": [long], "validation": [PROMPT]}, tokenizer, 20)


def test_a_hundred_shards_end(tokenizer, monkeypatch):
    """Rows that are a list fill one shard after the other, and not each anew."""
    monkeypatch.setattr("common.data.rows.SHARD_BYTES", 16 + 4 * 21)
    rows = answer_rows({"train": [PROMPT] * 100, "validation": [PROMPT]}, tokenizer, 20)
    assert len(rows["train"]) == 100
