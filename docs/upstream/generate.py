# SPDX-License-Identifier: Apache-2.0
"""Writes the texts of this folder: `python docs/upstream/generate.py`.

A text is an issue for Keras, ready to paste. Program, output and cause are those of ../keras-under-tf-distribute.md;
the rest is in faults.toml; and where there is a patch of the same name, it is shown.

With `--check` it writes nothing: it runs the programs with the Keras that is installed, as it is and with the patches,
and compares the results with faults.toml. For the newest nightly build of Keras:

    pip install --no-deps --target NIGHTLY keras-nightly
    PYTHONPATH=NIGHTLY python docs/upstream/generate.py --check
"""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "keras-under-tf-distribute.md"
ISSUES = "https://github.com/keras-team/keras/issues/"


def read() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The table `checked` of faults.toml; and by file name without its ending, each fault with its section."""
    page = PAGE.read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", page, re.MULTILINE))
    rows = re.findall(r"^\| \[(.+?)\]\(#(.+?)\) \| (.+?) \|", page, re.MULTILINE)
    faults = tomllib.loads((FOLDER / "faults.toml").read_text(encoding="utf-8"))
    checked, found = faults.pop("checked"), {}
    for number, ((heading, anchor, threads), (name, fault)) in enumerate(zip(rows, faults.items(), strict=True), 1):
        if anchor != fault["anchor"]:
            raise ValueError(f"faults.toml has {fault['anchor']} where the page has {anchor}")
        blocks = re.fullmatch(
            r"\s*(?P<intro>.*?)\s*^```python\n(?P<program>.*?)^```\s+^```text\n(?P<output>.*?)^```\s+"
            r"^\*\*Why\.\*\* (?P<cause>.*?)\s*^\*\*Here\.\*\*.*",
            sections[heading],
            re.DOTALL | re.MULTILINE,
        ).groupdict()
        found[f"{number:02}-{name}"] = fault | blocks | {"threads": re.findall(r"#(\d+)", threads)}
    return checked, found


def texts() -> dict[str, str]:
    """The texts by file name."""
    checked, faults = read()
    return {f"{stem}.md": text(checked, fault, FOLDER / f"{stem}.patch") for stem, fault in faults.items()}


def text(checked: dict[str, Any], fault: dict[str, Any], patch: Path) -> str:
    """The text of one fault."""
    parts = [
        f"# {fault['title']}",
        last_seen(checked, fault, patch.exists()),
        _for_an_issue(fault["intro"]),
        f"### Program\n\n```python\n{fault['program']}```",
        f"### Output\n\n```text\n{fault['output']}```",
        f"### Expected\n\n{fault['expected']}",
        f"### Cause\n\n{_for_an_issue(fault['cause'])}",
        f"### Suggested fix\n\n{fault['fix']}",
    ]
    if patch.exists():
        parts[-1] += f" With it the program prints `fine`.\n\n```diff\n{patch.read_text(encoding='utf-8')}```"
    if threads := fault["threads"]:
        parts.append("### Known threads\n\n" + "\n".join(f"- {ISSUES}{thread}" for thread in threads))
    return "\n\n".join(part for part in parts if part) + "\n"


def last_seen(checked: dict[str, Any], fault: dict[str, Any], has_patch: bool) -> str:
    """The versions in which the fault was last seen, and where it is mended."""
    release, nightly = checked["release"], checked["nightly"]
    if "mended" in fault:
        return f"Last seen in {release}, on CPUs. Mended in {nightly}: {fault['mended']}"
    line = f"Last seen in {release} and {nightly}, with {checked['with']}, on CPUs."
    return line + " The patch below applies to both." * has_patch


def _for_an_issue(words: str) -> str:
    """Text for GitHub: a number is a link there by itself, the page's headings are not there, and lines break."""
    words = re.sub(r"\[(#\d+)\]", r"\1", re.sub(r"\[([^]]+)\]\(#[^)]+\)", r"\1", words))
    return re.sub(r"(?<!\n)\n(?!\n)", " ", words)


def run_program(program: str, folder: Path, **environment: str) -> tuple[int, str, str, bool]:
    """Runs a program in a folder: its status, what it printed, and whether a process of it was left."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"} | environment
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["start_new_session"] = True  # so that the workers that one program starts can be found
    process = subprocess.Popen([sys.executable, "program.py"], cwd=folder, env=environment, **options)
    left = False
    try:
        out, err = process.communicate(timeout=1200)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            left = True
    return process.returncode, out, err, left


def patched_keras(patch: Path, folder: Path) -> Path:
    """The installed Keras with a patch: links to its files, except for those that the patch changes."""
    installed = Path(importlib.util.find_spec("keras").origin).parent
    shutil.copytree(installed, folder / "keras", copy_function=os.symlink)
    for name in re.findall("^--- a/(.+)$", patch.read_text(encoding="utf-8"), re.MULTILINE):
        file = folder / name
        original = file.resolve()
        file.unlink()
        shutil.copyfile(original, file)
    subprocess.run(["git", "apply", patch], cwd=folder, check=True)
    return folder


def check() -> int:
    """Prints each fault's line with the installed Keras, and returns 1 where faults.toml says something else."""
    import keras

    checked, faults = read()
    print(f"Keras {keras.__version__}; faults.toml: {checked['release']} and {checked['nightly']}", flush=True)
    wrong = 0
    for stem, fault in faults.items():
        patch = FOLDER / f"{stem}.patch"
        is_mended = "mended" in fault and "dev" in keras.__version__
        expected = {"as it is": "fine" if is_mended else "FAULT"}
        expected |= {"patched": "fine"} if patch.exists() and not is_mended else {}
        for state, verdict in expected.items():
            with tempfile.TemporaryDirectory() as place:
                (work := Path(place, "work")).mkdir()
                path = [] if state == "as it is" else [str(patched_keras(patch, Path(place, "scratch")))]
                path = os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])
                _, out, err, _ = run_program(fault["program"], work, PYTHONPATH=path)
            line = (out or err).strip().splitlines()[-1]
            wrong += not line.startswith(f"{verdict}: ")
            print(f"{stem}, {state}: {line}", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        raise SystemExit(check())
    for file_name, content in texts().items():
        (FOLDER / file_name).write_text(content, encoding="utf-8")
        print(file_name)
