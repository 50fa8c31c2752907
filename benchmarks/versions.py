# SPDX-License-Identifier: Apache-2.0
"""The library's own tests with other versions of Python, TensorFlow and Keras.

    python -m benchmarks versions

makes each environment of `ENVIRONMENTS` anew, in a temporary folder: the library's wheel, with the dependencies that
pip finds for it, and what its tests import. It runs the quick tests of `FILES` there, and removes the environment
before the next one, as each takes about 2 GB. Any installed Python of the minor version will do, pyenv's too. Results
go to `benchmarks/results/versions.json`; `python -m benchmarks.readme` makes the table of docs/your-own-model.md.

`FILES` are the tests of the library that need no recipe. Some take a model of KerasHub's, or an optimizer of `common`:
KerasHub is whichever version pip finds for that Keras; of keras-nightly, keras-hub-nightly.
"""

import argparse
import datetime
import glob
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, ROOT, code_of, commit, machine, with_word, write_results
from keras_replicas import UserError

NIGHTLY = "nightly"
# Python, TensorFlow, Keras. Every Python and TensorFlow is in two of them or more; the oldest are together, and so are
# the newest, of which Keras is not yet released.
ENVIRONMENTS = (
    ("3.11", "2.20.*", "3.13.0"),
    ("3.11", "2.21.*", "3.15.*"),
    ("3.12", "2.20.*", "3.14.*"),
    ("3.12", "2.21.*", "3.13.*"),
    ("3.13", "2.20.*", "3.15.*"),
    ("3.13", "2.21.*", NIGHTLY),
)
TESTED = (
    *("any_model", "batch_wide", "batchnorm", "call_probe", "check", "cluster", "combination", "conformance"),
    *("custom_step", "data_parallel", "device_copies", "division", "doctor", "evaluation_draws", "generators", "gpus"),
    *("gradients", "kept_tensors", "library", "noise", "one_replica", "options", "order", "private", "rendezvous"),
    *("resume", "strategy", "trainer", "training", "versions", "way_back", "wrong_programs"),
)
FILES = [f"tests/test_{name}.py" for name in TESTED]
TOOLS = ("pytest", "pytest-xdist", "keras-hub", "safetensors", "scipy", "tensorboard", "tokenizers", "tyro")
SHOWN = ("tensorflow", "keras", "keras_hub")
SECONDS = 3600  # for one environment's tests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--only", default="", metavar="WORD", help="environments whose name has it; other rows are kept"
    )


def main(arguments: argparse.Namespace) -> None:
    """Makes the environments, one after the other, writes the row of each to the file, and prints the table."""
    files = ["tests/test_private.py"] if arguments.quick else FILES
    environments = {name_of(each): each for each in ENVIRONMENTS}
    chosen = {name: environments[name] for name in with_word(arguments.only, environments)}
    interpreters = {python: interpreter(python) for python, _, _ in chosen.values()}
    path = RESULTS / "versions.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        of, code = machine(arguments.quick), commit()
        subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, str(ROOT)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        for name, (python, tensorflow, keras) in itertools.islice(chosen.items(), 1 if arguments.quick else None):
            with tempfile.TemporaryDirectory() as place:
                subprocess.run([interpreters[python], "-m", "venv", place], check=True)
                install(f"{place}/bin/python", str(wheel), tensorflow, keras)
                rows[name] = tested(f"{place}/bin/python", files)
            rows[name] |= {"date": datetime.date.today().isoformat(), "commit": code}
            rows = {each: rows[each] for each in map(name_of, ENVIRONMENTS) if each in rows}
            print(name, rows[name], flush=True)
            if not arguments.quick:
                write_results("versions", {"rows": rows, "machine": of})
    print(table({"rows": rows}))


def name_of(environment: tuple[str, str, str]) -> str:
    """The name of its row."""
    return "Python {}, TensorFlow {}, Keras {}".format(*environment)


def interpreter(python: str) -> str:
    """A Python of a minor version.

    Raises:
        UserError: when none is found.
    """
    version = "import sys, venv; print('{}.{}'.format(*sys.version_info))"
    pyenv = glob.glob(os.path.expanduser(f"~/.pyenv/versions/{python}.*/bin/python"))
    for path in filter(None, (sys.executable, shutil.which(f"python{python}"), *pyenv)):
        if subprocess.run([path, "-c", version], capture_output=True, text=True).stdout.strip() == python:
            return path
    raise UserError(f"there is no Python {python}: install it, by pyenv for example")


def install(python: str, wheel: str, tensorflow: str, keras: str) -> None:
    """Installs the library as a user would into an environment that has these versions."""
    pip = [python, "-m", "pip", "-q", "--disable-pip-version-check"]
    versions = [f"tensorflow=={tensorflow}", "keras" if keras == NIGHTLY else f"keras=={keras}"]
    subprocess.run([*pip, "install", wheel, *versions, *TOOLS], check=True)
    if keras == NIGHTLY:  # the same packages by other names, which satisfy no dependency on the first
        subprocess.run([*pip, "uninstall", "-y", "keras", "keras-hub"], check=True)
        subprocess.run([*pip, "install", "--no-deps", "keras-nightly", "keras-hub-nightly"], check=True)


def tested(python: str, files: list[str]) -> dict[str, Any]:
    """The versions of an environment, and how its tests ended."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CI")}
    environment |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    run = {"cwd": ROOT, "env": environment, "text": True}
    shown = f"import json, platform, {', '.join(SHOWN)}; "
    shown += f"print(json.dumps([platform.python_version(), *(each.__version__ for each in ({', '.join(SHOWN)}))]))"
    versions = subprocess.run([python, "-c", shown], stdout=subprocess.PIPE, check=True, **run).stdout
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        options = ["-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", f"--junitxml={report.name}"]
        words = [python, "-m", "pytest", *options, *files]
        done = subprocess.run(words, stdout=subprocess.PIPE, timeout=SECONDS, **run)
        if done.returncode > 1:
            raise SystemExit(f"pytest itself failed: {done.stdout[-2000:]}")
        cases = list(xml.etree.ElementTree.parse(report.name).iter("testcase"))
    ends = {f"{case.get('classname')}::{case.get('name')}": [each.tag for each in case] for case in cases}
    failed = [name for name, tags in ends.items() if {"failure", "error"} & {*tags}]
    skipped = [name for name, tags in ends.items() if "skipped" in tags]
    if failed:
        print(done.stdout[-5000:], file=sys.stderr)
    counts = {"passed": len(ends) - len(failed) - len(skipped), "skipped": skipped, "failed": failed}
    return dict(zip(("python", *SHOWN), json.loads(versions.splitlines()[-1]), strict=True)) | counts


def table(results: dict[str, Any]) -> str:
    """One line per environment, in Markdown, and the date."""
    rows = results["rows"].values()
    lines = ["| Python | TensorFlow | Keras | passed | skipped | failed |", "| --- " * 6 + "|"]
    for row in rows:
        versions = " | ".join(row[name] for name in ("python", "tensorflow", "keras"))
        lines.append(f"| {versions} | {row['passed']} | {len(row['skipped'])} | {len(row['failed'])} |")
    dates = " and ".join(sorted({row["date"] for row in rows}))
    return "\n".join([*lines, "", f"Run on {dates}. {code_of([*rows])}"])
