# SPDX-License-Identifier: Apache-2.0
"""Lists the results that are of older code of the library or the recipes; `--measure` measures them again.

Stopped and started again, it goes on with what is still stale. All takes hours, and wants a quiet machine, the packages
of `.[test,bench,export]` and, for hosts and disks of its own, root.
"""

import argparse
import os
import re
import subprocess
import sys

from benchmarks import wikitext
from benchmarks.machine import RESULTS, ROOT, existing, of_this_code, with_word
from benchmarks.waits import RECIPES
from keras_replicas import UserError

# For each file of results, what measures it: the words after `python -m`. {preset} and the like are this one's options.
COMMANDS = {
    **dict.fromkeys((*RECIPES, "doctor"), "benchmarks defaults"),
    "throughput": "benchmarks throughput --corpus {wikitext} --vocabulary {vocabulary}",
    "causal": "benchmarks causal",
    "scaling": "benchmarks scaling --corpus {wikitext} --vocabulary {vocabulary}",
    "input": "benchmarks input --corpus {wikitext} --vocabulary {vocabulary}",
    "waits": "benchmarks waits",
    "price": "benchmarks price",
    "export": "benchmarks export",
    "conformance": "benchmarks conformance",
    "keras_tests": "benchmarks keras_tests",
    "goodput": "benchmarks goodput",
    "quality": "benchmarks quality --corpus {wikitext} --vocabulary {vocabulary}",
    "fine_tuning": "benchmarks fine_tuning --preset {preset} --mrpc {mrpc} --sst2 {sst2}",
    "fine_tuning_scores": "benchmarks fine_tuning_scores --preset {preset} --mrpc {mrpc} --rte {rte}",
    "same_steps": "benchmarks same_steps --preset {preset} --mrpc {mrpc} --rte {rte}",
    "versions": "benchmarks versions",
    "faults": "benchmarks faults",
    "schedules": "benchmarks schedules",
    "wikitext-2": "recipes run bert_from_scratch --workdir runs/wikitext-2 --overwrite --corpus {wikitext} "
    f"{wikitext.OPTIONS} && python -m benchmarks wikitext runs/wikitext-2",
}
del COMMANDS["bert_from_scratch"]  # of which the pages show a run on WikiText-2
DATA = ("preset", "mrpc", "rte", "sst2", "wikitext", "vocabulary")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--measure", action="store_true", help="them; otherwise they are only listed")
    parser.add_argument("--only", default="", help="results whose name contains this")
    for name in DATA:
        parser.add_argument(f"--{name}", type=existing, default="", help="file or folder that some of them need")


def main(arguments: argparse.Namespace) -> None:
    """Tells, and measures."""
    given = {name: os.path.abspath(value) for name in DATA if (value := getattr(arguments, name))}
    chosen = with_word(arguments.only, COMMANDS)
    failed = []
    for command in dict.fromkeys(COMMANDS[name] for name in chosen):
        why = {name: stale(name) for name in chosen if COMMANDS[name] == command}
        if not any(why.values()):
            continue
        print(", ".join(f"{name} ({text})" for name, text in why.items() if text), end=": ", flush=True)
        missing = [word for word in DATA if f"{{{word}}}" in command and word not in given]
        if missing:
            print(f"needs --{', --'.join(missing)}", flush=True)
            continue
        print(f"python -m {command.format(**given)}", flush=True)
        if arguments.measure:
            programs = ([word.format(**given) for word in each.split()] for each in command.split(" && python -m "))
            if any(subprocess.run([sys.executable, "-m", *words], cwd=ROOT).returncode for words in programs):
                failed += [name for name, text in why.items() if text]
    if arguments.measure and subprocess.run([sys.executable, "-m", "benchmarks.readme"], cwd=ROOT).returncode:
        failed.append("readme")
    if failed:
        raise UserError(f"these failed, as told above: {', '.join(failed)}")


def stale(name: str) -> str:
    """Why a file of results is not of this commit's code; empty if it is."""
    paths = (RESULTS / f"{name}.{ending}" for ending in ("json", "jsonl"))
    texts = [path.read_text() for path in paths if path.exists()]  # one, or none
    commits = sorted({*re.findall(r'"commit": "(\w+\+?)"', "".join(texts))})
    if not commits:
        return "it names no commit" if any(texts) else "not measured"
    return next((f"of {each}" for each in commits if not of_this_code(each)), "")
