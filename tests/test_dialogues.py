"""Prompts with answers: what is read of `.jsonl` files."""

import json

import pytest

from common.data.dialogues import is_dialogues, read_dialogues, said_in

CHAT = [("system", "Be brief."), ("user", "Who?"), ("assistant", "Me."), ("user", "Why?"), ("assistant", "So.")]


def test_files_are_read_and_held_out(tmp_path):
    lines = [{"prompt": f"{i}?", "response": f"{i}!"} for i in range(100)]
    chat = {"messages": [{"role": role, "content": text} for role, text in CHAT]}
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, chat]))
    splits = read_dialogues(str(file))
    assert sum(map(len, splits.values())) == 101 and 3 < len(splits["validation"]) < 25
    assert CHAT in [*splits["train"], *splits["validation"]]
    file.write_text("".join(json.dumps(line) + "\n" for line in [chat, *reversed(lines), lines[0]]))
    again = read_dialogues(str(file))["validation"]  # in any order, and never on both sides
    assert {str(one) for one in again} == {str(one) for one in splits["validation"]}
    assert next(said_in(splits)["train"]()) == splits["train"][0][0][1]
    for name in ("train", "validation", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(chat))
    assert read_dialogues(str(tmp_path)) == {"train": [CHAT], "validation": [CHAT], "test": [CHAT]}
    assert is_dialogues(str(tmp_path)) and is_dialogues("my.jsonl") and not is_dialogues("gs://bucket/shards")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ('{"prompt": "a"}', "must have prompt and response, or messages; it has prompt"),
        ('{"prompt": "a", "response": 5}', "line 2: response must be a string; got 5"),
        ('{"messages": "hello"}', "line 2: messages must be a list of objects, each with a role and a content"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "must be one of system, user, assistant; got 'robot'"),
        (f'{{"messages": [{{"role": "{"robot " * 99}", "content": "a"}}]}}', "robot robot ..."),
        ('{"messages": [{"role": "user"}]}', "line 2: a message's content must be a string; got None"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message has the role assistant"),
        ("prompt", "line 2: Expecting value"),
        ('["prompt"]', "line 2: not a JSON object, with a value for each column"),
        ('{"prompt": "a", "response": "\\ud800"}', "line 2: 'utf-8' codec can't encode"),
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
