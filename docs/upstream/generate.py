# SPDX-License-Identifier: Apache-2.0
"""Writes the texts of this folder: `python docs/upstream/generate.py`.

A text is an issue for Keras, ready to paste. Program, output and cause are those of ../keras-under-tf-distribute.md;
the rest is in faults.toml; and where there is a patch of the same name, it is shown.
"""

import re
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "keras-under-tf-distribute.md"
ISSUES = "https://github.com/keras-team/keras/issues/"


def texts() -> dict[str, str]:
    """The texts by file name."""
    page = PAGE.read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", page, re.MULTILINE))
    rows = re.findall(r"^\| \[(.+?)\]\(#(.+?)\) \| (.+?) \|", page, re.MULTILINE)
    (versions,) = re.findall(r"^Versions: (.+)\.$", page, re.MULTILINE)
    faults = tomllib.loads((FOLDER / "faults.toml").read_text(encoding="utf-8"))
    found = {}
    for number, ((heading, anchor, threads), (name, fault)) in enumerate(zip(rows, faults.items(), strict=True), 1):
        if anchor != fault["anchor"]:
            raise ValueError(f"faults.toml has {fault['anchor']} where the page has {anchor}")
        stem = f"{number:02}-{name}"
        found[f"{stem}.md"] = text(stem, fault, sections[heading], versions, re.findall(r"#(\d+)", threads))
    return found


def text(stem: str, fault: dict[str, str], section: str, versions: str, threads: list[str]) -> str:
    """The text of one fault."""
    intro, program, output, cause = re.fullmatch(
        r"\s*(.*?)\s*^```python\n(.*?)^```\s+^```text\n(.*?)^```\s+^\*\*Why\.\*\* (.*?)\s*^\*\*Here\.\*\*.*",
        section,
        re.DOTALL | re.MULTILINE,
    ).groups()
    patch = FOLDER / f"{stem}.patch"
    parts = [
        f"# {fault['title']}",
        f"{versions}, on CPUs.",
        _for_an_issue(intro),
        f"### Program\n\n```python\n{program}```",
        f"### Output\n\n```text\n{output}```",
        f"### Expected\n\n{fault['expected']}",
        f"### Cause\n\n{_for_an_issue(cause)}",
        f"### Suggested fix\n\n{fault['fix']}",
    ]
    if patch.exists():
        parts[-1] += f" With it the program prints `fine`.\n\n```diff\n{patch.read_text(encoding='utf-8')}```"
    if threads:
        parts.append("### Known threads\n\n" + "\n".join(f"- {ISSUES}{thread}" for thread in threads))
    return "\n\n".join(part for part in parts if part) + "\n"


def _for_an_issue(words: str) -> str:
    """Text for GitHub: a number is a link there by itself, the page's headings are not there, and lines break."""
    words = re.sub(r"\[(#\d+)\]", r"\1", re.sub(r"\[([^]]+)\]\(#[^)]+\)", r"\1", words))
    return re.sub(r"(?<!\n)\n(?!\n)", " ", words)


if __name__ == "__main__":
    for file_name, content in texts().items():
        (FOLDER / file_name).write_text(content, encoding="utf-8")
        print(file_name)
