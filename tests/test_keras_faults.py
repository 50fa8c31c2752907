import re
import runpy
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

UPSTREAM = Path(__file__).parent.parent / "docs" / "upstream"
GENERATE = runpy.run_path(str(UPSTREAM / "generate.py"))
PATCHES = sorted(UPSTREAM.glob("*.patch"))
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


def test_the_texts_for_issues_are_those_of_the_page():
    generated = GENERATE["texts"]()
    advice = "run `python docs/upstream/generate.py`"
    assert {path.name: path.read_text(encoding="utf-8") for path in UPSTREAM.glob("*.md")} == generated, advice
    assert len(generated) == len(ROWS) and {path.stem for path in PATCHES} < {Path(name).stem for name in generated}
    for (name, shown, _), (file, text) in zip(ROWS.values(), generated.items(), strict=True):
        assert block("python", SECTIONS[name]) in text and shown in text
        headings = re.findall("^### (.+)$", text, re.MULTILINE)
        assert re.search(r"^Last seen in Keras \d[\d.]+(\.|,| and keras-nightly \d)", text, re.MULTILINE)
        assert headings[:5] == ["Program", "Output", "Expected", "Cause", "Suggested fix"]
        assert "](#" not in text and ("```diff" in text) == (UPSTREAM / file).with_suffix(".patch").exists()


def run_program(anchor, folder, **environment):
    """The program of a section: its status, what it printed, and whether a process of it was left."""
    return GENERATE["run_program"](block("python", SECTIONS[ROWS[anchor][0]]), folder, **environment)


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


@pytest.mark.long
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_the_patch_mends_keras(patch, tmp_path):
    """That the program prints `FAULT:` without it, the test above tells."""
    anchor = list(ROWS)[int(patch.stem[:2]) - 1]
    (tmp_path / "work").mkdir()
    scratch = GENERATE["patched_keras"](patch, tmp_path / "scratch")
    status, out, err, left = run_program(anchor, tmp_path / "work", PYTHONPATH=str(scratch))
    assert status == 0 and not left, err[-2000:]
    assert out.splitlines()[-1].startswith("fine: ")
