import json
import os

import pytest

from common.files import write_json
from common.run_folder import open_run
from keras_replicas import UserError
from tests.conftest import ROOT, files_in, python

OPTIONS = {"recipe": "a", "seed": 0, "rate": 0.1, "model": None}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs/run"


def opened(folder, overwrite=False, **changes):
    with open_run(str(folder), OPTIONS | changes, overwrite=overwrite) as run:
        return run


def begun(folder, **changes):
    opened(folder, **changes)
    write(folder / "checkpoints/ckpt-4.index")


def write(path, text="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def aside(folder):
    return sorted(folder.parent.glob(f"{folder.name}.old-*"))


def test_one_process_at_a_time_opens_a_run(folder):
    with open_run(str(folder), OPTIONS), pytest.raises(UserError, match="another process is running in .*/runs/run"):
        open_run(str(folder), OPTIONS, overwrite=True)
    assert opened(folder).results is None


def test_a_run_is_resumed_with_its_options_and_refused_by_name_with_others(folder):
    begun(folder)
    before = files_in(folder)
    with pytest.raises(UserError, match="seed 0, not 1, rate 0.1, not 0.2, more None, not 3. Give another folder, or"):
        opened(folder, seed=1, rate=0.2, more=3)
    assert files_in(folder) == before and opened(folder).results is None


def test_before_anything_came_of_a_run_its_options_may_change_and_then_what_it_recorded_is_kept(folder):
    write(folder / ".config.json.123.unfinished", "{")  # as a killed process left it
    with open_run(str(folder), OPTIONS) as run:
        run.keep("scaled", lambda: (16, 0.1))
    with open_run(str(folder), OPTIONS | {"seed": 1}) as run:
        assert run.keep("scaled", lambda: (32, 0.2)) == (32, 0.2)
    assert json.loads((folder / "config.json").read_text())["options"]["seed"] == 1
    write(folder / "steps.jsonl")
    with open_run(str(folder), OPTIONS | {"seed": 1}) as run:
        assert run.keep("scaled", lambda: (64, 0.4)) == [32, 0.2]


def test_a_run_goes_on_only_with_what_it_began_with(folder):
    for _ in range(2):
        with open_run(str(folder), OPTIONS) as run:
            run.begin_with("data", {"checksum": 1})
            write(folder / "steps.jsonl")
    told = pytest.raises(UserError, match="holds a run with another data. Give another folder")
    with open_run(str(folder), OPTIONS) as run, told:
        run.begin_with("data", {"checksum": 2})


def test_overwrite_moves_a_run_aside_whole_and_says_where(folder, capsys):
    begun(folder)
    write(folder / "notes.txt", "mine")
    write_json(folder / "results.json", {"steps": 3})
    before = files_in(folder)
    assert opened(folder, overwrite=True, seed=1).results is None
    (old,) = aside(folder)
    assert files_in(old) == before and files_in(folder).keys() == {".lock", "config.json"}
    assert capsys.readouterr().out == f"The old run is now in {old}; delete it when you no longer need it.\n"
    write_json(folder / "results.json", {})
    opened(folder, overwrite=True)  # in the same second
    assert len(aside(folder)) == 2


def test_an_interrupted_run_is_resumed_by_the_command_with_overwrite_that_began_it(folder):
    begun(folder)
    before = files_in(folder).keys()
    opened(folder, overwrite=True)
    assert files_in(folder).keys() == before and not aside(folder)
    opened(folder, overwrite=True, seed=1)
    assert len(aside(folder)) == 1


def test_a_launcher_that_starts_its_workers_again_gets_the_run_that_they_completed(folder, monkeypatch):
    begun(folder)
    write_json(folder / "results.json", {"steps": 1})
    for launch, results in (("one", None), ("one", {"steps": 3}), ("two", None), ("two", {"steps": 3})):
        monkeypatch.setenv("LAUNCH_ID", launch)
        assert opened(folder, overwrite=True).results == results
        write_json(folder / "results.json", {"steps": 3})
    (folder / "results.json").unlink()
    write(folder / "steps.jsonl")
    monkeypatch.setenv("LAUNCH_ID", "three")  # resumes what another began
    assert opened(folder, overwrite=True).results is None
    write_json(folder / "results.json", {"steps": 4})
    assert opened(folder, overwrite=True).results == {"steps": 4}


def test_the_logs_that_a_launcher_is_writing_stay(folder, monkeypatch):
    monkeypatch.setenv("LAUNCH_ID", "one")
    write(folder / "logs/worker-1.log", "old")
    begun(folder)  # logs are no run
    monkeypatch.setenv("LAUNCH_ID", "two")
    with (folder / "logs/worker-1.log").open("w") as log:
        opened(folder, overwrite=True, seed=1)
        log.write("new")
    assert (folder / "logs/worker-1.log").read_text() == "new" and len(aside(folder)) == 1


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("results.json", '{"st', "cannot read .*/results.json .*: restore or remove it"),
        ("config.json", '{"kept": [], "options": {}}', "holds files, but no run"),
        ("config.json", '{"kept": {}, "options": []}', "holds files, but no run"),
        ("steps.jsonl/x", "", "steps.jsonl is a folder: move it elsewhere"),
        ("tensorboard", "", "tensorboard is no folder: move it elsewhere"),
    ],
)
def test_a_run_that_was_damaged_is_left_as_it_is(name, content, told, folder):
    begun(folder)
    write(folder / name, content)
    before = files_in(folder)
    with pytest.raises(UserError, match=told):
        opened(folder)
    assert files_in(folder) == before


@pytest.mark.parametrize("name", ["notes.txt", "deeper/notes.txt", "config.json", "link"])
def test_a_run_is_not_begun_among_other_files(name, folder):
    folder.mkdir(parents=True)
    if name == "link":
        (folder / name).symlink_to(__file__)
    else:
        write(folder / name, '{"model_type": "bert"}')
    for overwrite in (False, True):
        with pytest.raises(UserError, match="runs/run holds files, but no run: give another folder"):
            opened(folder, overwrite=overwrite)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [name.split("/")[-1]]


def test_a_link_to_a_folder_is_moved_aside_but_not_the_current_folder(folder, monkeypatch):
    """Relative paths of the same command would then be in the old one."""
    begun(folder)
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="holds the current folder, and cannot be moved aside: go to another one"):
        opened(".", overwrite=True, seed=1)
    monkeypatch.chdir(folder.parent)
    link = folder.parent / "link"
    link.symlink_to(folder)
    write(folder / "steps.jsonl")
    opened(link, overwrite=True, seed=2)
    assert link.is_symlink() and files_in(folder).keys() == {".lock", "config.json"} and len(aside(folder)) == 1


def test_a_folder_that_cannot_be_written(tmp_path):
    write(tmp_path / "file")
    for place in (tmp_path / "file", tmp_path / "file/run", tmp_path / ("x" * 300), "/proc/run"):
        with pytest.raises(UserError, match=r"cannot write to the folder .*\(.+\): give another"):
            opened(place)


# One of two workers: what each is told of runs that they open together.
WORKER = """
import json, sys
from common.run_folder import chief_alone, open_run
from keras_replicas import UserError, exchange, make_strategy, worker_index

make_strategy(1)
own, told = worker_index(), []

def told_of(options, folder="run"):
    try:
        with open_run(folder, options) as run:
            found = [run.results, run.keep("scaled", lambda: 8)]
            exchange({})  # both have opened it
            told.append([*found, run.finish({"steps": 3})])
            exchange({})
    except UserError as error:
        told.append(str(error))

told_of({"seed": own})
told_of({"seed": 0})
told_of({"seed": 0})
told_of({"seed": 1})
told_of({"seed": 0}, f"other-{own}")
sys.argv[0] = f"program-{own}.py"
told_of({"seed": 0})
told.append(chief_alone(lambda: own))
open(f"told-{own}.json", "w").write(json.dumps(told))
exchange({})
"""


@pytest.mark.slow
def test_workers_open_a_run_together(tmp_path):
    write(tmp_path / "program.py", WORKER)
    for own in range(2):
        write(tmp_path / f"program-{own}.py", f"program {own}")
    launch = "-m", "keras_replicas", "launch", "--workers", "2", "program.py"
    done = python(*launch, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    chief, other = (json.loads((tmp_path / f"told-{own}.json").read_text()) for own in range(2))
    options, first, second, refused, shared, code, alone = chief
    assert options == other[0] == "worker 1 was started differently from the chief: seed 1, not 0"
    assert (first, second) == ([None, 8, {"steps": 3}], [{"steps": 3}, 8, {"steps": 3}])
    assert other[1:3] == [[None, 8, {}], [{"steps": 3}, 8, {}]]
    assert refused == other[3] and "seed 0, not 1" in refused
    assert all("worker 1 does not see the chief's folder" in told for told in (shared, other[4]))
    assert code == other[5] and "worker 1 was started differently from the chief: code" in code
    assert (alone, other[6]) == (0, None)
