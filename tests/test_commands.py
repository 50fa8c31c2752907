"""`python -m recipes` and its commands; what programs say of a wrong word."""

import os
import re
import runpy
import shlex
import signal
import subprocess
import sys

import pytest

from keras_replicas import UserError
from recipes._names import recipes
from tests.conftest import ROOT, python


def commands(*words, **options):
    return python("-m", "recipes", *words, **options)


def test_the_list_has_each_page_with_its_time_and_fits_the_terminal(no_tensorflow):
    listing = commands("ls", env=no_tensorflow | {"COLUMNS": "60"}).stdout.splitlines()
    assert {line.split()[0] for line in listing if line[0] != " "} == {*recipes()}
    assert sum("Time: " in line for line in listing) == len(recipes()) and max(map(len, listing)) <= 60


def test_the_guide_names_the_next_command(no_tensorflow):
    assert commands(env=no_tensorflow).stdout.rstrip().endswith("Next: python -m recipes run bert_mlm")


def test_run_and_the_file_itself_are_the_same(no_tensorflow):
    for words in (["--seed", "x"], ["--help"]):
        alone = python("recipes/bert_mlm.py", *words)
        run = commands("run", "bert_mlm", *words, env=no_tensorflow)
        assert (run.returncode, run.stdout, run.stderr) == (alone.returncode, alone.stdout, alone.stderr)


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        ("recipes", "run bert_mml", "there is no recipe bert_mml. Choose one of: bert_from_scratch bert_mlm"),
        ("recipes", "run", "give the name of a recipe first, one of: bert_from_scratch bert_mlm causal_lm"),
        ("recipes", "launch --workers 2", "give the name of a recipe first, one of: bert_from_scratch bert_mlm"),
        ("recipes", "rnu bert_mlm", "invalid choice: 'rnu'"),
        ("recipes", "cp bert_mlm", "the following arguments are required: DEST. See python -m recipes cp --help"),
        ("recipes", "fill-mask [MASK]\udcff", r"'[MASK]\udcff' is not UTF-8 text"),
        ("benchmarks", "all --only zz", "--only zz: there are bert_mlm; causal_lm; text_classifier; "),
        ("benchmarks", "input --quick --corpus nowhere", "the corpus nowhere is neither docstrings"),
    ],
)
def test_a_wrong_word_is_one_line_and_status_2(program, words, message, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", [program, *words.split()])
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / program / "__main__.py"), run_name="__main__")
    signal.signal(signal.SIGINT, on_ctrl_c)
    out, err = capfd.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1) and message in err


def test_bash_completes_options_and_values():
    """The lines of docs/recipes.md, and what bash does at the Tab key."""
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    (script,) = re.findall("^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    script = script.replace(".venv/bin/python", shlex.quote(sys.executable))
    tab = """
    complete_words() {
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
        $(complete -p bert_mlm | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
        echo "${COMPREPLY[@]}" | tr ' ' '\\n' | sort | xargs
    }
    complete_words bert_mlm --lr
    complete_words bert_mlm --lr-scaling ''
    """
    done = subprocess.run(["bash", "-c", script + tab], cwd=ROOT, capture_output=True, text=True)
    assert (done.stderr, done.stdout.splitlines()) == ("", ["--lr-scaling", "linear none sqrt"])


def test_the_last_preset_is_one_of_the_kind_asked_for(tmp_path, monkeypatch):
    from recipes.__main__ import last_preset

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no preset in runs/ yet"):
        last_preset("MaskedLM", "bert_mlm")
    for age, (run, task) in enumerate((("b", "BertTextClassifier"), ("a", "BertMaskedLM"), ("c", "BertMaskedLM"))):
        path = tmp_path / "runs" / run / "preset/task.json"
        path.parent.mkdir(parents=True)
        path.write_text(f'{{"class_name": "{task}"}}')
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "runs/damaged/preset").mkdir(parents=True)
    (tmp_path / "runs/damaged/preset/task.json").write_bytes(b"\xff")
    (tmp_path / "runs/strange/preset/task.json").mkdir(parents=True)
    assert last_preset("MaskedLM", "bert_mlm") == "runs/a/preset"
    assert last_preset("TextClassifier", "text_classifier") == "runs/b/preset"
