# SPDX-License-Identifier: Apache-2.0
"""The default run of each recipe, and the doctor: one file of results each, as `bert_mlm.json` and `doctor.json`."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.machine import ROOT, machine, with_word, write_results
from benchmarks.waits import RECIPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--only", default="", help="recipes whose name contains this; without it, also the doctor")


def main(arguments: argparse.Namespace) -> None:
    """Runs, and writes the results; each recipe prints its own report."""
    shown = [name for name in RECIPES if name != "bert_from_scratch"]  # of which the pages show a run on WikiText-2
    chosen, of = with_word(arguments.only, shown), machine(arguments.quick)
    for recipe in chosen:
        with tempfile.TemporaryDirectory() as folder:
            options = ["--max-steps", "4", "--model", "nano"] if arguments.quick else []
            command = [sys.executable, "-m", "recipes", "run", recipe, "--workdir", folder, *options]
            subprocess.run(command, cwd=ROOT, check=True)
            found = json.loads(Path(folder, "results.json").read_text())
        found["config"]["workdir"] = f"runs/{recipe}"  # where it was is of no interest
        if not arguments.quick:
            write_results(recipe, {"machine": of} | found)
    if not arguments.only and not arguments.quick:
        doctor = [sys.executable, "-m", "recipes", "doctor", "--json"]
        found = json.loads(subprocess.run(doctor, cwd=ROOT, check=True, capture_output=True).stdout)
        found["machine"]["commit"] = of["commit"]
        write_results("doctor", found)
