import os
import signal
import subprocess
import sys

import pytest

from common.files import cached, read_json, shortened, write_json
from tests.conftest import ROOT, python

PROGRAM = """
import sys, time
from common.files import cached

def make(path):
    path.mkdir()
    (path / "file").write_text("half")
    print("making", flush=True)
    time.sleep({seconds})
    (path / "file").write_text("whole")

print((cached("folder", ["a"], make) / "file").read_text())
"""


def process(seconds):
    command = [sys.executable, "-c", PROGRAM.format(seconds=seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_names_in_a_message_have_no_control_characters():
    assert shortened(["a\x1b]0;b\x07", "c"]) == "a\ufffd]0;b\ufffd, c"


def test_a_file_is_made_once_for_the_same_inputs(cache):
    made = []

    def make(path):
        made.append(path)
        path.write_text("text")

    first = cached("file", ["a", "b"], make)
    assert cached("file", ["a", "b"], make) == first and len(made) == 1
    assert cached("file", ["ab"], make) != first and len(made) == 2


def test_of_processes_that_want_the_same_folder_one_makes_it(cache):
    both = [process(1), process(1)]
    said = [each.communicate(timeout=60)[0] for each in both]
    assert sorted(said) == ["making\nwhole\n", "whole\n"]


def test_a_folder_whose_making_is_killed_is_made_again(cache):
    killed = process(600)
    assert killed.stdout.readline() == "making\n"
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert process(0).communicate(timeout=60)[0] == "making\nwhole\n"
    assert {path.name for path in cache.glob("[!.]*")} == {cached("folder", ["a"], None).name}


@pytest.mark.parametrize(("home", "least"), [("/proc/nowhere", 0), ("/dev/null", 0), ("{}/full", 2**62)])
def test_without_a_folder_to_write_to_what_is_cached_lives_as_long_as_the_process(
    home, least, tmp_path, tmp_path_factory
):
    home = home.format(own := tmp_path_factory.mktemp("home"))
    environ = os.environ | {"XDG_CACHE_HOME": "", "HOME": home, "TMPDIR": str(tmp_path)}
    code = f"import common.files; common.files.LEAST_FREE = {least}\n" + PROGRAM.format(seconds=0)
    code += "print((cached('folder', ['a'], None) / 'file').read_text())"
    done = python("-c", code, env=environ)
    assert (done.stdout, done.stderr) == ("making\nwhole\nwhole\n", "")
    assert not [*tmp_path.iterdir(), *own.rglob("*-folder")]


def test_json_is_written_whole_or_not_at_all_and_what_is_no_object_in_a_file_is_none(tmp_path):
    path = tmp_path / "a.json"
    assert read_json(path) is None
    for text in ("", '{"steps": 3', "[]", "3", "[" * 100_000, "\udcff"):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert read_json(path) is None
    write_json(path, {"steps": 3})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert read_json(path) == {"steps": 3} and [*tmp_path.iterdir()] == [path]
