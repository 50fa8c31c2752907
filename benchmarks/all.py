# SPDX-License-Identifier: Apache-2.0
"""Says which results are stale, for they are of older code, and measures them again with `--measure`.

Stopped and started again, it goes on with what is still stale. All takes hours, and wants a quiet machine.
"""

import argparse
import os
import re
import subprocess
import sys

from benchmarks.machine import RESULTS, ROOT, existing
from benchmarks.waits import RECIPES
from keras_replicas import UserError

CODE = ("keras_replicas", "common", "recipes")  # on which results depend
# For each file of results, what measures it: the words after `python -m`. {preset} and the like are this one's options.
COMMANDS = {
    **dict.fromkeys((*RECIPES, "doctor"), "benchmarks defaults"),
    "peers": "benchmarks peers --preset {preset} --mrpc {mrpc} --corpus {wikitext} --vocabulary {vocabulary}",
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
    "fine_tuning": "benchmarks fine_tuning --preset {preset} --mrpc {mrpc} --rte {rte} --sst2 {sst2}",
    "same_steps": "benchmarks same_steps --preset {preset} --mrpc {mrpc} --rte {rte}",
    "techniques": "benchmarks techniques",
    "versions": "benchmarks versions",
}
del COMMANDS["bert_from_scratch"]  # of which the pages show a run on WikiText-2
DATA = ("preset", "mrpc", "rte", "sst2", "wikitext", "vocabulary")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--measure", action="store_true", help="what is stale; otherwise it is told alone")
    parser.add_argument("--only", default="", help="results whose name contains this")
    for name in DATA:
        parser.add_argument(f"--{name}", type=existing, default="", help="file or folder that some of them need")


def main(arguments: argparse.Namespace) -> None:
    """Tells, and measures."""
    given = {name: os.path.abspath(value) if (value := getattr(arguments, name)) else "" for name in DATA}
    chosen = {name: command for name, command in COMMANDS.items() if arguments.only in name}
    if not chosen:
        raise UserError(f"--only {arguments.only}: there are {', '.join(COMMANDS)}")
    for name, command in chosen.items():
        why = stale(name)
        if not why:
            continue
        missing = [word for word in DATA if f"{{{word}}}" in command and not given[word]]
        print(f"{name}: {why}; python -m {command}", flush=True)
        if not arguments.measure:
            continue
        if missing:
            print(f"{name}: left out, for it needs --{' --'.join(missing)}", flush=True)
        elif subprocess.run([sys.executable, "-m", *words(command, given)], cwd=ROOT).returncode:
            raise UserError(f"{name} failed; the same command goes on from there")
    if arguments.measure:
        subprocess.run([sys.executable, "-m", "benchmarks.readme"], cwd=ROOT, check=True)


def words(command: str, given: dict[str, str]) -> list[str]:
    """A command's words, with what is given: a path with a space is one."""
    return [word.format(**given) for word in command.split()]


def stale(name: str) -> str:
    """Why a file of results is not of this commit's code; empty if it is."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "not measured"
    commits = sorted({*re.findall(r'"commit": "(\w+\+?)"', path.read_text())})
    if not commits:
        return "it names no commit"
    for commit in commits:
        differs = subprocess.run(["git", "-C", str(ROOT), "diff", "--quiet", commit, "HEAD", "--", *CODE])
        if differs.returncode:  # also where git knows none such, as one with `+`, of code that was not committed
            return f"of {commit}"
    return ""
