"""All six recipes: what a run computes, whatever the replicas, workers and kills; and what it leaves behind."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest

from benchmarks.faults import children, weights_of
from common.data.byte_pairs import train_byte_pairs
from common.data.labelled import role_pairs
from common.data.vocabulary import WORDPIECE_TOKENS, wordpieces
from common.model.causal_lm import END
from common.model.masked_lm import masked_lm_from_size
from keras_replicas import UserError
from recipes import __main__
from tests.conftest import ROOT, slow
from tests.test_log import board, lines_of
from tests.test_rows import examples

LANGUAGE_MODELS = ["bert_mlm", "bert_from_scratch", "causal_lm"]
OF_TEXTS = ["text_classifier", "glue_controller", "glue_custom_loop"]
FIT = [*LANGUAGE_MODELS, "text_classifier"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Files of one's own: a few generated pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    for split, rows in role_pairs().items():
        lines = [f"{first},{second},{same}" for first, second, same in rows[: 201 if split == "train" else 44]]
        (folder / f"{split}.csv").write_text("\n".join(["first,second,same", *lines]))
    return folder


@pytest.fixture(scope="module")
def options(pairs, wikitext):
    """A function of a recipe's name and of changes: options of a run that takes seconds, of two uneven epochs."""

    def of(name, **changes):
        small = {"model": "nano", "vocabulary_size": 300, "seq_length": 32, "dropout": 0.0, "epochs": 2}
        small |= {"replicas": 2, "batch_size": 12, "lr_scaling": "none", "learning_rate": 1e-3, "checkpoint_every": 4}
        if name == "bert_from_scratch":
            small["architecture"] = "roberta"
        if name in LANGUAGE_MODELS:
            return small | {"corpus": str(wikitext)} | changes
        columns = {"text_columns": "first,second", "label_column": "same"}
        return small | {"task": "own", "data": str(pairs)} | columns | changes

    return of


def train(name, of):
    recipe = importlib.import_module(f"recipes.{name}")
    return recipe.train_and_evaluate(recipe.Config(**of))


@pytest.fixture(scope="module")
def trained(options, tmp_path_factory):
    """A function of a recipe's name and of changes: the results of a run, and its folder; each is trained once."""
    runs = {}

    def of(name, **changes):
        key = str((name, sorted(changes.items())))
        if key not in runs:
            workdir = tmp_path_factory.mktemp(name) / "run"
            runs[key] = train(name, options(name, workdir=str(workdir), **changes)), workdir
        return runs[key]

    return of


def command(name, of, verb="run", *words):
    flags = [f"--{option.replace('_', '-')}={value}" for option, value in of.items() if not isinstance(value, bool)]
    flags += [f"--{option.replace('_', '-')}" for option, value in of.items() if value is True]
    return [sys.executable, "-m", "recipes", verb, *words, name, *flags]


def same_losses(ours, theirs, rtol=1e-5):
    """Of two runs: of each step, and of the validation."""
    steps, others = ([line["loss"] for line in lines_of(workdir)] for _, workdir in (ours, theirs))
    np.testing.assert_allclose(steps, others, rtol=rtol)
    assert ours[0]["val_loss"] == pytest.approx(theirs[0]["val_loss"], rel=rtol)


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *OF_TEXTS])
def test_what_a_run_leaves(name, trained, capsys):
    results, workdir = trained(name)
    saved = json.loads((workdir / "results.json").read_text())
    assert saved == json.loads(json.dumps(results))
    assert (saved["recipe"], saved["config"]["workdir"]) == (name, str(workdir))
    for entry in ("workers", "steps", "seconds", "tokens_per_second", "train_loss", "peak_memory_mb"):
        assert saved[entry] > 0, entry
    assert (saved["replicas"], saved["global_batch_size"], saved["resumed_from_step"]) == (2, 24, None)
    assert 0 <= saved["padding_fraction"] < 1 and {"keras", "tensorflow"} <= saved["versions"].keys()
    lines = lines_of(workdir)
    assert [line["step"] for line in lines] == [*range(1, saved["steps"] + 1)]
    rates = [line["learning_rate"] for line in lines]
    assert saved["learning_rate"] == {"first": rates[0], "peak": max(rates), "last": rates[-1]}
    assert max(rates) == pytest.approx(1e-3) and 0 < rates[-1] < rates[0]
    shown = board(workdir)
    if name != "glue_controller":  # whose loops show their means
        assert shown["train/loss"] == pytest.approx({line["step"]: line["loss"] for line in lines})
    if name in LANGUAGE_MODELS:
        assert saved["val_perplexity"] == pytest.approx(np.exp(saved["val_loss"]))
        assert saved["val_bits_per_character"] > 0 and saved["test_unigram_loss"] > 0
        assert ("samples" in shown) == (name == "causal_lm")
        task = keras_hub.models.CausalLM if name == "causal_lm" else keras_hub.models.MaskedLM
        task.from_preset(str(workdir / "preset"))
        card = workdir / "preset/README.md"  # which may be published
        assert name == "bert_mlm" or ('"val_loss"' in card.read_text() and "prompts" not in card.read_text())
    else:
        assert {"val_bag_of_words_f1", "val_majority_accuracy"} <= saved.keys()
        table = [line.split("\t") for line in (workdir / "predictions/validation.tsv").read_text().splitlines()]
        assert table[0] == ["index", "prediction"] and len(table) == 45
        plain = keras_hub.models.TextClassifier.from_preset(str(workdir / "preset"))
        rows = role_pairs()["validation"][:44]
        logits = plain.predict(tuple([row[i] for row in rows] for i in range(2)), verbose=0)
        assert [[str(i), str(row.argmax())] for i, row in enumerate(logits)] == table[1:]
        assert (workdir / "best/task.json").exists() == (name == "glue_controller")
    capsys.readouterr()
    assert train(name, saved["config"]) == saved  # again
    assert "is complete; overwrite it to start afresh" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "replicas"), [*((name, 1) for name in (*LANGUAGE_MODELS, *OF_TEXTS)), ("bert_mlm", 3)]
)
def test_replicas_do_not_change_what_is_computed(name, replicas, trained):
    """The last batch of an epoch divides by neither 2 nor 3."""
    of = trained(name, replicas=replicas, batch_size=24 // replicas)
    assert of[0]["replicas"] == replicas and of[0]["global_batch_size"] == 24
    same_losses(of, trained(name), rtol=2e-5)


@pytest.mark.parametrize("name", OF_TEXTS[1:])
def test_fit_a_controller_and_a_loop_compute_the_same(name, trained):
    same_losses(trained(name), trained("text_classifier"))


@pytest.mark.parametrize("change", [{"accumulate": 2}, {"jit": True}], ids=str)
@pytest.mark.parametrize("name", ["bert_mlm", *slow("text_classifier")])
def test_how_a_step_is_computed_does_not_change_what_is(name, change, trained):
    same_losses(trained(name, **change), trained(name))


@pytest.mark.parametrize("name", ["bert_mlm", "glue_custom_loop", *slow(*LANGUAGE_MODELS[1:], *OF_TEXTS[:2])])
def test_a_dry_run_prints_the_plan_and_writes_nothing(name, options, tmp_path, capsys):
    assert train(name, options(name, dry_run=True, max_steps=9, workdir=str(tmp_path / "run"))) == {}
    said = capsys.readouterr().out
    assert re.search(r"\d parameters in float32\n9 steps, \d+ in an epoch; in the first, [1-9]\d* tokens\n", said)
    assert f"  1.00e-03 {'#' * 40}\n" in said and said.count("#\n") > 5  # the learning rate by step
    assert "the first sequence's input:\n    " in said
    assert ("the first sequence's labels:\n    " in said) == (name in LANGUAGE_MODELS)
    assert ("memory in the first 3" in said) == (name in FIT)
    assert not (tmp_path / "run").exists() and "each replica updates" not in said


def test_the_plan_says_where_one_replica_of_a_cpu_is_faster(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("common.log.MOST_WEIGHTS", 10)
    train("bert_mlm", options("bert_mlm", dry_run=True, max_steps=1, workdir=str(tmp_path / "run")))
    assert re.search(
        r"\neach replica updates all [\d,]{6,} weights: .* with --replicas 1 and .*\n", capsys.readouterr().out
    )


def test_it_goes_on_from_its_own_preset(trained):
    """At a rate of zero it is the model that was saved."""
    results, workdir = trained("bert_mlm")
    again, _ = trained("bert_mlm", preset=str(workdir / "preset"), model=None, learning_rate=1e-12, max_steps=1)
    assert again["val_loss"] == pytest.approx(results["val_loss"], rel=1e-5)


@pytest.fixture
def recipes(monkeypatch, capsys):
    """A function that does what `python -m recipes` does, and returns the lines that it prints."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["recipes", *map(str, words)])
        capsys.readouterr()
        __main__.main()
        return capsys.readouterr().out.splitlines()

    return run


def test_masks_are_filled_and_texts_continued(trained, recipes):
    (_, masked), (_, causal) = trained("bert_mlm"), trained("causal_lm")
    _, sentence, *guesses = recipes("fill-mask", "The [MASK] of [MASK].", "--preset", masked / "preset")
    assert sentence == "The [MASK] of [MASK]." and len(guesses) == 10  # five for each
    words = "generate", "You may", "--preset", causal / "preset", "--tokens", 8, "--sampler"
    assert recipes(*words, "top-k") == recipes(*words, "top-k") != recipes(*words, "top-k", "--seed", 1)
    assert recipes(*words, "greedy") == recipes(*words, "top-k", "--top-k", 1)
    assert recipes(*words, "greedy")[0].startswith("You may")


def test_texts_are_classified(trained, recipes, pairs, tmp_path):
    _, workdir = trained("text_classifier")
    preset = "--preset", workdir / "preset"
    first, second, _ = role_pairs()["validation"][0]
    header, answer = (line.split("\t") for line in recipes("classify", first, second, *preset))
    assert header == ["index", "prediction", "0", "1"] and sum(map(float, answer[2:])) == pytest.approx(1, abs=1e-3)
    table, columns = tmp_path / "table.tsv", ("--text-columns", "first, second")
    file = "--data", pairs / "validation.csv"
    assert recipes("classify", *file, *columns, "--output", table, *preset) == [f"{table}: 44 predictions"]
    rows = ["\t".join(line.split("\t")[:2]) for line in table.read_text().splitlines()]
    assert rows == (workdir / "predictions/validation.tsv").read_text().splitlines()
    (empty := tmp_path / "empty.csv").write_text("first,second\n")
    (link := tmp_path / "link").symlink_to(tmp_path / "gone")
    (odd := tmp_path / "odd.csv").write_text(
        "first,second\n" + "a,b\n" * 1000 + "only\n"
    )  # one may be left out elsewhere
    for words, told in (
        ([], "give one text, or two"),
        (["a", *file, *columns], "give one text, or two"),
        (["a"], r"takes 2 text\(s\) for an example, not 1"),
        (file, "--data and --text-columns"),
        (["a", "b", *columns], "--data and --text-columns"),
        (["--data", empty, *columns], "empty.csv has no examples"),
        (["--data", odd, *columns], "odd.csv, line 1002: 1 fields"),
        (["a", "b", "--output", table], "cannot write .*table.tsv .it already exists.: give a new file"),
        (["a", "b", "--output", link], "cannot write .*link .it already exists.: give a new file"),
        (["a", "b", "--output", "x" * 300], "cannot write x* .*File name too long.*: give a new file"),
        (["a", "b", "--output", f"{tmp_path}/no/"], "there is no folder .*/no: make it"),
        (["a", "b", "--preset", trained("bert_mlm")[1] / "preset"], "no classifier that a recipe has saved"),
    ):
        with pytest.raises(UserError, match=told):
            recipes("classify", *preset, *words)


STOPS = [(name, signal.SIGKILL) for name in (*LANGUAGE_MODELS, *OF_TEXTS)]
STOPS += [(name, signal.SIGTERM) for name in ("bert_mlm", "glue_controller", "glue_custom_loop")]


def stopped_after(steps, words, of, sent, child=None):
    """Runs a command, sends a signal once so many steps are done, and returns the status."""
    begun = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while begun.poll() is None and len(lines_of(of["workdir"])) < steps:
        time.sleep(0.002)
    os.kill(begun.pid if child is None else children(begun.pid)[child], sent)
    return begun


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sent"), STOPS)
def test_a_run_that_was_stopped_ends_with_the_same_bits(name, sent, trained, options, tmp_path):
    """Stopped in a process of its own, at any step; it goes on in this one, with dropout."""
    long = {"max_steps": 60, "epochs": 20, "dropout": 0.1}
    long |= {"steps_per_loop": 3} if name == "glue_controller" else {}
    _, whole = trained(name, **long)
    of = options(name, workdir=str(tmp_path / "run"), **long)
    begun = stopped_after(21, command(name, of), of, sent)
    assert begun.wait(600) == (143 if sent == signal.SIGTERM else -9)
    results = train(name, of)
    assert 16 <= results["resumed_from_step"] < 60 and results["steps"] == 60
    assert lines_of(of["workdir"]) == lines_of(whole)
    ours, theirs = weights_of(tmp_path / "run"), weights_of(whole)
    assert len(ours) > 10 and ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_from_scratch", "causal_lm", "text_classifier", "glue_controller"])
def test_two_workers_compute_what_one_process_does(name, trained, options, tmp_path):
    of = options(name, workdir=str(tmp_path / "run"))
    del of["replicas"]
    done = subprocess.run(command(name, of, "launch", "--workers", "2"), cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "\nwork directory " in done.stdout
    two = json.loads((tmp_path / "run/results.json").read_text())
    assert (two["workers"], two["replicas"], trained(name)[0]["workers"]) == (2, 2, 1)
    same_losses((two, tmp_path / "run"), trained(name), rtol=2e-6)


@pytest.mark.slow
def test_with_another_number_of_workers_it_goes_on_as_one_run(trained, options, tmp_path):
    """Two workers, of which one is killed and all are started again; then three; then one process."""
    long = {"max_steps": 60, "epochs": 20}
    of = options("bert_mlm", workdir=str(tmp_path / "run"), **long) | {"replicas": 1}
    launch = command("bert_mlm", of, "launch", "--workers", "2", "--max-restarts", "1")
    begun = stopped_after(6, launch, of, signal.SIGKILL, child=1)
    while len(lines_of(of["workdir"])) < 21:
        time.sleep(0.01)
    begun.terminate()
    assert begun.wait(600) == 143
    begun = stopped_after(41, command("bert_mlm", of, "launch", "--workers", "3"), of, signal.SIGTERM)
    assert begun.wait(600) == 143
    results = train("bert_mlm", of)
    assert results["resumed_from_step"] >= 41 and results["global_batch_size"] == 24
    same_losses((results, tmp_path / "run"), trained("bert_mlm", **long), rtol=2e-6)


def test_a_model_is_trained_on_shards_of_examples_with_their_own_tokenizer(options, tmp_path, capsys):
    tokenizer = wordpieces([*WORDPIECE_TOKENS, *(f"word{i}" for i in range(95))], "")
    examples(tmp_path / "data", [[*range(start, start + 20)] for start in range(5, 25)], tokenizer)
    (tmp_path / "data/vocab.txt").write_text("\n".join(tokenizer.get_vocabulary()))
    results = train(
        "bert_from_scratch", options("bert_from_scratch", workdir=str(tmp_path / "run"), data=str(tmp_path / "data"))
    )
    assert results["steps"] == 2 and 3 < results["train_loss"] < 6
    assert "validation has 240 tokens: too few to tell a better model from a worse one" in capsys.readouterr().out
    saved = keras_hub.models.MaskedLM.from_preset(str(tmp_path / "run/preset"), compile=False)
    assert saved.preprocessor.tokenizer.get_vocabulary() == tokenizer.get_vocabulary()
    of_text = train_byte_pairs(lambda: iter(["Some text."] * 9), "", 270)
    with pytest.raises(UserError, match="needs the tokenizer of a BERT or RoBERTa, not a GPT2Tokenizer"):
        masked_lm_from_size(
            "nano", keras_hub.models.GPT2Tokenizer({**of_text.vocabulary, END: 270}, of_text.merges), 0.0, 32
        )


# Prompts of all lengths, and what follows from them.
ANSWERS = [{"prompt": f"{'Say, ' * (i % 5)}what comes after {i}? ", "response": f"It is {i + 1}."} for i in range(99)]


@pytest.mark.slow
def test_of_prompts_with_answers_the_answers_alone_are_learned(trained, tmp_path):
    """By KerasHub alone, an example at a time."""
    for split, rows in (("train", ANSWERS[:80]), ("validation", ANSWERS[80:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"data": str(tmp_path), "seq_length": 64}
    two, workdir = trained("causal_lm", **given)
    same_losses(trained("causal_lm", replicas=1, batch_size=24, **given), (two, workdir))
    plain = keras_hub.models.CausalLM.from_preset(str(workdir / "preset"), compile=False)
    tokenizer, losses = plain.preprocessor.tokenizer, []
    for row in ANSWERS[80:]:
        start = [tokenizer.start_token_id, *tokenizer(row["prompt"])]
        ids = np.array([[*start, *tokenizer(row["response"]), tokenizer.end_token_id]])
        logits = plain({"token_ids": ids[:, :-1], "padding_mask": np.ones_like(ids[:, :-1])})
        each = keras.losses.sparse_categorical_crossentropy(ids[:, 1:], logits, from_logits=True)
        losses += np.array(each)[0, len(start) - 1 :].tolist()
    assert two["val_loss"] == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.slow
def test_numbers_are_predicted(trained):
    number = {"label_column": "same", "regression": True}
    results, workdir = trained("glue_custom_loop", **number)
    same_losses(trained("glue_custom_loop", replicas=1, batch_size=24, **number), (results, workdir))
    rows = (workdir / "predictions/validation.tsv").read_text().splitlines()[1:]
    predicted, labels = [float(row.split("\t")[1]) for row in rows], [row[2] for row in role_pairs()["validation"][:44]]
    assert results["val_loss"] == pytest.approx(np.mean(np.subtract(predicted, labels) ** 2), rel=1e-4)
    correlation = np.corrcoef(predicted, labels)[0, 1]  # of what is printed, with six decimals
    assert results["val_pearson"] == pytest.approx(correlation, abs=1e-3)
    assert not [name for name in results if "accuracy" in name or "f1" in name]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_learns(precision, trained):
    results, _ = trained("bert_mlm", precision=precision, max_steps=200, epochs=99, learning_rate=5e-3)
    assert results["val_loss"] < results["val_unigram_loss"]


@pytest.mark.long
@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *OF_TEXTS])
def test_the_default_run_learns(name, tmp_path):
    results = train(name, {"workdir": str(tmp_path / "run")})
    if name in LANGUAGE_MODELS:
        assert results["val_loss"] < results["val_unigram_loss"] - 1.9
    else:
        assert results["val_accuracy"] > 0.95
