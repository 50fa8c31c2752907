# SPDX-License-Identifier: Apache-2.0
"""From a CSV to a service: how long the commands of docs/csv-to-service.md take, and what each format is like to serve.

Commands and programs are the page's own. Each program is a process that cannot import Keras; it gets the sentences that
Keras gets. A time is a median of calls, the tokenizer's part included.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import ROOT, machine, write_results
from common.data.labelled import role_pairs

PAGE = ROOT / "docs/csv-to-service.md"
FORMATS = ("onnx", "saved_model", "litert", "huggingface")  # in the order of the page's programs
SERVED_BY = dict(zip(FORMATS, ("ONNX Runtime", "TensorFlow", "LiteRT", "transformers, torch"), strict=True))
KERAS = """
import sys

import keras_hub

sentences, model = sys.argv[2:], keras_hub.models.TextClassifier.from_preset(sys.argv[1])

def logits(sentences):
    return model.predict(sentences, verbose=0)
"""
MEASURE = """
import json, statistics, time

def milliseconds(sentences, calls):
    def once():
        began = time.perf_counter()
        logits(sentences)
        return 1000 * (time.perf_counter() - began) / len(sentences)
    once()
    return statistics.median(once() for _ in range(calls))

found = {"alone": milliseconds(sentences[:1], 200), "together": milliseconds(sentences, 20)}
print(json.dumps(found | {"logits": logits(sentences).tolist()}))
"""


def main(arguments: argparse.Namespace) -> None:
    """Does what the page says, prints and writes the results."""
    with tempfile.TemporaryDirectory() as folder:
        results = {
            "machine": machine(arguments.quick),
            **chain(Path(folder), 1000 if arguments.quick else 12_000),
        }
    print(table(results))
    if not arguments.quick:
        write_results("export", results)


def chain(folder: Path, rows: int) -> dict[str, Any]:
    """The seconds of each command of the page, and what was found of each format; a folder's files are left there."""
    pairs = role_pairs()
    for name, examples in (("my", pairs["train"][:rows]), ("new", pairs["validation"][:32])):
        lines = [(f"{first} {second}", ("other", "same")[same]) for first, second, same in examples]
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *lines])
    sentences, seconds = [text for text, _ in lines], {}
    for words in re.findall(r"^\.venv/bin/python -m (recipes .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        began = time.monotonic()
        python(folder, ROOT, "-m", *words.split())
        seconds[words] = round(time.monotonic() - began, 1)
    preset = folder / "runs/text_classifier/preset"
    table = (folder / "labels.tsv").read_text(encoding="utf-8").splitlines()[1:]
    (folder / "without/keras.py").parent.mkdir()
    (folder / "without/keras.py").write_text("raise ImportError('this process is to do without Keras')")
    formats = {"keras": served(KERAS, preset, sentences, ROOT)}
    formats |= {form: served(programs()[form], folder / form, sentences, folder / "without") for form in FORMATS}
    outputs = {form: found.pop("logits") for form, found in formats.items()}
    for form, found in formats.items():
        found["difference"] = float(np.abs(np.subtract(outputs[form], outputs["keras"])).max())
        if (said := found.pop("said")) and said != [line.split("\t")[1] for line in table]:
            raise RuntimeError(f"{form}: served labels are not those of the table: {said}")
    return {"seconds": seconds, "formats": formats}


def programs() -> dict[str, str]:
    """The page's program for each format."""
    first, *others = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return {form: first + own for form, own in zip(FORMATS, others, strict=True)}


def served(program: str, folder: Path, sentences: list[str], path: Path) -> dict[str, Any]:
    """What a program says of sentences, how long it takes, its outputs, and how many bytes the folder has."""
    *said, found = python(folder, path, "-c", program + MEASURE, str(folder), *sentences).splitlines()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"bytes": size, "said": said, **json.loads(found)}


def python(folder: Path, path: Path, *words: str) -> str:
    """What a process of this interpreter prints, in a folder and with a path of its own; an error if it fails."""
    environment = os.environ | {"PYTHONPATH": str(path), "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words[:4]}: {done.stderr}")
    return done.stdout


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "| format | served by | size | ms a sentence, alone | of 32 together | largest difference of an output |",
        "| --- " * 6 + "|",
    ]
    for form, found in results["formats"].items():
        name, by = (f"`{form}`", SERVED_BY[form]) if form in SERVED_BY else ("the preset", "KerasHub")
        speed = f"{found['alone']:.2f} | {found['together']:.2f}"
        lines.append(f"| {name} | {by} | {found['bytes'] / 1e6:.1f} MB | {speed} | {found['difference']:.0e} |")
    seconds: dict[str, float] = {}
    for words, taken in results["seconds"].items():
        verb = words.split()[1]
        seconds[verb] = seconds.get(verb, 0) + taken
    lines += ["", "| command | seconds |", "| --- | --- |"]
    return "\n".join(
        lines + [f"| `{verb}`{', all four' * (verb == 'export')} | {taken:.0f} |" for verb, taken in seconds.items()]
    )
