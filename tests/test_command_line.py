import dataclasses
import errno
import importlib
import logging
import math
import os
import re
import signal
import subprocess
import sys

import pytest

from common.command_line import FIRST, marks_of, parse, quiet_stderr, run
from keras_replicas import UserError
from recipes._names import recipes
from recipes.bert_mlm import Config
from recipes.causal_lm import Config as CausalConfig
from tests.conftest import ROOT, python

PAGE = "recipes/bert_mlm.py"


def ended(capfd, *words):
    """The exit status of reading these options, and what is printed."""
    with pytest.raises(SystemExit) as end:
        parse(Config, "What it does.", words)
    return end.value.code, *capfd.readouterr()


def test_an_option_is_a_field():
    words = ["--batch-size", "4", "--lr-scaling=none", "--jit", "--epochs", "5", "--seed", "7"]
    assert parse(Config, "", words) == Config(batch_size=4, lr_scaling="none", jit=True, epochs=5, seed=7)
    assert parse(Config, "", []) == Config()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--batch-sise 4", "unknown option --batch-sise. The options are: --"),
        ("--epochs many", "--epochs: invalid literal for int()"),
        ("--lr-scaling cubic", "Expected one of ('sqrt', 'linear', 'none')"),
        ("--seed -1", "--seed must be from 0 to 4294967295; got -1"),
    ],
)
def test_a_wrong_word_is_one_line_and_status_2(words, told, capfd):
    status, out, err = ended(capfd, *words.split())
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and told in err


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("seq_length", 2, "--seq-length must be from 3 to 65536; got 2"),
        ("max_steps", 10**400, f"--max-steps must be from 0 to 2147483647; got {10**400}"),
        ("replicas", 1025, "--replicas must be from 0 to 1024; got 1025"),
        ("seed", 2**32, "--seed must be from 0 to 4294967295; got 4294967296"),
        ("learning_rate", math.nan, "--learning-rate must be from 1e-30 to 1000000000.0; got nan"),
        ("warmup", 1.0, "--warmup must be from 0 to 0.9999999999999999; got 1.0"),
        ("corpus", "", "--corpus is empty: give it a value, or leave it out"),
        ("workdir", "gs://bucket/run", "--workdir gs://bucket/run must be a folder of this machine"),
        ("accumulate", 3, "--accumulate 3 must divide --batch-size 16"),
        ("vocabulary", "v.txt", "the preset p brings its vocabulary: leave out --vocabulary"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused(name, value, told):
    with pytest.raises(UserError) as error:
        Config(**{name: value} | ({"preset": "p"} if name == "vocabulary" else {}))
    assert str(error.value) == told


@pytest.mark.parametrize("data", ["x.csv", "no_such_folder", "setup.cfg"])
def test_what_is_no_data_of_a_causal_model_is_refused_at_once(data):
    with pytest.raises(UserError, match=f"--data {data} must be a .jsonl file or a folder; other texts are for --corp"):
        CausalConfig(data=data)


def test_values_at_their_bounds_are_taken():
    Config(seq_length=3, batch_size=2**31 - 1, seed=2**32 - 1, learning_rate=1e-30, replicas=1024)
    Config(seq_length=2**16, batch_size=8, accumulate=8, warmup=math.nextafter(1, 0), max_steps=0)


def test_an_input_must_not_lie_in_the_runs_folder(tmp_path, monkeypatch):
    (tmp_path / "run/deeper").mkdir(parents=True)
    (tmp_path / "run/deeper/a.txt").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    inside = ("run", "run/deeper/a.txt"), ("link", "run/deeper"), (str(tmp_path / "run"), "link"), (".", "run")
    for workdir, corpus in inside:
        with pytest.raises(UserError, match=f"--corpus {corpus} lies in the run's folder: give another --workdir"):
            Config(workdir=workdir, corpus=corpus)
    with pytest.raises(UserError, match="the run's folder lies in --corpus run: give another --workdir"):
        Config(workdir="run/deeper/new", corpus="run")
    for workdir, corpus in (("other", "run"), ("run", "gs://run/deeper"), ("run", "x" * 300)):
        Config(workdir=workdir, corpus=corpus)


def test_a_workdir_that_loops_or_lies_in_a_folder_that_was_deleted_is_refused(tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").mkdir()
    for folder, workdir in ((tmp_path, "loop"), (tmp_path / "gone", "run")):
        monkeypatch.chdir(folder)
        if folder != tmp_path:
            folder.rmdir()
        with pytest.raises(UserError, match=f"cannot use --workdir {workdir} "):
            Config(workdir=workdir)


def test_a_resumed_run_must_have_all_options_but_the_free_ones():
    free = {"workdir", "replicas", "checkpoint_every", "overwrite", "dry_run", "accumulate", "jit"}
    config = Config(seed=7)
    fixed = {name: value for name, value in vars(config).items() if name not in free}
    assert config.fixed("a") == {"recipe": "a"} | fixed and fixed["seed"] == 7


@pytest.mark.parametrize("backend", ["jax", ""])
def test_another_backend_of_keras_is_refused(backend, monkeypatch, capfd):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    told = f"error: the recipes need TensorFlow as Keras's backend, not {backend!r}: unset KERAS_BACKEND\n"
    assert ended(capfd) == (2, "", told)


@pytest.mark.parametrize("page", recipes())
def test_help_shows_each_option_once_with_its_default(page, capfd):
    config = importlib.import_module(f"recipes.{page}").Config
    with pytest.raises(SystemExit):
        parse(config, "What it does.", ["--help"])
    out, err = capfd.readouterr()
    shown = re.findall(r"^│ --([a-z-]+)(.*?)(?=^│ -|^╰)", out, re.MULTILINE | re.DOTALL)
    options = {name: re.sub(r"[│\s]+", " ", told) for name, told in shown}
    assert "What it does." in out and not err
    defaults = {name: re.search(r"\(default: ([^)]*)\)", told)[1] for name, told in options.items()}
    fields = {field.name.replace("_", "-"): field.default for field in dataclasses.fields(config)}
    assert defaults == {name: "''" if value == "" else str(value) for name, value in fields.items()}
    first = {name.replace("_", "-") for name, marks in marks_of(config).items() if FIRST in marks}
    assert {*[*options][: len(first)]} == first
    assert len(options) == len(fields)
    # An option without a comment of its own would be shown with that of the one before it.
    said = [re.sub(r"^ \{.*?\}| \(default.*| [A-Z|{}a-z]*(INT|STR|FLOAT) ", "", told) for told in options.values()]
    assert all(said) and len({*said}) == len(said)


def test_the_help_and_a_mistake_take_a_second_without_tensorflow(no_tensorflow):
    for words, status in ((["--help"], 0), (["--batch-size", "0"], 2)):
        before = os.times()
        done = python(PAGE, *words, env=no_tensorflow)
        after = os.times()
        assert done.returncode == status, done.stderr
        assert sum(after[2:4]) - sum(before[2:4]) < 1  # of the processor, whatever else runs here
        assert done.stdout.startswith("usage: bert_mlm [-h]") if words == ["--help"] else not done.stdout


@pytest.mark.parametrize("buffered", [True, False])
def test_it_ends_without_a_word_where_nobody_reads(buffered):
    """As in `... --help | head -1`; at the first line, or where all is written at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    command = [sys.executable, PAGE, "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


NO_SPACE = "No space left on device"
ADVICE = ". Free some space and give the same command again: a run resumes from its last checkpoint\n"


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("--help >&-", 0, ""),
        ("--help >/dev/full", 1, f"error: [Errno 28] {NO_SPACE}{ADVICE}"),
        ("--nothing 2>&-", 2, ""),
    ],
)
def test_output_or_standard_error_that_is_closed_or_full(words, status, told):
    command = ["bash", "-c", f'"$0" {PAGE} {words}', sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", told)


def test_a_letter_that_the_output_lacks_is_a_question_mark():
    code = "from common.command_line import until_reader_leaves\nwith until_reader_leaves(): print('\u00ab')"
    assert python("-c", code, env=os.environ | {"PYTHONIOENCODING": "ascii"}).stdout == "?\n"


class UnavailableError(Exception):
    """By this name TensorFlow tells of a worker that is gone."""


def raise_(error):
    raise error


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (UserError("no room"), 2, "no room\n"),
        (OSError(errno.ENOSPC, NO_SPACE, "x"), 1, f"[Errno 28] {NO_SPACE}: 'x'{ADVICE}"),
        (RuntimeError(f"graph\n/x; {NO_SPACE}\n"), 1, f"/x; {NO_SPACE}{ADVICE}"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "x"), 1, f"[Errno 122] Disk quota exceeded: 'x'{ADVICE}"),
    ],
)
def test_what_a_run_expects_is_one_line_and_a_status(error, status, told, capfd):
    with pytest.raises(SystemExit) as end:
        run(raise_, error)
    assert (end.value.code, capfd.readouterr().err) == (status, f"error: {told}")


def test_what_it_does_not_expect_has_its_trace():
    for error in (ValueError("a fault"), OSError(errno.EIO, "broken"), BrokenPipeError(), UnavailableError()):
        with pytest.raises(type(error)):
            run(raise_, error)


def test_a_lost_worker_ends_the_process_at_once():
    code = (
        "from common.command_line import run\nclass UnavailableError(Exception): pass\ndef main(error): raise error\n"
        "run(main, UnavailableError('/job:worker/replica:0/task:1 is gone\\ngraph'))"
    )
    done = python("-c", code, env=os.environ | {"TF_CONFIG": "{}"})
    assert (done.returncode, done.stderr) == (1, "error: lost another worker. /job:worker/replica:0/task:1 is gone\n")


def test_what_the_library_logs_is_printed(capsys):
    for _ in range(2):
        run(lambda config: logging.getLogger("keras_replicas").info("Resumed from step %d.", 3), None)
        assert capsys.readouterr().out == "\nResumed from step 3.\n"


def test_standard_error_is_shown_if_the_block_fails(capfd):
    with quiet_stderr():
        os.write(2, b"noise\n")
    assert capfd.readouterr().err == ""
    with pytest.raises(ImportError), quiet_stderr():
        os.write(2, b"the cause\n")
        raise ImportError
    assert capfd.readouterr().err == "the cause\n"


PRESSED = """
import dataclasses, os, signal, sys, time
from common.command_line import parse

# Of its own, whatever this process was started with, or blocks: in the background of a script, SIGINT is ignored.
signal.pthread_sigmask(signal.SIG_SETMASK, ())
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
    [("listens", 1, 0, True), ("listens", 2, -2, True), ("cannot save yet", 1, -15, False), ("ignored", 1, 0, False)],
)
def test_ctrl_c_asks_to_stop_and_a_second_one_ends_it_at_once(how, presses, status, told):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", PRESSED, how], cwd=ROOT, **pipes)
    assert process.stdout.readline() == "ready\n"
    for press in range(presses):
        process.send_signal(signal.SIGINT)
        line = process.stdout.readline() if told and not press else "told\n"
        assert line == "told\n", process.communicate()
    _, errors = process.communicate()
    assert process.returncode == status
    assert errors == ("\nSaving a checkpoint, then stopping. Press Ctrl-C again to quit at once.\n" if told else "")
