# SPDX-License-Identifier: Apache-2.0
"""The command line of the collection: `python -m recipes`.

Recipes are parsed, not imported, until one is run, so that every other command responds at once.
"""

import ast
import os
import re
import runpy
import shutil
import signal
import sys
import textwrap
from pathlib import Path

from common.command_line import fail, quiet_stderr, until_reader_leaves
from keras_replicas import UserError
from keras_replicas.__main__ import Parser, add_doctor_options
from keras_replicas.launch import add_options, launch
from recipes._copy import copy_recipe
from recipes._names import recipe_path, recipes

GUIDE = """\
Data-parallel training recipes for Keras 3 and KerasHub on tf.distribute.

  python -m recipes ls                            list the recipes, what each is for, and its time
  python -m recipes run bert_mlm                  train; --help after the name lists the options
  python -m recipes launch --workers 2 bert_mlm   the same on two workers, or on many machines
  python -m recipes fill-mask "A [MASK]."         fill masks with the model just trained
  python -m recipes classify "A text." "Another."  label a pair with the classifier just trained
  python -m recipes generate "Returns the"        continue a text with the causal model just trained
  python -m recipes export PRESET DEST            export a model to transformers, ONNX, SavedModel, LiteRT
  python -m recipes doctor                        verify on this machine that training is exact
  python -m recipes cp bert_mlm my_project        copy a recipe and its helpers into your project

The notebooks in notebooks/ explain the recipes step by step. --help after a command lists its options.

Next: python -m recipes run bert_mlm
"""


def list_recipes() -> None:
    """Prints each recipe's name, its docstring's first line, and the line that begins with `Time:`."""
    width = max(shutil.get_terminal_size(fallback=(160, 24)).columns, 40)  # a file or a pipe gets each line whole
    for name, path in recipes().items():
        doc = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()
        for start, line in [(name, doc[0]), *(("", line) for line in doc if line.startswith("Time:"))]:
            print(textwrap.fill(line, width, initial_indent=f"{start:20} ", subsequent_indent=" " * 21))


def last_preset(kind: str, recipe: str) -> str:
    """The preset made last in `runs/` for a kind of model, such as MaskedLM, which `recipe` trains.

    Raises a `UserError` when there is none.
    """
    tasks = [path for path in Path("runs").glob("*/preset/task.json") if path.is_file()]
    tasks.sort(key=lambda path: path.stat().st_mtime)
    presets = [task for task in tasks if kind in task.read_text(encoding="utf-8", errors="replace")]
    if not presets:
        raise UserError(f"no preset in runs/ yet; train one (python -m recipes run {recipe}), or give --preset DIR")
    return str(presets[-1].parent)


def main() -> None:
    """Reads the command line and does what it says."""
    parser = Parser(prog="python -m recipes", description="Without a command it prints a short guide.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("ls", help="list the recipes")
    add = commands.add_parser("run", help="run a recipe").add_argument
    add("name", metavar="NAME", nargs="?", help=f"one of {', '.join(recipes())}")
    add("options", metavar="...", nargs="...", help="its options; --help lists them")
    add_options(commands.add_parser("launch", help="run a recipe on several workers"), "NAME")
    add = commands.add_parser("cp", help="copy a recipe and the helpers it uses").add_argument
    add("name", metavar="NAME", help="the recipe")
    add("destination", metavar="DEST", help="folder to copy to; created if missing")
    add("--vendor", action="store_true", help="copy the library too, instead of depending on it")
    add("--as", default="common", metavar="NAME", dest="helpers", help="name of the helpers' folder (common)")
    add_doctor_options(commands.add_parser("doctor", help="verify on this machine that training is exact"))
    add = commands.add_parser("fill-mask", help="fill [MASK] in sentences with a trained model").add_argument
    add("sentences", nargs="+", metavar="SENTENCE")
    add("--preset", help="KerasHub name or folder; by default the last one made in runs/")
    add = commands.add_parser("classify", help="label texts with a trained classifier").add_argument
    add("texts", nargs="*", metavar="TEXT", help="one, or the two of a pair")
    add("--preset", metavar="DIR", help="by default the last one made in runs/")
    add("--data", default="", metavar="FILE", help="file of examples, .tsv, .csv or .jsonl, in place of texts")
    add("--text-columns", default="", metavar="A,B", help="names of the file's columns of texts: one, or two")
    add("--output", default="", metavar="FILE", help="file for the table of labels and probabilities")
    add = commands.add_parser("generate", help="continue texts with a trained causal language model").add_argument
    add("prompts", nargs="+", metavar="PROMPT")
    add("--preset", help="KerasHub name or folder; by default the last one made in runs/")
    add("--sampler", default="top-k", metavar="NAME", help="greedy, top-k (the default), top-p or random")
    add("--top-k", type=int, default=10, metavar="K", help="draw among the K likeliest tokens")
    add("--top-p", type=float, default=0.9, metavar="P", help="draw among the fewest tokens of probability P together")
    add("--temperature", type=float, default=1.0, metavar="T", help="below 1, likely tokens become likelier")
    add("--seed", type=int, default=0, metavar="N", help="seed of the draws: the same seed gives the same text")
    add("--tokens", type=int, default=40, metavar="N", help="tokens to add, at most")
    add = commands.add_parser("export", help="export a model to transformers, ONNX, and others").add_argument
    add("--format", default="huggingface", choices=["huggingface", "onnx", "saved_model", "litert"])
    add("preset", help="KerasHub name or folder, such as runs/bert_mlm/preset")
    add("destination", type=Path, help="folder, which must be empty or not exist")
    given = parser.parse_args()
    if odd := [word for word in sys.argv if re.search("[\udc80-\udcff]", word)]:  # which TensorFlow takes nowhere
        raise UserError(f"{odd[0]!r} is not UTF-8 text")

    if given.command not in ("run", "launch"):  # a recipe does it for itself
        os.environ["KERAS_BACKEND"] = "tensorflow"
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    match given.command:
        case None:
            print(GUIDE)
        case "ls":
            list_recipes()
        case "launch":
            given.script = str(recipe_path(given.script))
            raise SystemExit(launch(given))
        case "run":
            sys.argv = [f"python -m recipes run {given.name}", *given.options]
            runpy.run_path(str(recipe_path(given.name)), run_name="__main__")
        case "cp":
            copy_recipe(given.name, given.destination, given.vendor, given.helpers)
        case "doctor":
            with quiet_stderr():
                from recipes._doctor import doctor
            raise SystemExit(doctor(given))
        case "fill-mask":
            preset = given.preset or last_preset("MaskedLM", "bert_mlm")
            with quiet_stderr():
                from recipes._fill_mask import print_filled_masks
            print_filled_masks(preset, given.sentences)
        case "classify":
            preset = given.preset or last_preset("TextClassifier", "text_classifier")
            with quiet_stderr():
                from recipes._classify import classify
            classify(preset, given.texts, given.data, given.text_columns, given.output)
        case "generate":
            preset = given.preset or last_preset("CausalLM", "causal_lm")
            with quiet_stderr():
                from recipes._generate import generate
            draws = (given.sampler, given.top_k, given.top_p, given.temperature, given.seed)
            generate(preset, given.prompts, *draws, given.tokens)
        case "export":
            with quiet_stderr():
                from recipes._export import export
            loads = export(given.preset, given.destination, given.format)
            print(f"{given.destination}: {' '.join(sorted(path.name for path in given.destination.iterdir()))}")
            print(f"Load it: {loads}")


if __name__ == "__main__":
    try:
        with until_reader_leaves():
            main()
    except UserError as error:
        fail(error)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
