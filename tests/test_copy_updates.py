"""`cp --check` and `cp --update`: what users and the collection do to a copy, one history a test.

The collection is a copy of this one, whose own command line runs in it. Nothing here needs TensorFlow.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes._contents import with_modules
from recipes._copy import FOLDERS, MANIFEST

ROOT = Path(__file__).parent.parent
ORDER, LOSSES = "keras_replicas/order.py", "common/training/losses.py"  # two helpers that bert_mlm uses
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
# Ends as a killed process does, before a file is renamed or removed for the nth time: `NUMBER FOLDER`.
KILLED = """\
import os, sys
from recipes import _copy
left, folder = int(sys.argv[1]), _copy.Path(sys.argv[2])
def count(event, arguments):
    global left
    left -= event in ("os.rename", "os.remove") and str(folder) in str(arguments[0])
    left or os._exit(99)
sys.addaudithook(count)
_copy.update(folder, dry_run=False, diff=False)
"""
GIT = ["git", "-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]


class History:
    """A collection, and a project with a copy of `bert_mlm` from it, both to be changed."""

    def __init__(self, folder):
        self.upstream, self.project = folder / "upstream", folder / "project"

    def cp(self, *words):
        words = [sys.executable, "-m", "recipes", "cp", *map(str, words)]
        done = subprocess.run(words, cwd=self.upstream, env=ENVIRONMENT, capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done

    def check(self):
        """The rows of `--check`, by file, and its status."""
        before = tree(self.project)
        done = self.cp("--check", self.project)
        assert tree(self.project) == before
        rows = [line.split(maxsplit=1) for line in done.stdout.replace("as copied", "as-copied").splitlines()[1:-2]]
        return {what: word for word, what in rows}, done.returncode

    def update(self, status=0):
        """The rows that `--update` prints, when it ends with that status."""
        done = self.cp("--update", self.project)
        assert (done.returncode, done.stderr) == (status, ""), done.stdout
        return done.stdout.splitlines()

    def manifest(self):
        return json.loads((self.project / MANIFEST).read_text())


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    history = History(tmp_path_factory.mktemp("untouched"))
    for name in ("recipes", "common"):
        shutil.copytree(ROOT / name, history.upstream / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, history.upstream)
    assert history.cp("bert_mlm", history.project).returncode == 0
    return history.project.parent


@pytest.fixture
def history(untouched, tmp_path):
    shutil.copytree(untouched, tmp_path, dirs_exist_ok=True)
    return History(tmp_path)


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def add_line(path, line):
    path.write_text(path.read_text() + line)


def no_news(history):
    rows, status = history.check()
    return status == 0 and set(rows.values()) <= {"as-copied", "edited", "deleted", "renamed"}


def test_untouched(history):
    rows, status = history.check()
    assert status == 0 and set(rows.values()) == {"as-copied"}
    assert rows.keys() == tree(history.project).keys() - {MANIFEST}
    before = tree(history.project)
    assert history.update() == ["no news from the collection"]
    assert tree(history.project) == before


def test_untouched_and_changed_upstream(history):
    add_line(history.upstream / ORDER, "# theirs\n")
    edit(history.upstream / "pyproject.toml", 'version = "0.1.0"', 'version = "0.2.0"')
    edit(history.upstream / "pyproject.toml", "tyro>=1.0,<1.1", "tyro>=1.1,<1.2")
    rows, status = history.check()
    assert status == 1 and rows[ORDER] == rows["requirements.txt"] == "changed" and rows[LOSSES] == "as-copied"
    assert sorted(history.update()) == [f"changed    {ORDER}", "changed    requirements.txt"]
    assert (history.project / ORDER).read_bytes() == (history.upstream / ORDER).read_bytes()
    assert "tyro>=1.1,<1.2\n" in (history.project / "requirements.txt").read_text()
    assert history.manifest()["version"] == "0.2.0" and no_news(history)


def test_edited(history):
    add_line(history.project / ORDER, "# mine\n")
    rows, status = history.check()
    assert status == 0 and rows[ORDER] == "edited"
    add_line(history.upstream / LOSSES, "# theirs\n")
    assert history.update() == [f"changed    {LOSSES}"]
    assert (history.project / ORDER).read_text().endswith("# mine\n")
    assert history.check()[0][ORDER] == "edited"


def test_deleted(history):
    for path in (ORDER, LOSSES):
        (history.project / path).unlink()
    add_line(history.upstream / ORDER, "# theirs\n")
    assert history.check()[0][LOSSES] == "deleted"
    assert history.update() == [f"changed    {ORDER}: yours is deleted, and stays so"]
    assert not (history.project / ORDER).exists() and not (history.project / LOSSES).exists() and no_news(history)


def test_renamed(history):
    """What is changed upstream comes to the file under the user's name for it."""
    (history.project / "bert_mlm.py").rename(history.project / "train.py")
    edit(history.project / "train.py", "vocabulary_size: int = 4096", "vocabulary_size: int = 999")
    (history.project / LOSSES).rename(history.project / "common/training/my_losses.py")
    rows, status = history.check()
    assert status == 0 and rows["bert_mlm.py -> train.py, edited"] == "renamed"
    assert rows[f"{LOSSES} -> common/training/my_losses.py"] == "renamed"
    add_line(history.upstream / "recipes/bert_mlm.py", "# theirs\n")
    assert history.update() == ["changed    bert_mlm.py (train.py): merged with your edits"]
    text = (history.project / "train.py").read_text()
    assert text.endswith("# theirs\n") and "vocabulary_size: int = 999" in text
    assert not (history.project / "bert_mlm.py").exists() and not (history.project / LOSSES).exists()
    (history.project / "train.py").write_text("# mine alone\n")  # the name is known by now, without a resemblance
    assert history.check()[0]["bert_mlm.py -> train.py, edited"] == "renamed"
    (history.upstream / LOSSES).unlink()
    edit(history.upstream / "recipes/bert_mlm.py", "from common.training.losses import CrossEntropy\n", "")
    row = f"removed    {LOSSES}: common/training/my_losses.py stays, as a file of your own"
    assert row in history.update(status=1)
    assert (history.project / "common/training/my_losses.py").read_bytes() == (ROOT / LOSSES).read_bytes()


def test_renamed_and_renamed_back(history):
    (history.project / LOSSES).rename(history.project / "common/training/my_losses.py")
    add_line(history.upstream / LOSSES, "# theirs\n")
    history.update()
    (history.project / "common/training/my_losses.py").rename(history.project / LOSSES)
    assert history.check()[0][LOSSES] == "as-copied"
    add_line(history.upstream / LOSSES, "# theirs again\n")
    assert history.update() == [f"changed    {LOSSES}"]
    assert (history.project / LOSSES).read_bytes() == (history.upstream / LOSSES).read_bytes()
    assert "place" not in history.manifest()["files"][LOSSES]


def test_renamed_to_a_name_that_is_not_utf8(history):
    name = os.fsdecode(b"common/training/\xff.py")
    (history.project / LOSSES).rename(history.project / name)
    add_line(history.upstream / LOSSES, "# theirs\n")
    assert history.check()[0][f"{LOSSES} -> common/training/\\xff.py"] == "renamed"
    assert history.update() == [f"changed    {LOSSES} (common/training/\\xff.py)"]
    assert (history.project / name).read_bytes() == (history.upstream / LOSSES).read_bytes() and no_news(history)


def test_crlf(history):
    """As in a checkout of the project on Windows."""
    for path in history.project.rglob("*"):
        if path.is_file() and path.name != MANIFEST:
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert set(history.check()[0].values()) == {"as-copied"}
    mine = (history.project / LOSSES).read_bytes().replace(b'"""', b'"""Mine. ', 1)
    (history.project / LOSSES).write_bytes(mine)
    edit(history.upstream / "recipes/bert_mlm.py", '"""', '"""Theirs. ')
    for path in (ORDER, LOSSES):
        add_line(history.upstream / path, "# theirs\n")
    move_upstream(history)
    rows = history.update()
    assert f"changed    {LOSSES}: merged with your edits" in rows and not any("CONFLICT" in row for row in rows)
    assert (history.project / LOSSES).read_bytes() == mine + b"# theirs\r\n" and no_news(history)
    for path in ("bert_mlm.py", "common/data/sequence.py"):
        theirs = (history.upstream / ("recipes" if path == "bert_mlm.py" else "") / path).read_bytes()
        assert (history.project / path).read_bytes() == theirs.replace(b"\n", b"\r\n")
    edit(history.upstream / LOSSES, '"""', '"""Theirs. ')
    history.update(status=1)
    assert b"<<<<<<< yours\r\n" in (history.project / LOSSES).read_bytes()
    assert history.cp("--update", history.project).stderr.startswith("error: resolve the conflicts of the last update")


def test_saved_as_utf16(history):
    text = (history.project / ORDER).read_text()
    (history.project / ORDER).write_bytes(text.encode("utf-16"))
    for path in (ORDER, LOSSES):
        add_line(history.upstream / path, "# theirs\n")
    not_merged = f"changed    {ORDER}: {ORDER} is not UTF-8, and cannot be merged; save it as that, then update again"
    assert not_merged in history.update(status=1)
    assert (history.project / ORDER).read_bytes() == text.encode("utf-16")
    assert (history.project / LOSSES).read_bytes() == (history.upstream / LOSSES).read_bytes()
    assert history.check()[1] == 1
    (history.project / ORDER).write_text(text)
    assert history.update() == [f"changed    {ORDER}"] and no_news(history)


def test_the_settings_of_git_do_not_matter(history, monkeypatch, tmp_path):
    (tmp_path / "settings").write_text("[diff]\n\torderFile = /nowhere\n")
    monkeypatch.setitem(ENVIRONMENT, "GIT_CONFIG_GLOBAL", str(tmp_path / "settings"))
    (history.project / LOSSES).rename(history.project / "common/training/my_losses.py")
    assert history.check()[0][f"{LOSSES} -> common/training/my_losses.py"] == "renamed"


def test_a_failure_of_git_is_told(history, monkeypatch, tmp_path):
    (tmp_path / "settings").write_text("[diff\n")
    monkeypatch.setitem(ENVIRONMENT, "GIT_CONFIG_GLOBAL", str(tmp_path / "settings"))
    (history.project / LOSSES).rename(history.project / "common/training/my_losses.py")
    done = history.cp("--check", history.project)
    assert done.returncode == 2 and done.stderr.startswith("error: git diff failed: fatal: ")


def test_added_upstream(history):
    (history.upstream / "common/data/added.py").write_text("# theirs\n")
    edit(history.upstream / ORDER, "import tensorflow", "import common.data.added\nimport tensorflow")
    rows, status = history.check()
    assert status == 1 and rows["common/data/added.py"] == "added"
    assert history.update() == ["added      common/data/added.py", f"changed    {ORDER}"]
    assert (history.project / "common/data/added.py").read_text() == "# theirs\n" and no_news(history)


def test_added_upstream_where_the_user_has_a_file(history):
    (history.project / "common/data/added.py").write_text("# mine\n")
    (history.upstream / "common/data/added.py").write_text("# theirs\n")
    edit(history.upstream / ORDER, "import tensorflow", "import common.data.added\nimport tensorflow")
    in_the_way = "added      common/data/added.py: a file of yours is in the way; move it, then update again"
    assert history.update(status=1) == [in_the_way, f"changed    {ORDER}"]
    assert (history.project / "common/data/added.py").read_text() == "# mine\n"
    assert history.check()[1] == 1
    (history.project / "common/data/added.py").rename(history.project / "common/data/mine.py")
    assert history.update() == ["added      common/data/added.py"]
    assert (history.project / "common/data/added.py").read_text() == "# theirs\n" and no_news(history)


@pytest.mark.parametrize("edited", [False, True])
def test_removed_upstream(history, edited):
    edit(history.upstream / "recipes/bert_mlm.py", "from common.training.losses import CrossEntropy\n", "")
    (history.upstream / LOSSES).unlink()
    if edited:
        add_line(history.project / LOSSES, "# mine\n")
    before = (history.project / LOSSES).read_text()
    stays = f": {LOSSES} stays, as a file of your own" * edited
    assert history.update(status=int(edited)) == ["changed    bert_mlm.py", f"removed    {LOSSES}{stays}"]
    assert (history.project / LOSSES).exists() == edited and no_news(history)
    if edited:
        assert (history.project / LOSSES).read_text() == before


def move_upstream(history):
    (history.upstream / ORDER).rename(history.upstream / "common/data/sequence.py")
    for path in [*history.upstream.glob("common/*/*.py"), *history.upstream.glob("recipes/*.py")]:
        path.write_text(path.read_text().replace("keras_replicas.order", "common.data.sequence"))


def test_moved_upstream(history):
    """The user's edits move with the file."""
    move_upstream(history)
    add_line(history.upstream / "common/data/sequence.py", "# theirs\n")
    edit(history.project / ORDER, '"""', '"""Mine. ')
    rows, status = history.check()
    assert status == 1 and rows[f"{ORDER} -> common/data/sequence.py: merged with your edits"] == "moved"
    assert f"moved      {ORDER} -> common/data/sequence.py: merged with your edits" in history.update()
    text = (history.project / "common/data/sequence.py").read_text()
    assert '"""Mine. ' in text and text.endswith("# theirs\n")
    assert not (history.project / ORDER).exists() and no_news(history)


def test_moved_upstream_to_where_the_user_has_a_file(history):
    move_upstream(history)
    (history.project / "common/data/sequence.py").write_text("# mine\n")
    before = (history.project / ORDER).read_bytes()
    in_the_way = (
        f"moved      {ORDER} -> common/data/sequence.py: a file of yours is in the way; move it, then update again"
    )
    assert in_the_way in history.update(status=1)
    assert (history.project / ORDER).read_bytes() == before
    assert (history.project / "common/data/sequence.py").read_text() == "# mine\n"
    (history.project / "common/data/sequence.py").unlink()
    assert history.update() == [f"moved      {ORDER} -> common/data/sequence.py"] and no_news(history)


def test_both_changed_alike(history):
    for folder in (history.project, history.upstream):
        add_line(folder / ORDER, "# the same\n")
    assert history.update() == [f"changed    {ORDER}: as you did"]
    assert history.check()[0][ORDER] == "as-copied" and no_news(history)


def test_both_changed_apart(history):
    edit(history.project / ORDER, '"""', '"""Mine. ')
    (history.project / ORDER).chmod(0o600)
    add_line(history.upstream / ORDER, "# theirs\n")
    assert history.update() == [f"changed    {ORDER}: merged with your edits"]
    text = (history.project / ORDER).read_text()
    assert '"""Mine. ' in text and text.endswith("# theirs\n") and no_news(history)
    assert history.check()[0][ORDER] == "edited" and (history.project / ORDER).stat().st_mode & 0o777 == 0o600


def test_both_changed_the_same_place(history):
    edit(history.project / ORDER, '"""', '"""Mine. ')
    edit(history.upstream / ORDER, '"""', '"""Theirs. ')
    assert history.update(status=1) == [f"changed    {ORDER}: CONFLICT with your edits, at '<<<<<<< yours'"]
    text = (history.project / ORDER).read_text()
    for words in ("<<<<<<< yours\n", '"""Mine. ', "=======\n", '"""Theirs. ', ">>>>>>> the collection's\n"):
        assert words in text
    again = history.cp("--update", history.project)  # which would nest the conflicts
    assert again.returncode == 2 and again.stderr.startswith("error: resolve the conflicts of the last update first")
    assert again.stderr.endswith(f"{ORDER}\n") and (history.project / ORDER).read_text() == text
    resolved = (ROOT / ORDER).read_text().replace('"""', '"""Theirs and mine. ', 1)
    (history.project / ORDER).write_text(resolved)
    assert history.update() == ["no news from the collection"]
    assert (history.project / ORDER).read_text() == resolved


def test_an_older_manifest_is_brought_over_several_versions(history):
    """And only the copy knows what it began with: the collection has no history."""
    edit(history.project / ORDER, '"""', '"""Mine. ')
    for version in range(2, 5):
        add_line(history.upstream / ORDER, f"# theirs, {version}\n")
        edit(history.upstream / "pyproject.toml", f'version = "0.{version - 1}.0"', f'version = "0.{version}.0"')
    assert history.manifest()["commit"] is None
    assert history.update() == [f"changed    {ORDER}: merged with your edits"]
    text = (history.project / ORDER).read_text()
    assert '"""Mine. ' in text and text.endswith("# theirs, 2\n# theirs, 3\n# theirs, 4\n")
    assert history.manifest()["version"] == "0.4.0" and no_news(history)


@pytest.mark.parametrize("option", ["--check", "--update"])
def test_no_manifest(history, option):
    path = history.project / MANIFEST
    whole = path.read_text()
    path.unlink()
    done = history.cp(option, history.project)
    advice = "Give a folder that python -m recipes cp NAME DEST has copied a recipe to"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: there is no {path}. {advice}\n")
    newer = whole.replace('"format": 1', '"format": 2')
    outside = whole.replace(f'"{ORDER}"', '"../order.py"')
    for text in (
        "",
        "[]",
        "{}",
        '{"files": []}',
        whole.replace('"sha256": "', '"sha256": "0'),
        whole[:-9],
        outside,
        newer,
        "[" * 200_000,
        whole.replace('"bert_mlm"', "1"),
        whole.replace('"bert_mlm"', '["a"]'),
        whole.replace(f'"{ORDER}"', '""'),
        whole.replace(f'"{ORDER}"', '"requirements.txt/order.py"'),
        whole.replace(f'"{ORDER}"', r'"\ud800.py"'),
        json.dumps(json.loads(whole) | {"recipes": "bert_mlm"}),
        json.dumps(json.loads(whole) | {"recipes": []}),
        json.dumps(json.loads(whole) | {"version": "\ud800"}),
        json.dumps(json.loads(whole) | {"package": "a b"}),
        json.dumps(json.loads(whole) | {"package": "other"}),
        json.dumps(json.loads(whole) | {"files": {}}),
    ):
        path.write_text(text)
        done = history.cp(option, history.project)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert ("is damaged" in done.stderr) == (text != newer)
    path.unlink()
    before = tree(history.project)
    assert history.cp("bert_mlm", history.project).returncode == 0  # what is there is as it would be copied
    assert tree(history.project).keys() == before.keys() | {MANIFEST}  # and no second list of packages
    assert no_news(history)


def test_another_package(history):
    shutil.rmtree(history.project)
    assert history.cp("bert_mlm", history.project, "--package", "my.train").returncode == 0
    assert history.manifest()["package"] == "my.train"
    assert {path.name for path in history.project.iterdir()} == {
        *("my", "test_bert_mlm.py", "requirements.txt", MANIFEST)
    }
    mine = history.project / "my/train" / ORDER
    edit(mine, '"""', '"""Mine. ')
    edit(history.upstream / ORDER, "import tensorflow", "import common.files  # theirs\nimport tensorflow")
    add_line(history.upstream / ORDER, "\n\nWRITE = common.files.write_whole\n")
    assert history.update() == [f"changed    my/train/{ORDER}: merged with your edits"]
    text = mine.read_text()
    assert '"""Mine. ' in text and "import my.train.common.files  # theirs\n" in text
    assert "\n\nWRITE = my.train.common.files.write_whole\n" in text and no_news(history)
    refused = history.cp("causal_lm", history.project, "--package", "other")
    assert refused.returncode == 2 and "are in my.train: copy to another folder" in refused.stderr
    assert history.cp("causal_lm", history.project).returncode == 0
    assert (history.project / "my/train/causal_lm.py").is_file() and no_news(history)


def test_several_recipes_share_a_folder(history):
    edit(history.project / ORDER, '"""', '"""Mine. ')
    add_line(history.project / "requirements.txt", "mine\n")
    before = tree(history.project)
    assert history.cp("glue_custom_loop", history.project).returncode == 0
    assert (history.project / ORDER).read_bytes() == before[ORDER]
    requirements = (history.project / "requirements.txt").read_text().splitlines()
    assert "mine" in requirements and any(line.startswith("tqdm") for line in requirements)
    assert history.manifest()["recipes"] == ["bert_mlm", "glue_custom_loop"] and no_news(history)
    again = history.cp("bert_mlm", history.project)
    assert again.returncode == 2 and "has a copy of bert_mlm. To bring it up to date" in again.stderr
    add_line(history.upstream / ORDER, "# theirs\n")
    older = history.cp("causal_lm", history.project)  # whose helpers would be of two versions
    assert older.returncode == 2 and "has copies from version 0.1.0. First: " in older.stderr


def test_a_second_recipe_gets_what_was_deleted_from_the_first(history):
    for path in (ORDER, "requirements.txt", "bert_mlm.py"):
        (history.project / path).unlink()
    done = history.cp("glue_custom_loop", history.project)
    assert done.returncode == 0 and f"{history.project / ORDER}\n" in done.stdout
    assert (history.project / ORDER).read_bytes() == (ROOT / ORDER).read_bytes()
    assert "tqdm" in (history.project / "requirements.txt").read_text()
    assert not (history.project / "bert_mlm.py").exists()  # which the second does not use
    assert history.check()[0][ORDER] == "as-copied" and no_news(history)


@pytest.mark.parametrize("known", [False, True])
def test_a_second_recipe_is_refused_where_a_helper_is_renamed(history, known):
    (history.project / ORDER).rename(history.project / "common/data/mine.py")
    if known:
        add_line(history.upstream / ORDER, "# theirs\n")
        history.update()
    before = tree(history.project)
    refused = history.cp("glue_custom_loop", history.project)
    advice = "Rename it back, or copy to another folder"
    assert (
        refused.stderr == f"error: the recipe needs what you have renamed: {ORDER} -> common/data/mine.py. {advice}\n"
    )
    assert refused.returncode == 2 and tree(history.project) == before
    (history.project / "common/data/mine.py").unlink()  # by now it is deleted
    assert history.cp("glue_custom_loop", history.project).returncode == 0
    assert (history.project / ORDER).is_file() and no_news(history)


def test_a_recipe_that_is_gone_leaves_its_copy(history):
    (history.upstream / "recipes/bert_mlm.py").unlink()
    before = tree(history.project)
    rows = history.update(status=1)
    assert "removed    bert_mlm.py: bert_mlm.py stays, as a file of your own" in rows
    assert tree(history.project).keys() == before.keys() and no_news(history)


def test_a_dry_run_shows_what_an_update_does(history, tmp_path):
    edit(history.project / ORDER, '"""', '"""Mine. ')
    add_line(history.upstream / LOSSES, "# theirs\n")
    move_upstream(history)
    before = tree(history.project)
    dry = history.cp("--update", history.project, "--dry-run", "--diff").stdout
    assert history.cp("--update", "--dry-run", "--diff", history.project).stdout == dry
    assert tree(history.project) == before
    news, patch = dry.split("diff --git", 1)
    patch = f"diff --git{patch}"
    assert patch in history.cp("--check", history.project, "--diff").stdout
    shutil.copytree(history.project, tmp_path / "patched")
    subprocess.run(["git", "apply"], input=patch, text=True, cwd=tmp_path / "patched", check=True)
    assert history.update() == news.splitlines()
    patched, updated = tree(tmp_path / "patched"), tree(history.project)
    assert patched.pop(MANIFEST) != updated.pop(MANIFEST) and patched == updated


def test_a_killed_update_is_finished_by_the_next(history):
    """After each write in turn; nothing is lost, and the end is the same as of one that was not killed."""
    edit(history.project / ORDER, '"""', '"""Mine. ')
    add_line(history.upstream / LOSSES, "# theirs\n")
    add_line(history.upstream / ORDER, "# theirs\n")
    move_upstream(history)
    start = history.project.with_name("start")
    shutil.copytree(history.project, start)
    history.update()
    whole = tree(history.project)
    for changes in range(1, 12):
        shutil.rmtree(history.project)
        shutil.copytree(start, history.project)
        words = [sys.executable, "-c", KILLED, str(changes), str(history.project)]
        done = subprocess.run(words, cwd=history.upstream, env=ENVIRONMENT, capture_output=True)
        if done.returncode == 0:
            break
        assert done.returncode == 99, done.stderr
        assert any(b'"""Mine. ' in text for text in tree(history.project).values())
        history.update()
        assert tree(history.project) == whole
    assert changes > 3


def test_the_manifest_says_what_was_copied(history, tmp_path):
    manifest = history.manifest()
    files = tree(history.project)
    del files[MANIFEST]
    assert {path: file["sha256"] for path, file in manifest["files"].items()} == {
        path: hashlib.sha256(text).hexdigest() for path, text in files.items()
    }
    assert (manifest["version"], manifest["commit"], manifest["dirty"]) == ("0.1.0", None, False)
    assert (manifest["package"], manifest["recipes"]) == ("", ["bert_mlm"])
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*GIT, "commit", "-qm", "another", "--allow-empty"], cwd=tmp_path, check=True)
    history.update()
    assert history.manifest()["commit"] is None  # of a clone of something else, around the collection
    subprocess.run(["git", "init", "-q"], cwd=history.upstream, check=True)
    subprocess.run(["git", "add", "."], cwd=history.upstream, check=True)
    subprocess.run([*GIT, "commit", "-qm", "all"], cwd=history.upstream, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=history.upstream, capture_output=True, text=True)
    history.update()
    assert (history.manifest()["commit"], history.manifest()["dirty"]) == (head.stdout.strip(), False)
    add_line(history.upstream / ORDER, "# theirs\n")
    history.update()
    assert (history.manifest()["commit"], history.manifest()["dirty"]) == (head.stdout.strip(), True)
    assert f"({head.stdout[:7]}, with changes not committed)" in history.cp("--check", history.project).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--check", "x", "--update", "x"], "give one of NAME DEST, --check DEST and --update DEST"),
        (["bert_mlm", "x", "--check", "x"], "give one of NAME DEST, --check DEST and --update DEST"),
        (["--update", "x", "--package", "a"], "give one of NAME DEST, --check DEST and --update DEST"),
        (["bert_mlm", "x", "--diff"], "--diff and --dry-run go with --check DEST or --update DEST"),
        (["--update", "--dry-run"], "give the folder of the copy: --check DEST or --update DEST"),
        (["bert_mlm", "x", "--check"], "give one of NAME DEST, --check DEST and --update DEST"),
        (["bert_mlm", ""], "argument DEST: give the name of a folder, such as my_project"),
        (["--check", ""], "argument --check: give the name of a folder, such as my_project"),
        (["bert_mlm", "."], ". is this collection itself: copy to a folder of your own"),
        (["bert_mlm", "recipes"], "recipes is this collection itself: copy to a folder of your own"),
        (["bert_mlm", "common/data/x"], "common/data/x is this collection itself: copy to a folder of your own"),
        (["bert_mlm", "x", "--package", "test"], "would hide the package test that Python imports"),
        (["bert_mlm", "x", "--package", "test_bert_mlm"], "would be hidden by x/test_bert_mlm.py; give another name"),
        (["bert_mlm", "x", "--package", "my.\ufb01t"], "--package 'my.\ufb01t' is not the name of a package"),
        (["--package", "my-train", "bert_mlm", "x"], "--package 'my-train' is not the name of a package"),
        (["bert_mlm", "--package", "my.class", "x"], "--package 'my.class' is not the name of a package"),
        (["bert_mlm", "x", "--package", ""], "--package '' is not the name of a package"),
        (["bert_mlm", "x", "--package", "..a"], "--package '..a' is not the name of a package"),
        (["bert_mlm", "x", "--package", "keras.train"], "would hide the package keras that Python imports"),
        (["bert_mlm", "x", "--package", "pytest.train"], "would hide the package pytest that Python imports"),
        (["bert_mlm", "x", "--package", "json"], "would hide the package json that Python imports"),
    ],
)
def test_bad_input_is_one_line(words, message):
    done = subprocess.run([sys.executable, "-m", "recipes", "cp", *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr and not (ROOT / "x").exists()


def test_the_folders_of_the_collection_are_known():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    tracked = {path.split("/")[0] for path in done.stdout.splitlines() if "/" in path}
    if done.returncode:  # no clone
        tracked = {folder for folder in FOLDERS if (ROOT / folder).is_dir()}
    assert tracked | {".git"} == set(FOLDERS)


def test_a_new_folder_in_the_collection_takes_a_copy(history):
    assert history.cp("bert_mlm", "my_project").returncode == 0
    assert (history.upstream / "my_project/bert_mlm.py").is_file()
    refused = history.cp("bert_mlm", "..", "--package", "upstream")
    assert refused.returncode == 2 and refused.stderr.startswith("error: ../upstream is this collection itself: ")


def test_modules_are_renamed_by_syntax():
    source = '''\
"""import common.files, from common import files"""
from common import files  # from common import files

    locate,  # común
)
from commons import x; from . import common; from .common import y
import common.files as f, os, keras_replicas.errors
def g(é="from common import x"): from  common.files import (é); return keras_replicas.errors, g.common
'''
    assert (
        with_modules(source.encode(), {"common": "my.train.common"}).decode()
        == '''\
"""import common.files, from common import files"""
from my.train.common import files  # from common import files
from my.train.common.data.order import (
    locate,  # común
)
from commons import x; from . import common; from .common import y
import my.train.common.files as f, os, my.train.common.errors
def g(é="from common import x"): from  my.train.common.files import (é); return my.train.common.errors, g.common
'''
    )
