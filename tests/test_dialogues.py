import json

import keras_hub
import numpy as np
import pytest

from common.data.byte_pairs import train_byte_pairs
from common.data.dialogues import (
    CHAT_FORMS,
    PLAIN,
    _dialogues,
    answer_rows,
    chat_form,
    is_dialogues,
    marked_ids,
    read_dialogues,
    said_in,
)
from common.data.vocabulary import encode
from keras_replicas import UserError


def said(*pairs):
    """A dialogue of (role, text)."""
    return [(role, text, role in ("response", "assistant")) for role, text in pairs]


CHAT = said(("system", "Be brief."), ("user", "Who?"), ("assistant", "Me."), ("user", "Why?"), ("assistant", "So."))
SAID = said(("system", "Be kind."), ("user", "Who are you?"), ("assistant", "A model."))
SAID += said(("user", "Bye."), ("assistant", "Bye!"))
PROMPT = said(("prompt", "1 + 1 = "), ("response", "2"))


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_pairs(lambda: iter([text for _, text, _ in SAID + PROMPT]), "said", 300)


def with_tokens(tokens):
    words = {"<|endoftext|>": 0, "t": 1, "h": 2, "th": 3} | {token: 4 + i for i, token in enumerate(tokens)}
    return keras_hub.models.GPT2Tokenizer(words, ["t h"])


def text_of(tokenizer, ids):
    return tokenizer.detokenize(ids.tolist())


def row_of(rows, example=0):
    ids, is_token, is_label = (part.numpy()[0] for part in rows.read(np.array([example])))
    return ids[is_token], is_label[is_token]


def test_a_row_is_a_dialogue_with_labels_on_the_answers_alone(tokenizer):
    both = {"train": [SAID, PROMPT], "validation": [PROMPT]}
    rows = answer_rows(both, tokenizer, 200)
    ids, is_label = row_of(rows["train"])
    told = "system: Be kind.\nuser: Who are you?\nassistant: A model.\nuser: Bye.\nassistant: Bye!\n"
    assert text_of(tokenizer, ids) == f"<s>{told}</s>"
    assert text_of(tokenizer, ids[is_label]) == "A model.\nBye!\n</s>"  # where each ends is learned, too
    ids, is_label = row_of(rows["train"], 1)
    assert text_of(tokenizer, ids) == "<s>1 + 1 = 2</s>" and text_of(tokenizer, ids[is_label]) == "2</s>"
    assert answer_rows(both, tokenizer, 9)["train"].length == 9
    words = {**tokenizer.vocabulary, "<start_of_turn>": 300, "<end_of_turn>": 301, "<|endoftext|>": 302}
    gemma = keras_hub.models.GPT2Tokenizer(words, tokenizer.merges)
    told = "<start_of_turn>model\nA model.<end_of_turn>\n<start_of_turn>user\nBye.<end_of_turn>\n"
    assert told in text_of(gemma, row_of(answer_rows(both, gemma, 200)["train"])[0])


def test_after_a_question_nothing_is_learned_nor_an_answer_without_weight(tokenizer, tmp_path):
    texts = [("user", "Who are you?"), ("assistant", "A dog."), ("assistant", "A model."), ("user", "Bye.")]
    messages = [{"role": role, "content": text, "weight": int(text != "A dog.")} for role, text in texts]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": messages}))
    ids, is_label = row_of(answer_rows(read_dialogues(str(tmp_path)), tokenizer, 200)["train"])
    assert text_of(tokenizer, ids).endswith("user: Bye.\n</s>")
    assert text_of(tokenizer, ids[is_label]) == "A model.\n"


def test_keys_that_are_not_read_are_told_or_refused(tmp_path, capsys):
    file, line = tmp_path / "all.jsonl", {"prompt": "a", "response": "b", "id": 7}
    message = {"role": "assistant", "content": "b"}
    file.write_text(f"{json.dumps(line)}\n" * 20 + json.dumps({"messages": [message | {"name": "Eve"}], "id": 8}))
    assert [*_dialogues(file)][0] == said(("prompt", "a"), ("response", "b"))
    assert capsys.readouterr().out == f"{file}, line 1: id is not read\n{file}, line 21: name is not read\n"
    for keys, wrong in (
        ("system", {"system": "Be kind."}),
        ("chosen, rejected", {"rejected": "c", "chosen": "b"}),
        ("tool_calls", {"messages": [message | {"tool_calls": []}]}),
    ):
        file.write_text(json.dumps(line | wrong))
        with pytest.raises(UserError, match=f"line 1 has {keys}, which is not read"):
            [*_dialogues(file)]


def test_the_form_is_the_one_that_the_tokenizer_has_tokens_for(tokenizer):
    gemma, chat_ml = ["<start_of_turn>", "<end_of_turn>"], ["<|im_start|>", "<|im_end|>"]
    llama = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    found = [chat_form(with_tokens(tokens)) for tokens in (gemma, chat_ml, llama, gemma[:1])]
    assert found == [*CHAT_FORMS, PLAIN] and chat_form(tokenizer) == PLAIN
    marked = marked_ids("<|im_start|>th<|im_end|>", with_tokens(chat_ml))
    assert marked.tolist() == [4, 3, 5] and marked.dtype == np.int32


def test_a_long_dialogue_is_cut_and_without_a_label_left_out(tokenizer, capsys):
    long = said(("prompt", "Who are you? " * 20), ("response", "A model."))
    start = next(encode(["1 + 1 = "], tokenizer))
    rows = answer_rows({"train": [long, PROMPT], "validation": [PROMPT]}, tokenizer, len(start) + 2)
    told, cut, *_ = capsys.readouterr().out.splitlines()
    assert told == "train: 1 of 2 prompts leave no room for an answer, and are dropped"
    assert cut.startswith("train: 1 of 1 texts are cut to 8 tokens (median 9, ")
    ids, is_label = row_of(rows["train"])
    assert text_of(tokenizer, ids[is_label]) == "2" and len(rows["train"]) == 1
    with pytest.raises(UserError, match="train: no prompt leaves room for an answer in 19 tokens: take longer"):
        answer_rows({"train": [long], "validation": [PROMPT]}, tokenizer, 20)


def test_files_are_read_and_held_out(tmp_path, monkeypatch):
    lines = [{"prompt": f"{i}?", "response": f"{i}!"} for i in range(100)]
    chat = {"messages": [{"role": role, "content": text} for role, text, _ in CHAT]}
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, chat]))
    splits = read_dialogues(str(file))
    assert sum(map(len, splits.values())) == 101 and 3 < len(splits["validation"]) < 25
    assert CHAT in [*splits["train"], *splits["validation"]]
    assert next(said_in(splits["train"])) == splits["train"][0][0][1]
    for name in ("train", "validation", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(chat))
    assert read_dialogues(str(tmp_path)) == {"train": [CHAT], "validation": [CHAT], "test": [CHAT]}
    monkeypatch.chdir(tmp_path)
    assert is_dialogues(".") and is_dialogues("my.jsonl") and not is_dialogues("") and not is_dialogues("gs://b/shards")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ('{"prompt": "a"}', "must have a prompt and a response, or messages, each with a role (system, user, "),
        ('{"prompt": "a", "response": 5}', 'texts, one of them an answer; it has {"prompt": "a", "response": 5}'),
        ('{"messages": [{"role": "robot", "content": "a"}, {"role": "assistant", "content": "b"}]}', "must have"),
        (f'{{"messages": [{{"role": "{"robot " * 99}", "content": "a"}}]}}', "robot robot ..."),
        ('{"messages": [{"role": "user", "content": "a"}]}', "must have"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": [1]}]}', "must have"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, answer):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n' + line + "\n")
    with pytest.raises(ValueError, match="bad.jsonl, line 2") as error:
        read_dialogues(str(file))
    assert answer in str(error.value) and len(str(error.value)) < 400


def test_too_few_and_missing_files(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "response": "b"}')
    with pytest.raises(ValueError, match="too few dialogues: none is left for (train|validation)$"):
        read_dialogues(str(tmp_path / "one.jsonl"))
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "response": "b"}')
    with pytest.raises(ValueError, match="cannot read .*validation.jsonl: No such file"):
        read_dialogues(str(tmp_path))
