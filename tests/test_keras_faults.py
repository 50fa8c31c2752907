import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "keras-under-tf-distribute.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| \[(.+?)\]\(#(.+?)\) \| .+ \| `(.+)` \| (yes|no) \|$", re.MULTILINE)
ROWS = {anchor: (name, shown, present) for name, anchor, shown, present in ROW.findall(PAGE)}
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", PAGE, re.MULTILINE))


def block(language, section):
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return text


def test_the_page_is_about_the_versions_installed():
    minors = dict(re.findall(r"(\w+) (\d+\.\d+)", re.search("^Versions: .+$", PAGE, re.MULTILINE).group()))
    assert minors == {name: ".".join(version(name).split(".")[:2]) for name in ("TensorFlow", "Keras")}


def test_each_row_of_the_table_has_its_section():
    assert [name for name, _, _ in ROWS.values()] == list(SECTIONS)
    # As GitHub makes anchors of headings.
    assert list(ROWS) == [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in SECTIONS]


def run_program(anchor, folder):
    """The program of a section: its status, what it printed, and whether a process of it was left."""
    (folder / "program.py").write_text(block("python", SECTIONS[ROWS[anchor][0]]), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},  # conftest.py has set Keras's backend and TensorFlow's log
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the workers that one program starts can be found
    )
    try:
        out, err = process.communicate(timeout=120)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
            left = True
        except ProcessLookupError:
            left = False
    return process.returncode, out, err, left


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """All of them, two at a time: most of each is an import."""
    with ThreadPoolExecutor(2) as pool:
        yield {anchor: pool.submit(run_program, anchor, tmp_path_factory.mktemp("program")) for anchor in ROWS}


@pytest.mark.slow
@pytest.mark.parametrize("anchor", ROWS)
def test_the_program_prints_what_the_page_says(anchor, programs):
    name, shown, present = ROWS[anchor]
    status, out, err, left = programs[anchor].result()
    assert status == 0 and not left, err[-2000:]
    line = out.splitlines()[-1]
    assert line.startswith("FAULT: " if present == "yes" else "fine: ")
    assert line + "\n" == block("text", SECTIONS[name])
    assert shown in line
