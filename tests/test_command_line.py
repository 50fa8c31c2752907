import dataclasses
import importlib
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.run.command_line import parse, quiet_without_reader
from common.run.options import FIRST
from keras_replicas.errors import UserError
from tests.test_structure import RECIPES

ROOT = Path(__file__).parent.parent


def recipes(*words, **kwargs):
    return subprocess.run([sys.executable, "-m", "recipes", *words], cwd=ROOT, capture_output=True, text=True, **kwargs)


@pytest.mark.parametrize("words", [[], ["ls"], ["run", "bert_mlm", "--help"], ["run", "bert_mlm", "--batch-sise", "4"]])
def test_answers_at_once_without_tensorflow(words):
    code = (
        "import atexit, runpy, sys; sys.argv[1:] = sys.orig_argv[3:];"
        "atexit.register(lambda: print('imported', {'tensorflow', 'keras', 'keras_hub'} & set(sys.modules)));"
        "runpy.run_module('recipes', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("imported set()\n")


def test_ls_tells_name_line_and_time():
    listing = recipes("ls").stdout
    assert "bert_mlm             Train a BERT masked language model" in listing and "Time: " in listing


def test_the_guide_names_the_next_command():
    assert recipes().stdout.rstrip().endswith("Next: python -m recipes run bert_mlm")


def test_the_list_fits_the_terminal():
    listing = recipes("ls", env={**os.environ, "COLUMNS": "60"}).stdout.splitlines()
    assert max(map(len, listing)) <= 60
    assert {line.split()[0] for line in listing if line[0] != " "} == {path.stem for path in RECIPES}


def test_help_bears_the_name_of_the_recipe():
    for words in (["-m", "recipes", "run", "bert_mlm"], ["recipes/bert_mlm.py"]):
        done = subprocess.run([sys.executable, *words, "--help"], cwd=ROOT, capture_output=True, text=True)
        assert done.stdout.startswith("usage: bert_mlm [-h]")


def test_help_lists_every_option():
    help_text = recipes("run", "bert_mlm", "--help").stdout
    for option in ("--workdir", "--replicas", "--lr-scaling {auto,linear,sqrt,none}", "--max-steps", "--overwrite"):
        assert option in help_text
    listed = [help_text.index(f"│ --{option} ") for option in ("workdir", "replicas", "mask-rate", "dropout", "seed")]
    assert listed == sorted(listed)  # those that people use first, then the recipe's own, then those of every recipe


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_help_lists_a_dozen_options_first_and_each_once_with_its_default(recipe, capfd):
    config = importlib.import_module(f"recipes.{recipe.stem}").Config
    with pytest.raises(SystemExit):
        parse(config, "", ["--help"])
    help_text = capfd.readouterr().out
    title, *boxes = re.split(r"^╭─ (.+?) ─+╮\n", help_text, flags=re.MULTILINE)
    assert boxes[::2] == ["options", "more options"]
    # Of each box, the name and the rest of each option.
    first, more = (re.findall(r"^│ --([a-z-]+) (.*?)(?=^│ -|^╰)", box, re.MULTILINE | re.DOTALL) for box in boxes[1::2])
    assert 9 <= len(first) <= 12
    defaults = {
        name: re.search(r"\(default: ([^)]*)\)", re.sub(r"[│\s]+", " ", text))[1] for name, text in first + more
    }
    fields = {field.name.replace("_", "-"): field.default for field in dataclasses.fields(config)}
    assert len(first + more) == len(fields)
    assert defaults == {name: "''" if value == "" else str(value) for name, value in fields.items()}
    assert [name for name, _ in first] == [option for name in FIRST if (option := name.replace("_", "-")) in fields]


def test_without_options_of_the_first_the_help_is_as_it_was(capsys):
    config = dataclasses.make_dataclass("Config", [("rounds", int, dataclasses.field(default=3))])
    with pytest.raises(SystemExit):
        parse(config, "What it does.", ["--help"])
    assert "--rounds INT" in capsys.readouterr().out
    assert parse(config, "", ["--rounds", "4"]) == config(4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "bert_mlm", "--batch-sise", "4"], "unknown option --batch-sise. The options are: --workdir --corpus"),
        (["run", "bert_mlm", "--batch-size", "many"], "--batch-size: invalid literal for int()"),
        (["run", "bert_mlm", "--lr-scaling", "cubic"], "Expected one of ('auto', 'linear', 'sqrt', 'none')"),
        (["run", "bert_mml"], "there is no recipe bert_mml. Choose one of: bert_from_scratch bert_mlm"),
        (["run"], "give the name of a recipe first, one of: bert_from_scratch bert_mlm causal_lm"),
        (["launch", "--workers", "2"], "give the name of a recipe first, one of: bert_from_scratch bert_mlm"),
        (["rnu", "bert_mlm"], "invalid choice: 'rnu'"),
        (["cp", "bert_mlm"], "the following arguments are required: DEST. See python -m recipes cp --help"),
        (["cp", "bert_mml", "x"], "there is no recipe bert_mml. Choose one of: bert_from_scratch bert_mlm"),
    ],
)
def test_a_wrong_word_is_one_line_and_status_2(words, message, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["recipes", *words])
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "recipes/__main__.py"), run_name="__main__")
    signal.signal(signal.SIGINT, on_ctrl_c)
    out, err = capfd.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1) and message in err


@pytest.mark.parametrize("backend", ["jax", ""])
def test_another_backend_of_keras_is_refused(backend):
    done = recipes("run", "bert_mlm", "--dry-run", env=os.environ | {"KERAS_BACKEND": backend})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: the recipes need TensorFlow as Keras's backend, not {backend!r}: unset KERAS_BACKEND\n"
    )


@pytest.mark.parametrize(
    ("words", "buffered"), [("-m recipes ls", True), ("-m recipes ls", False), ("recipes/bert_mlm.py --help", True)]
)
def test_it_ends_without_a_word_where_nobody_reads(words, buffered):
    """As in `python -m recipes ls | head -1`; at the first line, or where all is written at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *words.split()]
    environment = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("words", ["-m recipes ls"])
def test_output_that_is_closed_full_or_of_few_letters(words):
    def shell(redirection, **environment):
        command = f"{shlex.quote(sys.executable)} {words} {redirection}"
        environment = os.environ | environment
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, env=environment)
        return done.returncode, done.stderr

    assert shell(">&-") == (0, "")
    assert shell("", PYTHONIOENCODING="ascii") == (0, "")
    status, errors = shell(">/dev/full")
    assert status == 1 and errors.startswith("error: ") and errors.count("\n") == 1


def test_a_letter_that_the_output_lacks_is_a_question_mark():
    code = "from common.run.command_line import quiet_without_reader\nwith quiet_without_reader(): print('\u00ab')"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment) == b"?\n"


def test_another_pipe_that_breaks_is_told_of(tmp_path):
    with pytest.raises(BrokenPipeError), quiet_without_reader():
        raise BrokenPipeError


PRESSED = """
import dataclasses, os, signal, sys, time
from common.run.command_line import parse

# Of its own, whatever this process was started with: in the background of a script, SIGINT is ignored.
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[1] == "ignored" else signal.default_int_handler)
listens, sys.argv[1:] = sys.argv[1] == "listens", []
parse(dataclasses.make_dataclass("Config", []), "")
if listens:
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told\\n"))  # print may not be called within itself
print("ready", flush=True)
time.sleep(2)
"""


@pytest.mark.parametrize(
    ("how", "presses", "status", "told"),
    [
        ("listens", 1, 0, True),
        ("listens", 2, -2, True),
        ("before it can save", 1, -15, False),
        ("ignored", 1, 0, False),
    ],
)
def test_ctrl_c_asks_to_stop_and_a_second_one_ends_it_at_once(how, presses, status, told):
    process = subprocess.Popen(
        [sys.executable, "-c", PRESSED, how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),  # whatever this process blocks
    )
    assert process.stdout.readline() == "ready\n"
    for press in range(presses):
        process.send_signal(signal.SIGINT)
        line = process.stdout.readline() if told and not press else "told\n"
        assert line == "told\n", process.communicate()
    _, errors = process.communicate()
    assert process.returncode == status
    assert errors == ("\nSaving a checkpoint, then stopping. Press Ctrl-C again to quit at once.\n" if told else "")


def test_run_and_the_file_itself_are_the_same():
    file = subprocess.run(
        [sys.executable, "recipes/bert_mlm.py", "--seed", "x"], cwd=ROOT, capture_output=True, text=True
    )
    assert (file.returncode, file.stderr) == (2, recipes("run", "bert_mlm", "--seed", "x").stderr)


def test_fill_mask_without_a_preset(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "recipes", "fill-mask", "A [MASK]."], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and "no preset in runs/ yet" in done.stderr


def test_bash_completes_options_and_values():
    """The lines of docs/shell-completion.md, and what bash does at the Tab key."""
    page = (ROOT / "docs/shell-completion.md").read_text(encoding="utf-8")
    (script,) = re.findall("^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    script = script.replace(".venv/bin/python", shlex.quote(sys.executable))
    tab = """
    complete_words() {
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
        $(complete -p bert_mlm | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
        echo "${COMPREPLY[@]}" | tr ' ' '\\n' | sort | xargs
    }
    complete_words bert_mlm --opt
    complete_words bert_mlm --optimizer ''
    bert_mlm --help | cat | sed -n 1p
    """
    done = subprocess.run(["bash", "-c", script + tab], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["--optimizer", "adamw muon sgd", "usage: bert_mlm [-h] [OPTIONS]"]


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
