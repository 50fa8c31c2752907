import json
import re

import datasets
import pytest

from common.classification_scores import METRICS
from common.data import labelled
from common.data.labelled import TASKS, column_names, open_examples, role_pairs
from common.data.tables import read_rows
from common.files import HELD_OUT

# In GLUE's own form: a byte-order mark, and quotation marks that stand for themselves, also alone at a field's start.
MRPC = {
    "train.tsv": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    "1\t10\t11\tIt doesn 't fit .\t\" It does .\n"
    '0\t12\t13\t"\tShe said , " No .\n',
    "dev.tsv": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t14\t15\tA\u2028b .\tNA\n",
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
    "train.tsv": 'index\tsentence1\tsentence2\tscore\n0\tA plane\r" is.\tB.\t5.000\n1\t"A man.\tC.\t3.800\n',
    "dev.tsv": "index\tsentence1\tsentence2\tscore\n0\tA cat.\tA dog.\t0.250\n",
    "test.tsv": "index\tsentence1\tsentence2\n0\tA girl.\tA boy.\n",
}
FILES = {"mrpc": MRPC, "sst2": SST2, "cola": COLA, "rte": RTE, "qnli": QNLI, "stsb": STSB}
# For each task: names of predictions of the test split, classes, texts and labels of training, labels of validation.
BINARY, ENTAILMENT = ["0", "1"], ["entailment", "not_entailment"]
READ = {
    "mrpc": ("MRPC.tsv", BINARY, ["It doesn 't fit .", '" It does .', '"', 'She said , " No .'], [1, 0], [1]),
    "sst2": ("SST-2.tsv", BINARY, ['a " gorgeous film ', "dull "], [1, 0], [0]),
    "cola": ("CoLA.tsv", BINARY, ['Sheila said " yes .', '"They slept John .'], [1, 0], [1]),
    "rte": ("RTE.tsv", ENTAILMENT, ['"A" b.', "B.", "C.", '"D.'], [1, 0], [0]),
    "qnli": ("QNLI.tsv", ENTAILMENT, ['"A" b.', "B.", "C.", '"D.'], [1, 0], [0]),
    "stsb": ("STS-B.tsv", [], ['A plane " is.', "B.", '"A man.', "C."], [5, pytest.approx(3.8)], [0.25]),
}  # fmt: skip


def write(folder, files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


@pytest.mark.parametrize("task", list(FILES))
def test_a_task_in_glues_own_form_and_with_windows_line_ends(task, tmp_path):
    found = open_examples(task, write(tmp_path / "unix", FILES[task]))
    train, validation, test = found.splits.values()
    texts = [text for example in train.texts for text in example]
    assert (found.task.submission, found.classes, texts, train.labels, validation.labels) == READ[task]
    assert test.labels is None and test.indices == (["7", "8"] if task == "mrpc" else BINARY[: len(test.texts)])
    assert train.indices == ["0", "1"] and found.task.limits == ((0, 5) if task == "stsb" else labelled.NO_LIMITS)
    windows = {name: text.replace("\n", "\r\n") for name, text in FILES[task].items() if name != "test.tsv"}
    again = open_examples(task, write(tmp_path / "windows", windows))
    assert again.splits == {"train": train, "validation": validation}  # a test split is not needed
    if task == "mrpc":
        assert validation.texts == [("A\u2028b .", "NA")]


@pytest.mark.parametrize("task", list(FILES))
def test_as_the_hub_gives_it(task, tmp_path, monkeypatch):
    """The hub cannot be reached from here: a local folder with the same columns, read by the real library."""
    local = open_examples(task, write(tmp_path / "local", FILES[task]))
    kind = datasets.ClassLabel(names=["no", "yes"]) if local.classes else datasets.Value("float32")
    hub = tmp_path / "hub"
    for split, examples in local.splits.items():
        names = TASKS[task].hub_texts or TASKS[task].texts
        columns = dict(zip(names, zip(*examples.texts, strict=True), strict=True))
        columns |= {"label": examples.labels or [-1] * len(examples.texts), "idx": [*map(int, examples.indices)]}
        features = datasets.Dataset.from_dict(columns).cast_column("label", kind)
        (hub / task).mkdir(parents=True, exist_ok=True)
        features.to_parquet(hub / task / f"{split}-0.parquet")
    files = "\n".join(f"  - {{split: {split}, path: {task}/{split}-*}}" for split in local.splits)
    (hub / "README.md").write_text(f"---\nconfigs:\n- config_name: {task}\n  data_files:\n{files}\n---\n")
    monkeypatch.setattr(labelled, "HUB_NAME", str(hub))
    assert open_examples(task) == local


def test_the_main_metric_of_a_task_is_the_first_of_its_metrics():
    """`results.json` does not say which is: the report takes the first of `METRICS`."""
    for task in TASKS.values():
        assert list(task.metrics) == [name for name in METRICS if name in task.metrics]
    assert [TASKS[name].metrics[0] for name in ("cola", "stsb", "mrpc")] == ["matthews", "pearson", "accuracy"]


def test_csv_has_quoted_commas_quotes_and_line_breaks_and_texts_that_look_like_something_else(tmp_path, capsys):
    content = '\ufeffindex,review,stars\n"1\t\n2","Good, really\n""good"".",10\n2,NA,9\n3,,9\n3,,9\n\n4,2026-01-01,09\n'
    files = {"train.csv": content, "validation.csv": content, "test.csv": f"review\n{'word ' * 40_000}\n"}
    found = open_examples("own", write(tmp_path, files), "review", "stars")
    told = "train.csv: 1 row(s) have several lines, 3 in the one from line 2: is a quotation mark there not closed?\n"
    assert told in capsys.readouterr().out
    assert found.classes == ["09", "9", "10"] and found.task.submission == "test.tsv"  # sorted as numbers
    texts = ['Good, really\n"good".', "NA", "", "", "2026-01-01"]  # also one that is empty, and one that comes twice
    assert found.splits["train"].texts == [(text,) for text in texts]
    assert found.splits["train"].labels == [2, 1, 1, 1, 0] and found.splits["train"].indices[:2] == ["1 2", "2"]
    assert found.splits["test"].texts == [("word " * 40_000,)] and found.splits["test"].labels is None


def test_jsonl_and_two_texts(tmp_path):
    rows = [{"a": "2026-01-01", "b": "x\ty", "kind": kind} for kind in ("spam", 3, "20")]
    content = "\n \n".join(map(json.dumps, rows))
    folder = write(tmp_path, {f"{split}.jsonl": content for split in ("train", "dev", "test")})
    found = open_examples("own", folder, "a, b", "kind")
    assert found.classes == ["20", "3", "spam"] and found.splits["test"].labels == [2, 1, 0]
    assert found.splits["train"].texts == [("2026-01-01", "x\ty")] * 3


def test_a_tenth_of_a_single_file_is_held_out(tmp_path):
    lines = [f"Text number {n}.\t{n % 25}\n" for n in range(2000)]
    write(tmp_path, {"all.tsv": "text\tlabel\n" + "".join(lines)})
    found = open_examples("own", str(tmp_path / "all.tsv"), "text", "label")
    train, validation = found.splits["train"], found.splits["validation"]
    assert found.classes == [*map(str, range(25))]
    assert len(validation.texts) == pytest.approx(2000 / HELD_OUT, rel=0.2)
    numbers = [int(re.search(r"\d+", text)[0]) for (text,) in train.texts + validation.texts]
    assert sorted(numbers) == list(range(2000)) and train.indices + validation.indices == [*map(str, numbers)]
    assert [number % 25 for number in numbers] == train.labels + validation.labels


def test_roles():
    found = open_examples("roles")
    assert found.classes == ["0", "1"] and found.splits["train"].labels[:4] == [1, 0, 1, 0]
    assert found.splits["validation"].texts == [pair[:2] for pair in role_pairs()["validation"]]


def test_numbers_of_ones_own(tmp_path):
    rows = [{"text": "A", "mark": 1}, {"text": "B", "mark": 2.5}, {"text": "C", "mark": "3"}]
    write(tmp_path, {"dev.jsonl": "\n".join(map(json.dumps, rows)), "train.csv": "text,mark\nA,-1e3\nB, 2 \nC,.1\n"})
    found = open_examples("own", str(tmp_path), "text", "mark", regression=True)
    assert found.classes == [] and found.task.metrics == ("pearson", "spearman")
    assert found.splits["validation"].labels == [1, 2.5, 3]
    assert found.splits["train"].labels == [-1000, 2, pytest.approx(0.1)] and found.splits["train"].labels[2] != 0.1


# Files put over those of a good folder of SST-2 (None: taken away), and words of the message.
FOLDERS = [
    ({"train.tsv": None}, "has no train.tsv"),
    ({"dev.tsv": None}, "has no dev.tsv or validation.tsv"),
    ({"validation.tsv": ""}, "has both dev.tsv and validation.tsv; keep only one"),
    ({"dev.tsv": "sentence\tlabel\tlabel\nA\t1\t1\n"}, "two columns have the same name: 'sentence', 'label', 'label'"),
    ({"dev.tsv": "sentence\tlabel\nA\t1\nB\t2\n"}, 'dev.tsv, line 3: the label must be one of 0, 1; got "2"'),
    ({"dev.tsv": b"sentence\tlabel\nA\t1\ncaf\xe9 \t1\n"}, "dev.tsv, line 3: 'utf-8' codec can't decode"),
    ({"train.tsv": "sentence\tlabel\nA\t1\nB\t1\n"}, "all labels of the split train are the same"),
]


@pytest.mark.parametrize(("files", "message"), FOLDERS, ids=[message for _, message in FOLDERS])
def test_a_wrong_file_in_glues_form(files, message, tmp_path):
    folder = write(tmp_path, {name: text for name, text in (SST2 | files).items() if text is not None})
    refuses(message, tmp_path, "sst2", folder)


def refuses(message, folder, *arguments):
    with pytest.raises(ValueError) as error:
        open_examples(*arguments)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(folder)) + 250


NUMBERS = ['"good"', '""', '"nan"', '"inf"', "NaN", "-2e12", "1e39", "1" + "0" * 400, "null", "[1]"]


@pytest.mark.parametrize("label", NUMBERS)
def test_a_label_that_is_no_number(label, tmp_path):
    write(tmp_path, {"a.jsonl": '{"text": "A", "label": 0}\n{"text": "C", "label": ' + label + "}"})
    message = "a.jsonl, line 2: the label must be a number from -1e12 to 1e12; got "
    refuses(message, tmp_path, "own", str(tmp_path / "a.jsonl"), "text", "label", True)


# A file of one's own, with columns `text` and `label`.
OWN_FILES = [
    ("a.csv", 'text,label\n"A,0\nB,1\n', "a.csv, line 3: unexpected end of data, in the row that begins in line 2"),
    ("a.csv", 'text,label\nA,0\n"B" C,1\n', "a.csv, line 3: ',' expected after '\"'"),
    ("a.csv", 'text,label\n"A\nB",0\nC\n', "a.csv, line 4: 1 fields, divided by ',', for 2 columns"),
    ("a.csv", "text,label\nA,0\nB,1\n", "the split validation has no examples"),
    ("a.csv", 'text,label\nA,"0\n1"\n', "a.csv, line 3: a label must be a text of one line without tabs"),
    ("a.csv", "text,label\nA,p\tq\nB,r\n", "a.csv, line 2: a label must be a text of one line without tabs"),
    ("a.jsonl", '{"text": "A", "label": 0}\n{"text": "B"\n', "a.jsonl, line 2: Expecting ',' delimiter"),
    ("a.jsonl", "[" * 100_000, "a.jsonl, line 1: "),
    ("a.jsonl", '["A", 0]\n', "a.jsonl, line 1: not a JSON object"),
    ("a.jsonl", '{"text": "A", "label": 0}\n{"label": 1}\n', "a.jsonl, line 2 has no column 'text'; it has 'label'"),
    ("a.jsonl", '{"text": 5, "label": 1}\n{"text": "B", "label": 0}\n', "a.jsonl, line 1: text must be text; got 5"),
    ("a.jsonl", '{"text": "\\ud800", "label": 0}\n', "a.jsonl, line 1: 'utf-8' codec can't encode"),
    ("a.jsonl", '{"text": "A", "label": 0.5}\n', "integer; got 0.5. Numbers to predict are for regression"),
    ("a.txt", "text", "a.txt must end in one of .tsv, .csv, .jsonl"),
]


@pytest.mark.parametrize(("name", "content", "message"), OWN_FILES, ids=[message for *_, message in OWN_FILES])
def test_a_wrong_file_of_ones_own(name, content, message, tmp_path):
    write(tmp_path, {name: content})
    refuses(message, tmp_path, "own", str(tmp_path / name), "text", "label")


# As spreadsheets write them, and the label that is read.
TABLES = [("text, label,\nGröße, 1,\n", " 1"), ("text;label;\nGröße;1;;\n", "1"), ("text\tlabel\nGröße\t1\n", "1")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(("content", "label"), TABLES)
def test_tables_as_programs_write_them(content, label, encoding, tmp_path):
    for end in ["\n", "\r\n", "\r"]:
        (tmp_path / "train.CSV").write_bytes(content.replace("\n", end).encode(encoding))
        assert [row for _, row in read_rows(tmp_path / "train.CSV")] == [{"text": "Größe", "label": label}]


def test_quotation_marks_of_a_tsv_file_are_its_fields_only_if_all_are(tmp_path):
    for text, found in (('"A ""b""."', 'A "b".'), ('"A" b.', '"A" b.')):
        (tmp_path / "a.tsv").write_text(f'text\tlabel\n"C."\t0\n{text}\t1\n')
        rows = [row["text"] for _, row in read_rows(tmp_path / "a.tsv")]
        assert rows == (["C.", found] if "b." not in text else ['"C."', found])
        assert [row["text"] for _, row in read_rows(tmp_path / "a.tsv", glue=True)] == ['"C."', text]


def test_a_thousandth_of_the_rows_may_be_malformed_and_is_counted(tmp_path, capsys):
    lines = [f"{n}\t1\n" for n in range(1000)]
    (tmp_path / "a.tsv").write_text("".join(["text\tlabel\n", *lines[:400], "only\n", *lines[400:]]))
    assert len([*read_rows(tmp_path / "a.tsv")]) == 1000
    told = f"1 of 1001 rows are malformed, and dropped. {tmp_path}/a.tsv, line 402: 1 fields, divided by '\\t', for 2 "
    assert capsys.readouterr().out.startswith(told)
    with pytest.raises(ValueError, match="a.tsv, line 402: 1 fields"):  # where predictions have a row's number
        [*read_rows(tmp_path / "a.tsv", all_rows=True)]
    train = {"train.tsv": "text\tlabel\nA\t1\nB\t0\n", "dev.tsv": "text\tlabel\nA\t1\n"}
    write(tmp_path, train | {"test.tsv": (tmp_path / "a.tsv").read_text()})
    refuses("test.tsv, line 402: 1 fields", tmp_path, "own", str(tmp_path), "text", "label")


def test_classes_are_told_with_their_counts_and_what_is_doubtful(tmp_path, capsys):
    labels = ["positive"] * 3 + [" positive", "-", "NaN"]
    table = "text,label\n" + "".join(f"A,{label}\n" for label in labels)
    write(tmp_path, {"train.csv": table, "val.csv": table})
    open_examples("own", str(tmp_path), "text", "label")
    assert capsys.readouterr().out == (
        "classes: ' positive' 1, '-' 1, 'NaN' 1, 'positive' 3\n"
        "'-', 'NaN': if that stands for no label, remove these examples\n"
        "' positive', 'positive' differ in spaces or capitals alone: are they one class?\n"
        "validation has 6 examples: too few to tell a better model from a worse one\n"
    )
    write(tmp_path, {"all.csv": "text,label\n" + "".join(f"A,{n}\n" for n in range(60)) + "A,x\n" * 3})
    refuses("61 of 63 labels differ: name the column", tmp_path, "own", str(tmp_path / "all.csv"), "text", "label")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("own", "f.csv", "text"), "the task own needs a file or folder, and the names of its columns"),
        (("own", "f.csv", "a,b,c", "label"), "must be one name, or two with a comma between them; got 'a,b,c'"),
        (("own", "f.csv", "a,a", "label"), "must be one name, or two with a comma between them"),
        (("own", "f.csv", "a,", "label"), "must be one name, or two with a comma between them"),
        (("own", "missing.csv", "text", "label"), "cannot read missing.csv: No such file or directory"),
        (("stsb", "", "", "", True), "columns and regression are for the task own alone: leave them out"),
        (("roles", "f"), "the task roles makes its own texts: leave out the data"),
        (("mrpc",), "cannot fetch nyu-mll/glue from the Hugging Face Hub"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, message, tmp_path):
    refuses(message, tmp_path, *arguments)
    assert column_names(" a, b ") == ("a", "b")
