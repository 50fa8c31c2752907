"""The pages: what they name is there, what they say to type works, their figures are those of the results."""

import argparse
import ast
import dataclasses
import json
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from common.run.command_line import parse
from common.run.options import FIRST

import benchmarks.__main__
import recipes.__main__ as command_line
from benchmarks import readme
from common.training import LearningRateScaling
from notebooks import generate
from recipes import bert_from_scratch, bert_mlm, causal_lm, glue_controller, glue_custom_loop, text_classifier
from tests import test_pages

ROOT = Path(__file__).parent.parent
RECIPES = {
    module.__name__.split(".")[1]: module
    for module in (bert_mlm, bert_from_scratch, causal_lm, text_classifier, glue_controller, glue_custom_loop)
}
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in readme.PAGES}
README = PAGES["README.md"]
TROUBLES = PAGES["docs/troubleshooting.md"]
ALL = "\n".join(PAGES.values())
CODE = ("keras_replicas", "common", "recipes")
# Whatever says what to type: all pages but the changelog, which keeps what was, and the recipes' own help.
WITH_COMMANDS = {name: page for name, page in test_pages.PAGES.items() if name != "CHANGELOG.md"}
HELP = [command_line.GUIDE, *(module.__doc__ for module in RECIPES.values())]
# What a machine without a network is told.
NETWORK = ("from the Hugging Face Hub", "which needs a network on first use", "--push-to needs the network")


def section(page, title):
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)[1]


def shell_lines():
    """The commands of the shell blocks, without the two of the README that set everything up; those of the help."""
    pages = WITH_COMMANDS | {"README.md": README.split("```sh\n", 3)[3]}
    pages["README.md"] = f"```sh\n{pages['README.md']}"
    for block in re.findall(r"^```sh\n(.*?)^```", "\n".join(pages.values()), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            yield from (shlex.join(words) for words in commands_of(line))
    for line in re.findall(r"^ +(python -m .*)", "\n".join(HELP), re.MULTILINE):
        yield shlex.join(shlex.split(re.sub("  .*", "", line), comments=True))


def commands_of(line):
    """The words of each command of a line, its comment left out."""
    words = shlex.split(line, comments=True)
    while "&&" in words:
        yield words[: words.index("&&")]
        words = words[words.index("&&") + 1 :]
    yield words


def code_spans(pages=WITH_COMMANDS):
    """What stands between backticks in the text; of a table whose first column is another project's, the rest."""
    for name, page in pages.items():
        for line in re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL).splitlines():
            if name == "docs/coming-from.md" and line.startswith("|"):
                line = line.split(" | ", 1)[1]
            yield from re.findall(r"`([^`]+)`", line)


def all_commands():
    """Each command once, as `python ...` and so on."""
    found = dict.fromkeys(shell_lines())
    for span in code_spans():
        if re.match(r"launch --\S+ \d|doctor --", span):
            span = f"python -m recipes {span}"
        if re.match(r"(\.venv/bin/)?(python|pip|sbatch|kubectl|ray job|tensorboard|ruff|mypy) |\.ci/run$", span):
            found |= dict.fromkeys(shlex.join(words) for words in commands_of(span))
    found = dict.fromkeys(command.replace(".venv/bin/", "", 1) for command in found)
    whole = {
        "python -m recipes launch --max-restarts 3": "python -m recipes launch --workers 2 --max-restarts 3 bert_mlm"
    }
    return list(dict.fromkeys(whole.get(command, command) for command in found))


COMMANDS = all_commands()
OF_RECIPES = [command for command in COMMANDS if re.match("python -m recipes( |$)", command)]
# What is parsed here and started by other tests, or not at all: measuring takes hours, and writes the results.
OF_OTHER_PROGRAMS = [c for c in COMMANDS if re.match(r"python -m (benchmarks|notebooks\.generate)( |$)", c)]
BY_SCHEDULERS = [c for c in COMMANDS if re.match(r"sbatch|ray|kubectl|python recipes/(?!cluster/parameter)", c)]
# What installs from the network, and what .ci/run runs: these tests, the format, the lint and the types.
OF_TOOLS = r"^(pip|pre-commit|ruff|mypy|\.ci/run)\b|^python3? -m (pytest|venv|benchmarks\.\w+)\b"


def words_of(command):
    return shlex.split(command, comments=True)


@pytest.fixture(scope="module")
def placeholders(tmp_path_factory):
    """A folder with all that the pages name as the reader's own."""
    folder = tmp_path_factory.mktemp("of the reader")
    text = "".join(f"Line {i} of a text that is made of words, and of the number {i * i}.\n\n" for i in range(400))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the"]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    for name in ("FILE", "my.txt", "my_texts/a.txt", "simplewiki/a.txt", "FOLDER/a.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    answers = "".join(f'{{"prompt": "{i}?", "response": "{i}!"}}\n' for i in range(99))
    (folder / "answers.jsonl").write_text(answers)
    pairs = "".join(f"the cat saw dog {i},a dog was seen by cat {i},{i % 2}\n" for i in range(200))
    for name in ("my.csv", "pairs.csv"):
        (folder / name).write_text(f"a,b,same\n{pairs}")
    (folder / "essays.csv").write_text("essay,mark\n" + "".join(f"essay number {i},{i % 7 / 2}\n" for i in range(200)))
    (folder / "reviews.csv").write_text("review,stars\n" + "".join(f"a film {i},{i % 5}\n" for i in range(200)))
    (folder / "GLUE/SST-2").mkdir(parents=True)
    for split in ("train", "dev"):
        rows = "".join(f"film number {i} is {'good' if i % 2 else 'bad'} \t{i % 2}\n" for i in range(200))
        (folder / f"GLUE/SST-2/{split}.tsv").write_text(f"sentence\tlabel\n{rows}")
    for preset in ("FOLDER", "runs/bert_mlm/preset", "runs/bert_from_scratch/preset"):
        (folder / preset).mkdir(parents=True, exist_ok=True)
        settings = {"config": {"max_sequence_length": 512, "vocabulary_size": len(pieces)}}
        (folder / preset / "config.json").write_text(json.dumps(settings))
        (folder / preset / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def at_the_reader(placeholders, monkeypatch):
    monkeypatch.chdir(placeholders)


def test_the_first_two_blocks_set_everything_up_and_test_it():
    first, second = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[:2]
    assert first.splitlines()[-1] == ".venv/bin/python -m recipes run bert_mlm"
    assert second.splitlines()[-1] == ".venv/bin/python -m pytest -q -n 2 --dist loadfile"


def test_the_readme_is_short():
    assert len(README.split()) <= 1500


def test_what_is_named_exists():
    """tests/test_pages.py follows the links."""
    pages = "\n".join(WITH_COMMANDS.values())
    paths = re.findall(r"\b(?:keras_replicas|common|recipes|docs|benchmarks|tests|notebooks)/[\w./-]*\w\.\w+", pages)
    paths += [f"benchmarks/{module}.py" for module in re.findall(r"python -m benchmarks\.(\w+)", pages)]
    paths += [f"notebooks/{notebook}" for notebook in re.findall(r"`(\w+\.ipynb)`", pages)]
    assert [path for path in paths if not (ROOT / path).is_file() and "NAME" not in path] == []


def test_the_readme_and_the_help_begin_with_the_same_options():
    named = set(re.findall(r"--([a-z][a-z-]+)", section(README, "Options")))
    first = {name.replace("_", "-") for name in FIRST}
    assert named == first | {"help"}


def test_the_notebooks_page_names_each():
    named = re.findall(r"^\| \[`(\w+)`\]", WITH_COMMANDS["notebooks/README.md"], re.MULTILINE)
    assert sorted(named) == sorted(generate.narratives())


def test_each_page_of_docs_is_linked_from_the_readme():
    assert {name for name in PAGES if name != "README.md"} <= set(re.findall(r"\]\((docs/[\w-]+\.md)", README))


def test_each_recipe_and_each_name_of_a_helper_is_one():
    assert set(re.findall(r"^\| `(\w+)` \|", section(README, "The recipes"), re.MULTILINE)) == set(RECIPES)
    sources = "".join(path.read_text() for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    page = "docs/coming-from.md"
    names = re.findall(r"^(\w+)(?:\(.*|)$", "\n".join(code_spans({page: PAGES[page]})), re.MULTILINE)
    # What begins with a small letter and is not called is something else: an option's value, an entry, a recipe.
    ours = {name for name in names if name[0].isupper() or f"`{name}(" in PAGES[page]}
    assert {"Checkpoints", "FitLog", "distribute", "when_best"} <= ours
    defined = set(re.findall(r"(?:def|class) (\w+)", sources)) | {"MultiWorkerMirroredStrategy"}
    assert ours <= defined | {"TensorflowTrainer", "Trainer"}


def test_every_command_is_of_a_known_kind():
    files = r"((recipes|recipes/cluster|my_project|docs/upstream)/\w+|train)\.py"
    ours = rf"python (-m (keras_replicas|recipes)\b|-m benchmarks\b|-m notebooks\.generate\b|{files}\b)"
    kinds = rf"{ours}|(tensorboard|sbatch|ray job|kubectl) |{OF_TOOLS}"
    assert [command for command in COMMANDS if not re.match(kinds, command)] == []
    assert len(OF_RECIPES) > 20


def test_packages_that_are_named_can_be_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"pip install (?:-q )?-e '\.\[(\w+)\]'", "\n".join(WITH_COMMANDS.values())))
    assert extras <= set(project["optional-dependencies"])


def test_what_contributors_type_is_what_is_there():
    tools = [command for command in COMMANDS if re.search(OF_TOOLS, command)]
    assert len(tools) > 8
    named = "\n".join((ROOT / file).read_text() for file in ("pyproject.toml", ".pre-commit-config.yaml", ".ci/run"))
    for command in tools:
        words = words_of(command)
        if words[:3] == ["python", "-m", "pytest"]:
            assert all((ROOT / word).is_file() for word in words if word.startswith("tests/"))
            marks = [words[at + 1] for at, word in enumerate(words) if word == "-m"][1:]
            assert all(f'"{mark}: ' in named for mark in marks)
        elif words[0] == ".ci/run":
            assert os.access(ROOT / words[0], os.X_OK)
        else:
            assert re.search(rf"(\b|/){words[0]}\b", f"{named} python3 python pip pre-commit")


def check_options_of(name, options, capsys):
    """Builds the recipe's `Config`; what it lacks may be the network alone."""
    if "--help" in options:
        return
    try:
        parse(RECIPES[name].Config, RECIPES[name].__doc__, options)
    except SystemExit as end:
        told = capsys.readouterr().err
        assert end.code == 2 and any(words in told for words in NETWORK), f"{name} {shlex.join(options)}: {told}"


def parsed(main, command, monkeypatch):
    """What the words of a command are to a program, which does nothing else."""

    class Parsed(Exception):
        pass

    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser):
        raise Parsed(parse_args(parser))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", words_of(command)[2:])
    with pytest.raises(Parsed) as found:
        main()
    (arguments,) = found.value.args
    return arguments


def test_the_words_of_a_command_parse(at_the_reader, monkeypatch, capsys):
    for command in OF_RECIPES:
        with monkeypatch.context() as patch:
            arguments = parsed(command_line.main, command, patch)
        name = getattr(arguments, "name", None) or getattr(arguments, "script", None) or "bert_mlm"
        assert name in RECIPES, command
        if arguments.command in ("run", "launch"):
            options = arguments.options if arguments.command == "run" else arguments.arguments
            check_options_of(name, options, capsys)


def test_the_words_of_our_other_programs_parse(at_the_reader, monkeypatch):
    for command in OF_OTHER_PROGRAMS:
        program = benchmarks.__main__ if command.startswith("python -m benchmarks") else generate
        with monkeypatch.context() as patch:
            arguments = parsed(program.main, command, patch)
        assert set(getattr(arguments, "names", [])) <= {*generate.narratives(), "NAME"}, command


def test_what_schedulers_start_parses(at_the_reader, capsys):
    for words in map(words_of, BY_SCHEDULERS):
        place, script = next((i, word) for i, word in enumerate(words) if word.startswith("recipes/"))
        assert (ROOT / script).is_file()
        if script.endswith("ray_launch.py"):
            source = (ROOT / script).read_text()
            while words[place + 1].startswith("--"):
                assert f'"{words[place + 1]}"' in source
                place += 2
        if len(words) > place + 1:
            check_options_of(words[place + 1], words[place + 2 :], capsys)


def test_options_that_are_named_exist_and_take_the_values_shown(at_the_reader, capsys):
    options = {
        name: {"--" + field.name.replace("_", "-") for field in dataclasses.fields(module.Config)}
        for name, module in RECIPES.items()
    }
    others = {
        option
        for path in (
            "recipes/__main__.py",
            "keras_replicas/launch.py",
            "keras_replicas/__main__.py",
            "recipes/cluster/ray_launch.py",
        )
        for option in re.findall(r'"(--[a-z-]+)"', (ROOT / path).read_text())
    }
    spans = {span for span in code_spans(PAGES) if span.startswith("--")}
    assert len(spans) > 40
    for span in spans:
        words = words_of(span)
        named = {word for word in words if word.startswith("--")}
        if named <= others or named == {"--help"} or any(word.startswith("--tyro-") for word in named):
            continue
        having = [name for name in RECIPES if named <= options[name]]
        assert having, span
        if len(words) > len(named):
            wrong = []
            for name in having:
                try:
                    check_options_of(name, words, capsys)
                except AssertionError as error:
                    wrong.append(error)
            assert len(wrong) < len(having), wrong


def test_the_table_of_strategies_and_that_of_scaling_are_those_of_the_code():
    sources = "".join(path.read_text() for path in (ROOT / "keras_replicas").glob("*.py"))
    rows = section(README, "Data parallel").split("\n| ")[3:]
    strategies = [re.search(r"\w+Strategy", row).group() for row in rows]
    assert set(strategies) == set(re.findall(r"\b(\w+Strategy)\(", sources)) | {"ParameterServerStrategy"}
    rules = PAGES["docs/learning-rate.md"]
    assert set(re.findall(r"^\| `(\w+)` \|", rules, re.MULTILINE)) == set(get_args(LearningRateScaling))
    papers = re.findall(r"arXiv:([\d.]+\d)", (ROOT / "common/training/scaling.py").read_text())
    assert papers and set(papers) == set(re.findall(r"arXiv:([\d.]+\d)", rules))


def test_the_picture_of_the_architecture_names_each_module_of_common():
    (picture,) = re.findall(r"^```text\n(.*?)^```", PAGES["docs/architecture.md"], re.MULTILINE | re.DOTALL)
    title, *lines = picture[picture.index("\ncommon/") : picture.index("\ndocs/")].strip().splitlines()
    rooms = {"": re.findall(r"(\w+),", title.split(": ")[1])}
    for line in lines:
        if room := re.match(r"  (\w+)/  ", line):
            named = rooms[room[1]] = []
        else:
            named += re.findall(r"\w+", line)
    for room, names in rooms.items():
        assert sorted(names) == sorted(path.stem for path in (ROOT / "common" / room).glob("[a-z]*.py"))
    assert len(rooms) == 1 + len(list((ROOT / "common").glob("*/__init__.py")))


def test_troubleshooting_has_each_fault_of_keras_with_its_message():
    faults = PAGES["docs/keras-under-tf-distribute.md"]
    rows = re.findall(r"^\| \[.+?\]\(#(.+?)\) \| .+ \| `(.+)` \| (?:yes|no) \|$", faults, re.MULTILINE)
    assert len(rows) > 10
    for anchor, shown in rows:
        assert f"(keras-under-tf-distribute.md#{anchor})" in TROUBLES
        if not re.search(r"\d|both", shown) or "dimension" in shown:  # a message, not a figure
            assert shown in TROUBLES
    for message in re.findall(r"^\| \[`(.+?)`\]", TROUBLES, re.MULTILINE):
        assert message in faults


def test_messages_of_our_own_are_as_the_code_has_them():
    def texts(path):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)

    printed = "\n".join(text for folder in CODE for path in (ROOT / folder).rglob("*.py") for text in texts(path))
    ours = section(TROUBLES, "Several workers") + section(TROUBLES, "Text, models, folders")
    messages = re.findall(r"^\| `(.+?)`", ours, re.MULTILINE)
    assert len(messages) > 15
    assert [message for message in messages if message not in printed] == []


def test_each_table_of_results_stands_on_one_page():
    assert sorted(re.findall(r"^<!-- (?!end )([\w-]+) -->$", ALL, re.MULTILINE)) == sorted(readme.tables())


def test_the_claims_are_those_of_the_results_whatever_they_are():
    doctor = [{"check": "a, 2 replicas", "passed": True, "largest_difference": away} for away in (2e-16, 3e-15)]
    doctor += [doctor[0] | {"passed": False, "largest_difference": None}, doctor[0] | {"check": "interrupted"}]
    faults = [{"identical": True}, {"identical": False}, {"identical": True}]
    speeds = {"published Keras example, padded to 512": 4, "transformers, a": 10, "transformers, b": 20}
    speeds |= {"fit, one device": 90, "fit, 2 replicas": 15, "fit, 2 replicas, jit": 10}
    contenders = {name: {"tokens_per_second": [speed, speed, 99]} for name, speed in speeds.items()}
    scores = {"mrpc": {"ours": [{"accuracy": 0.7}, {"accuracy": 0.7}], "transformers": [{"accuracy": 0.8}] * 2}}
    sizes = {size: {"contenders": contenders} for size in ("tiny", "base")}
    beside = {"recipes": {"bert_mlm": {"speeds": {"fit": [16.0], "fit, jit": [9.0], "transformers, a": [20.0]}}}}
    paired = {"epochs": 7, "predictions": 9, "equal_predictions": 8}
    told = readme.claims({"checks": doctor}, faults, {"sizes": sizes}, beside, scores, paired)
    assert "2 of 3 small runs" in told and "to 3e-15 in float64" in told
    assert "of 3 runs" in told and ", 2 ended with" in told
    assert (
        "`bert_mlm` trains 0.8 times as fast as transformers" in told and "3.8 times as fast as the published" in told
    )
    assert "accuracy 0.700 ± 0.000 over 2 seeds, 0.800 ± 0.000 by transformers" in told
    assert "after 7 epochs 8 of 9 predictions are the same" in told


def test_the_figures_of_a_page_are_those_of_the_results():
    for name, page in PAGES.items():
        assert readme.with_tables(page) == page, name


def test_the_recipes_table_shows_the_runs_of_its_commands():
    for name in RECIPES:
        found = readme._results("wikitext-2")["results"] if name == "bert_from_scratch" else readme._results(name)
        config = RECIPES[name].Config(**found["config"])
        same = dataclasses.replace(config, workdir=RECIPES[name].Config.workdir)
        assert same == parse(RECIPES[name].Config, "", shlex.split(readme.RECIPES[name][1]))
    lm = {"seconds": 60.4, "val_loss": 4.0, "val_unigram_loss": 6.5}
    classifier = {
        "seconds": 119.0,
        "val_accuracy": 0.9,
        "val_majority_accuracy": 0.5,
        "val_bag_of_words_accuracy": 0.51,
    }
    table = readme.recipes_table(
        dict.fromkeys(["bert_mlm", "bert_from_scratch"], lm) | dict.fromkeys(RECIPES, classifier)
    )
    assert "| 2 min | accuracy 0.900; bag of words 0.510, majority class 0.500 |" in table
    table = readme.recipes_table(dict.fromkeys(RECIPES, lm))
    assert "| `python -m recipes run bert_mlm` | 60 s | loss 4.000, 2.500 nats below the unigram baseline |" in table


def test_the_learning_rates_of_the_page_are_those_measured():
    page = PAGES["docs/small-budget.md"]
    for run in readme._results("learning_rates"):
        rate = re.sub("e-0", "e-", f"{run['learning_rate']:.2e}").replace("0e-", "e-").replace(".0e-", "e-")
        assert re.search(rf"{run['val_loss']:.3f}\**  ?\({rate}\)", page), run
