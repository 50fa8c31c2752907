import json
import re
import typing

import datasets
import pytest

from common.data import glue_tasks
from common.data.glue import open_examples
from common.data.glue_tasks import TASKS
from common.data.labelled import HELD_OUT
from common.run.classifier_options import ClassifierOptions
from common.scores.entries import METRICS
from keras_replicas.errors import UserError

# In GLUE's own form: a byte-order mark, and quotation marks that stand for themselves, also alone at a field's start.
MRPC = {
    "train.tsv": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    "1\t10\t11\tHe said it doesn 't fit .\t\" It does not fit .\n"
    '0\t12\t13\t"\tHis wife said , " No .\n',
    "dev.tsv": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t14\t15\tA\u2028b .\tC .\n",
    "test.tsv": "\ufeffindex\t#1 ID\t#2 ID\t#1 String\t#2 String\n7\t16\t17\tD .\tE .\n8\t18\t19\tF .\tG .\n",
}
SST2 = {
    "train.tsv": 'sentence\tlabel\na " gorgeous film \t1\ndull \t0\n',
    "dev.tsv": "sentence\tlabel\nit 's slow . \t0\n",
    "test.tsv": "index\tsentence\n0\tuneasy mishmash\n1\tfun\n",
}
COLA = {  # without names of columns, but in the test split
    "train.tsv": 'gj04\t1\t\tSheila said " yes .\nks08\t0\t*\t"They slept John .\n',
    "dev.tsv": "gj04\t1\t\tThe sailors rode the breeze .\n",
    "test.tsv": "index\tsentence\n0\tBill whistled .\n1\tIt by .\n",
}
RTE = {
    "train.tsv": 'index\tsentence1\tsentence2\tlabel\n0\t"A" b.\tB.\tnot_entailment\n1\tC.\t"D.\tentailment\n',
    "dev.tsv": "index\tsentence1\tsentence2\tlabel\n0\tE.\tF.\tentailment\n",
    "test.tsv": "index\tsentence1\tsentence2\n0\tG.\tH.\n",
}
QNLI = {name: text.replace("sentence1\tsentence2", "question\tsentence") for name, text in RTE.items()}
STSB = {
    name: "\t".join(["index genre filename year old_index source1 source2 sentence1 sentence2", *score]).replace(
        " ", "\t"
    )
    + "".join(f"\n{i}\tnews\tMSR\t2012\t{i}\tnone\tnone\t{row}" for i, row in enumerate(rows))
    for name, score, rows in [
        ("train.tsv", ["score"], ['A plane " is.\tAn air plane is.\t5.000', '"A man.\tA woman.\t3.800']),
        ("dev.tsv", ["score"], ["A cat.\tA dog.\t0.250"]),
        ("test.tsv", [], ["A girl.\tA boy."]),
    ]
}
FILES = {"mrpc": MRPC, "sst2": SST2, "cola": COLA, "rte": RTE, "qnli": QNLI, "stsb": STSB}


def write(folder, files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def test_mrpc_in_glues_own_form(tmp_path):
    found = open_examples("mrpc", write(tmp_path / "mrpc", MRPC))
    assert found.classes == ["0", "1"] and found.submission == "MRPC.tsv"
    assert list(found.splits) == ["train", "validation", "test"]
    train, validation, test = found.splits.values()
    assert train.texts == [("He said it doesn 't fit .", '" It does not fit .'), ('"', 'His wife said , " No .')]
    assert train.labels == [1, 0] and train.indices == ["0", "1"]
    assert validation.texts == [("A\u2028b .", "C .")] and validation.labels == [1]
    assert test.texts == [("D .", "E ."), ("F .", "G .")]
    assert test.labels is None and test.indices == ["7", "8"]


def test_sst2_in_glues_own_form_with_windows_line_ends(tmp_path):
    windows = {name: text.replace("\n", "\r\n") for name, text in SST2.items()}
    found = open_examples("sst2", write(tmp_path / "unix", SST2))
    assert found == open_examples("sst2", write(tmp_path / "windows", windows))
    assert found.submission == "SST-2.tsv"
    assert found.splits["train"].texts == [('a " gorgeous film ',), ("dull ",)]
    assert found.splits["train"].labels == [1, 0]
    assert found.splits["test"].indices == ["0", "1"] and found.splits["test"].labels is None


def test_cola_in_glues_own_form(tmp_path):
    found = open_examples("cola", write(tmp_path, COLA))
    assert found.classes == ["0", "1"] and found.submission == "CoLA.tsv" and found.metrics == ("matthews",)
    train, validation, test = found.splits.values()
    assert train.texts == [('Sheila said " yes .',), ('"They slept John .',)] and train.labels == [1, 0]
    assert validation.texts == [("The sailors rode the breeze .",)] and validation.labels == [1]
    assert test.texts == [("Bill whistled .",), ("It by .",)] and test.labels is None and test.indices == ["0", "1"]


@pytest.mark.parametrize("task", ["rte", "qnli"])
def test_entailment_in_glues_own_form(task, tmp_path):
    found = open_examples(task, write(tmp_path, FILES[task]))
    assert found.classes == ["entailment", "not_entailment"] and found.metrics == ("accuracy",)
    assert found.submission == {"rte": "RTE.tsv", "qnli": "QNLI.tsv"}[task]
    train, validation, test = found.splits.values()
    assert train.texts == [('"A" b.', "B."), ("C.", '"D.')] and train.labels == [1, 0]
    assert validation.labels == [0] and test.labels is None


def test_stsb_in_glues_own_form(tmp_path):
    found = open_examples("stsb", write(tmp_path, STSB))
    assert found.classes == [] and found.submission == "STS-B.tsv" and found.metrics == ("pearson", "spearman")
    assert found.limits == (0, 5)
    train, validation, test = found.splits.values()
    assert train.texts == [('A plane " is.', "An air plane is."), ('"A man.', "A woman.")]
    assert train.labels == pytest.approx([5, 3.8]) and validation.labels == [0.25]
    assert test.texts == [("A girl.", "A boy.")] and test.labels is None and test.indices == ["0"]


def test_a_test_split_is_not_needed(tmp_path):
    folder = write(tmp_path, {name: text for name, text in MRPC.items() if name != "test.tsv"})
    assert list(open_examples("mrpc", folder).splits) == ["train", "validation"]


@pytest.mark.parametrize("task", list(FILES))
def test_as_the_hub_gives_it(task, tmp_path, monkeypatch):
    """The hub cannot be reached from here: a local folder with the same columns, read by the real library."""
    local = open_examples(task, write(tmp_path / "local", FILES[task]))
    names = {"mrpc": ["sentence1", "sentence2"], "qnli": ["question", "sentence"]} | dict.fromkeys(
        ["rte", "stsb"], ["sentence1", "sentence2"]
    )
    kind = datasets.ClassLabel(names=["no", "yes"]) if local.classes else datasets.Value("float32")
    hub = tmp_path / "hub"
    for split, examples in local.splits.items():
        texts = zip(*examples.texts, strict=True)
        columns = dict(zip(names.get(task, ["sentence"]), texts, strict=True))
        columns["label"] = examples.labels or [-1] * len(examples.texts)
        columns["idx"] = [int(index) for index in examples.indices]
        features = datasets.Dataset.from_dict(columns).cast_column("label", kind)
        (hub / task).mkdir(parents=True, exist_ok=True)
        features.to_parquet(hub / task / f"{split}-0.parquet")
    files = "\n".join(f"  - {{split: {split}, path: {task}/{split}-*}}" for split in local.splits)
    (hub / "README.md").write_text(f"---\nconfigs:\n- config_name: {task}\n  data_files:\n{files}\n---\n")
    monkeypatch.setattr(glue_tasks, "HUB_NAME", str(hub))
    assert open_examples(task) == local


def test_the_tasks_are_those_that_the_options_offer():
    offered = typing.get_args(typing.get_type_hints(ClassifierOptions)["task"])
    assert {*offered} == {*TASKS, "roles", "own"} == {*FILES, "roles", "own"}


def test_the_main_metric_of_a_task_is_the_first_of_its_metrics():
    """`results.json` does not say which is: the report takes the first of `METRICS`."""
    for task in TASKS.values():
        assert list(task.metrics) == [name for name in METRICS if name in task.metrics]


def test_the_hub_out_of_reach_says_what_to_do():
    with pytest.raises(UserError, match="cannot fetch nyu-mll/glue .* give their folder: --data FOLDER"):
        open_examples("mrpc")


def test_csv_has_quoted_commas_quotes_and_line_breaks(tmp_path):
    content = 'id,review,stars\n1,"Good, really\n""good"".",10\n2,Bad,9\n\n'
    files = {"train.csv": content, "validation.csv": content, "test.csv": "review\nSo so\n"}
    found = open_examples("own", write(tmp_path, files), "review", "stars")
    assert found.classes == ["9", "10"] and found.submission == "test.tsv"  # sorted as numbers
    assert found.splits["train"].texts == [('Good, really\n"good".',), ("Bad",)]
    assert found.splits["train"].labels == [1, 0]
    assert found.splits["test"].texts == [("So so",)] and found.splits["test"].labels is None


def test_jsonl_and_two_texts(tmp_path):
    rows = [{"a": "x\ty", "b": "z", "kind": kind} for kind in ("spam", "ham", "eggs")]
    content = "\n".join(map(json.dumps, rows)) + "\n"
    found = open_examples(
        "own", write(tmp_path, {f"{s}.jsonl": content for s in ("train", "dev", "test")}), "a, b", "kind"
    )
    assert found.classes == ["eggs", "ham", "spam"]
    assert found.splits["train"].texts == [("x\ty", "z")] * 3
    assert found.splits["test"].labels == [2, 1, 0]
    whole = "\n".join(json.dumps({"a": "t", "label": label}) for label in (3, 20, 3))
    assert open_examples("own", write(tmp_path, {"train.jsonl": whole, "dev.jsonl": whole}), "a", "label").classes == [
        "3",
        "20",
    ]


def test_a_tenth_of_a_single_file_is_held_out(tmp_path):
    lines = [f"Text number {n}.\t{'even' if n % 2 == 0 else 'odd'}\n" for n in range(2000)]
    write(tmp_path, {"all.tsv": "text\tlabel\n" + "".join(lines), "half.tsv": "text\tlabel\n" + "".join(lines[:1000])})
    found = open_examples("own", str(tmp_path / "all.tsv"), "text", "label")
    train, validation = found.splits["train"], found.splits["validation"]
    assert found.classes == ["even", "odd"]
    assert len(validation.texts) == pytest.approx(2000 / HELD_OUT, rel=0.2)
    numbers = [int(re.search(r"\d+", text)[0]) for (text,) in train.texts + validation.texts]
    assert sorted(numbers) == list(range(2000))
    assert [number % 2 for number in numbers] == train.labels + validation.labels
    half = open_examples("own", str(tmp_path / "half.tsv"), "text", "label")
    assert set(half.splits["validation"].texts) < set(validation.texts)  # an example's split is its own


def test_roles():
    found = open_examples("roles")
    assert found.classes == ["0", "1"] and list(found.splits) == ["train", "validation"]
    assert all(len(texts) == 2 for examples in found.splits.values() for texts in examples.texts)


def test_numbers_of_ones_own(tmp_path):
    whole = "".join(f"text {i}\t{i / 4}\n" for i in range(40))
    write(tmp_path, {"all.tsv": "text\tmark\n" + whole, "train.csv": "text,mark\nA,-1e3\nB, 2 \nC,.5\n"})
    found = open_examples("own", str(tmp_path / "all.tsv"), "text", "mark", regression=True)
    assert found.classes == [] and found.metrics == ("pearson", "spearman") and found.submission == "test.tsv"
    together = [pair for part in found.splits.values() for pair in zip(part.texts, part.labels, strict=True)]
    assert sorted(together, key=lambda pair: pair[1]) == [((f"text {i}",), i / 4) for i in range(40)]
    rows = [{"text": "A", "mark": 1}, {"text": "B", "mark": 2.5}, {"text": "C", "mark": "3"}]
    write(tmp_path, {"dev.jsonl": "\n".join(map(json.dumps, rows))})
    splits = open_examples("own", str(tmp_path), "text", "mark", regression=True).splits
    assert splits["train"].labels == [-1000, 2, 0.5] and splits["validation"].labels == [1, 2.5, 3]


# Files put over those of a good folder (None: taken away), and words of the message.
GLUE_FOLDERS = [
    ({"train.tsv": None}, "has no train.tsv"),
    ({"dev.tsv": None}, "has no dev.tsv or validation.tsv"),
    ({"dev.tsv": ""}, "dev.tsv is empty"),
    ({"dev.tsv": " \n\n"}, "dev.tsv is empty"),
    ({"dev.tsv": "sentence\tlabel\n"}, "the split validation has no examples"),
    ({"dev.tsv": "text\tlabel\nA\t1\n"}, "dev.tsv, line 2 has no column sentence; it has text, label"),
    ({"dev.tsv": "sentence\tlabel\nA\t1\nB\n"}, "dev.tsv, line 3 has 1 fields, the first line 2: sentence, label"),
    ({"dev.tsv": "sentence\tlabel\nA\tB\t1\n"}, "dev.tsv, line 2 has 3 fields, the first line 2"),
    ({"dev.tsv": "sentence\tlabel\tlabel\nA\t1\t1\n"}, "has two columns of the same name"),
    ({"dev.tsv": "sentence\tlabel\nA\t1\nB\t2\n"}, "dev.tsv, line 3: the label '2' is not one of 0, 1"),
    ({"dev.tsv": "sentence\tlabel\nA\t1\n" + "B\t\n"}, "dev.tsv, line 3: label is empty. Leave out the row"),
    ({"dev.tsv": b"sentence\tlabel\nA\t1\ncaf\xe9 \t1\n"}, "dev.tsv, line 3 is not UTF-8 text (invalid continuation"),
    ({"dev.tsv": b"\0\1\2"}, "is a binary file"),
    ({"train.tsv": "sentence\tlabel\nA\t1\nB\t1\n"}, "all labels of the split train are the same"),
    ({"train.tsv": "sentence\nA\nB\n"}, "train.tsv, line 2 has no column label; it has sentence"),
    ({"dev.tsv": "index\tsentence\n0\tA\n"}, "dev.tsv, line 2 has no column label; it has index, sentence"),
    ({"test.tsv": "index\ttext\n0\tA\n"}, "test.tsv, line 2 has no column sentence; it has index, text"),
]


@pytest.mark.parametrize(("files", "message"), GLUE_FOLDERS, ids=[message for _, message in GLUE_FOLDERS])
def test_a_wrong_file_in_glues_form(files, message, tmp_path):
    folder = write(tmp_path, {name: text for name, text in (SST2 | files).items() if text is not None})
    with pytest.raises(UserError) as error:
        open_examples("sst2", folder)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("task", "files", "message"),
    [
        ("cola", {"dev.tsv": "gj04\t1\t\tA .\nB .\t1\n"}, "dev.tsv, line 2 has 2 fields, its format 4: source, label"),
        ("cola", {"dev.tsv": "a\tlabel\tb\tsentence\n"}, "dev.tsv, line 1: the label 'label' is not one of 0, 1"),
        ("rte", {"dev.tsv": RTE["dev.tsv"].replace("entail", "imply")}, "is not one of entailment, not_entailment"),
        ("qnli", {"dev.tsv": RTE["dev.tsv"]}, "has no column question"),
        ("stsb", {"dev.tsv": STSB["test.tsv"]}, "dev.tsv, line 2 has no column score"),
        ("stsb", {"train.tsv": STSB["test.tsv"]}, "train.tsv, line 2 has no column score"),
        (
            "stsb",
            {"dev.tsv": STSB["dev.tsv"].replace("0.250", "alike")},
            'line 2: score must be a number from -1e12 to 1e12; got "a',
        ),
        ("stsb", {"train.tsv": STSB["dev.tsv"]}, "all labels of the split train are the same"),
    ],
)
def test_a_wrong_file_of_other_tasks(task, files, message, tmp_path):
    with pytest.raises(UserError) as error:
        open_examples(task, write(tmp_path, FILES[task] | files))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "label", ['"good"', '""', '"nan"', '"inf"', "NaN", "2e12", "1e39", "1" + "0" * 400, "null", "true", "[1]"]
)
def test_a_label_that_is_no_number(label, tmp_path):
    rows = ['{"text": "A", "label": 0}', '{"text": "B", "label": 1}', f'{{"text": "C", "label": {label}}}']
    write(tmp_path, {"a.jsonl": "\n".join(rows)})
    with pytest.raises(UserError) as error:
        open_examples("own", str(tmp_path / "a.jsonl"), "text", "label", regression=True)
    assert "a.jsonl, line 3: label must be a number from -1e12 to 1e12; got " in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < len(str(tmp_path)) + 200


def test_a_text_may_be_long(tmp_path):
    rows = [f'"{number} {"word " * 40_000}",{number % 2}' for number in range(12)]
    write(tmp_path, {"a.csv": "\n".join(["text,label", *rows])})
    texts = open_examples("own", str(tmp_path / "a.csv"), "text", "label")
    assert sum(len(part.texts) for part in texts.splits.values()) == 12


# A file of one's own, with columns `text` and `label`.
OWN_FILES = [
    ("a.csv", 'text,label\n"A,0\nB,1\n', "a.csv, line 2: broken quoting (unexpected end of data)"),
    ("a.csv", 'text,label\nA,0\n"B" C,1\n', "a.csv, line 3: broken quoting"),
    ("a.csv", 'text,label\n"A\nB",0\nC\n', "a.csv, line 4 has 1 fields, the first line 2: text, label"),
    ("a.csv", "name,label\nA,0\n", "a.csv, line 2 has no column text; it has name, label"),
    ("a.csv", "text,name\nA,0\n", "a.csv, line 2 has no column label; it has text, name"),
    ("a.csv", "text,label\n", "the split train has no examples"),
    ("a.csv", "text,label\nA,0\nB,1\n", "the split validation has no examples"),
    ("a.csv", 'text,label\nA,"0\n1"\n', 'a.csv, line 2: label must be a string of one line or an integer; got "0\\n1"'),
    ("a.csv", "text,label\nA,0\nB,\n", "a.csv, line 3: label is empty. Leave out the row, or give it a label"),
    ("a.jsonl", '{"text": "A", "label": 0}\n{"text": "B"\n', "a.jsonl, line 2 is not JSON"),
    ("a.jsonl", "[" * 100_000, "a.jsonl, line 1 is not JSON"),
    ("a.jsonl", '["A", 0]\n', "a.jsonl, line 1 is not a JSON object"),
    ("a.jsonl", '{"text": "A", "label": 0}\n{"label": 1}\n', "a.jsonl, line 2 has no column text; it has label"),
    ("a.jsonl", '{"text": "A", "label": 0}\n{"text": 5, "label": 1}\n', "a.jsonl, line 2: text must be a string"),
    ("a.jsonl", '{"text": "\\ud800", "label": 0}\n', "a.jsonl, line 1: text must be a string"),
    ("a.jsonl", '{"text": "A", "label": 0.5}\n', "integer; got 0.5. To predict numbers, give --regression"),
    ("a.jsonl", '{"text": "A", "label": null}\n', "a.jsonl, line 1: label must be a string of one line or an integer"),
    ("a.txt", "text", "a.txt must end in one of .tsv, .csv, .jsonl"),
]


@pytest.mark.parametrize(("name", "content", "message"), OWN_FILES, ids=[message for _, _, message in OWN_FILES])
def test_a_wrong_file_of_ones_own(name, content, message, tmp_path):
    write(tmp_path, {name: content})
    with pytest.raises(UserError) as error:
        open_examples("own", str(tmp_path / name), "text", "label")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(tmp_path)) + 200


def test_labels_that_training_does_not_have(tmp_path):
    folder = write(tmp_path, {"train.csv": "text,label\nA,x\nB,y\n", "dev.csv": "text,label\nA,x\nB,z\n"})
    with pytest.raises(UserError, match="dev.csv, line 3: the label 'z' is not one of x, y"):
        open_examples("own", folder, "text", "label")
    write(tmp_path, {"dev.csv": "text,label\nA,x\n", "test.csv": "text,label\nA,z\n"})
    with pytest.raises(UserError, match="test.csv, line 2: the label 'z' is not one of x, y"):
        open_examples("own", folder, "text", "label")


def test_two_files_for_a_split(tmp_path):
    folder = write(tmp_path, dict.fromkeys(("train.csv", "dev.csv", "validation.csv"), "text,label\nA,0\nB,1\n"))
    with pytest.raises(UserError, match="has both dev.csv and validation.csv"):
        open_examples("own", folder, "text", "label")


# Arguments of open_examples, and words of the message.
OPTIONS = [
    (("own",), "--task own needs your own file or folder"),
    (("own", "f.csv"), "--task own needs the names of the columns"),
    (("own", "f.csv", "text"), "--task own needs the names of the columns"),
    (("own", "f.csv", "a,b,c", "label"), "must be one name, or two separated by a comma"),
    (("own", "f.csv", "a,", "label"), "must be one name, or two separated by a comma"),
    (("own", "f.csv", "a,a", "label"), "must be one name, or two separated by a comma"),
    (("own", "f.csv", "a,label", "label"), "--text-columns must be other than --label-column label; got a,label"),
    (("own", "missing.csv", "text", "label"), "cannot read missing.csv: No such file or directory"),
    (("mrpc", "missing"), "there is no folder missing"),
    (("mrpc", "f", "text", "label"), "are for your own files: give --task own"),
    (("mrpc", "f", "", "", True), "--regression is for your own files: give --task own"),
    (("stsb", "", "", "", True), "--regression is for your own files: give --task own"),
    (("roles", "", "", "", True), "--regression is for your own files: give --task own"),
    (("roles", "f"), "--task roles generates its own texts: leave out --data"),
    (("own", "", "text", "label"), "--task own needs your own file or folder"),
]


@pytest.mark.parametrize(("arguments", "message"), OPTIONS, ids=[str(arguments) for arguments, _ in OPTIONS])
def test_options_that_do_not_go_together(arguments, message):
    with pytest.raises(UserError) as error:
        open_examples(*arguments)
    assert message in str(error.value) and "\n" not in str(error.value)
