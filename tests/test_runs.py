import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from common.run.run_folder import discard_replaced

from common.files import write_json
from common.run import run_folder
from common.run.runs import open_run
from common.run.step_log import StepLog
from keras_replicas.errors import UserError


@dataclasses.dataclass(frozen=True)
class Config:
    workdir: str
    batch_size: int = 8
    replicas: int = 0
    seed: int = 0
    rate: float = 0.1
    lr_scaling: str = "none"
    overwrite: bool = False
    dry_run: bool = False


@pytest.fixture
def config(tmp_path):
    return Config(str(tmp_path / "run"))


def reopen(config, recipe="a", writes=tuple(run_folder.OF_SOME_RUNS), **changes):
    """Opens, looks, and lets go."""
    run = open_run(recipe, dataclasses.replace(config, **changes), writes)
    run.lock.close()
    return run


def has_a_checkpoint(workdir):
    (workdir / "checkpoints").mkdir()
    (workdir / "checkpoints/ckpt-4.index").write_text("index")


def test_a_run_with_other_options_is_refused_by_name(config):
    run = reopen(config)
    assert run.results is None
    has_a_checkpoint(run.workdir)
    with pytest.raises(UserError, match="seed 0, not 1, rate 0.1, not 0.2.* --overwrite"):
        reopen(config, seed=1, rate=0.2)
    with pytest.raises(UserError, match="recipe 'a', not 'b'"):
        reopen(config, recipe="b")
    assert json.loads((reopen(config).workdir / "config.json").read_text())["seed"] == 0


def test_a_run_without_a_checkpoint_is_begun_anew_with_any_options(config):
    run = reopen(config)
    run.scale(config, 4, 0.4, "adamw")
    with pytest.raises(UserError, match="too few for a global batch of 32"):
        run.check_data({"train": 31, "validation": 1}, {"train": 7})
    mended = dataclasses.replace(config, batch_size=4, seed=1)
    run = reopen(mended)
    assert run.scale(mended, 4, 0.4, "adamw")[::2] == (4, 0.4)
    run.check_data({"train": 31, "validation": 1}, {"train": 7})
    assert json.loads((run.workdir / "config.json").read_text())["seed"] == 1


def test_the_global_batch_and_the_peak_stay_and_the_split_may_change(config):
    run = reopen(config)
    assert run.scale(config, 4, 0.4, "adamw")[::2] == (8, 0.4)
    has_a_checkpoint(run.workdir)
    assert reopen(config).scale(config, 2, 0.2, "adamw")[::2] == (16, 0.4)
    other = dataclasses.replace(config, batch_size=32)
    assert reopen(other).scale(other, 1, 0.1, "adamw")[::2] == (32, 0.4)
    other = dataclasses.replace(config, batch_size=16)
    assert reopen(other).scale(other, 2, 0.1, "adamw")[::2] == (16, 0.4)
    for replicas, batch_size in ((3, 8), (2, 32)):
        with pytest.raises(UserError, match="a global batch of 32, which is not"):
            other = dataclasses.replace(config, batch_size=batch_size)
            reopen(other).scale(other, replicas, 0.1, "adamw")


def test_keras_gets_the_seed_and_the_policy_that_the_run_began_with(config):
    def configure(precision, seed=0):
        run = reopen(config, seed=seed)
        run.configure_keras(SimpleNamespace(seed=seed, precision=precision), 64)
        return run.workdir, np.random.random(), keras.config.dtype_policy().name

    try:
        workdir, draw, policy = configure("mixed_bfloat16")
        has_a_checkpoint(workdir)
        assert configure("float32")[1:] == (draw, policy) == (draw, "mixed_bfloat16")
        shutil.rmtree(workdir)
        _, other, policy = configure("float32", seed=1)
        assert other != draw and policy == "float32"
    finally:
        keras.config.set_dtype_policy("float32")


def test_what_is_said_of_a_run_that_was_stopped_helps_it_with_overwrite_too(config):
    """The very command that began it goes on with it, whatever it is refused for."""
    config = dataclasses.replace(config, overwrite=True)
    run = reopen(config)
    run.scale(config, 4, 0.4, "adamw")
    run.check_data({"train": 32, "validation": 1}, {"train": 7})
    has_a_checkpoint(run.workdir)
    for refused in (
        lambda: reopen(config).scale(config, 3, 0.4, "adamw"),
        lambda: reopen(config).check_data({"train": 32, "validation": 1}, {"train": 8}),
        lambda: StepLog(run.workdir, 1, first_step=4),
    ):
        with pytest.raises(UserError, match=f"or give another --workdir, or remove {run.workdir} to start afresh$"):
            refused()
    shutil.rmtree(run.workdir)
    assert reopen(config).results is None


def test_a_complete_run_is_given_back_and_overwrite_starts_afresh(config):
    workdir = reopen(config).workdir
    write_json(workdir / "results.json", {"steps": 3})
    assert reopen(config).results == {"steps": 3}
    assert reopen(config, seed=1, overwrite=True).results is None
    assert not (workdir / "results.json").exists()


def test_the_command_with_overwrite_that_began_a_run_goes_on_until_it_is_complete(config):
    has_a_checkpoint(reopen(config).workdir)
    workdir = reopen(config, seed=1, overwrite=True).workdir
    fill(workdir, {"steps.jsonl": "new"})
    reopen(config, seed=1, overwrite=True)  # stopped before its first checkpoint: begun anew
    assert not (workdir / "steps.jsonl").exists() and (workdir / ".replaced").exists()
    has_a_checkpoint(workdir)
    discard_replaced(workdir)
    fill(workdir, {"steps.jsonl": "new", "results.json": ""})  # as a power cut may leave it
    for _ in range(2):
        reopen(config, seed=1, overwrite=True)
        assert (workdir / "steps.jsonl").exists() and not (workdir / ".replaced").exists()
    reopen(config, seed=1)
    write_json(workdir / "results.json", {"steps": 3})
    for changes in ({"seed": 1}, {"seed": 1, "batch_size": 4}):  # the second is another command, of a run to go on
        assert reopen(config, **changes, overwrite=True).results is None
        assert (workdir / ".replaced/checkpoints/ckpt-4.index").exists()
        has_a_checkpoint(workdir)
        discard_replaced(workdir)


def test_a_launcher_that_starts_its_workers_again_gets_the_run_that_they_completed(config, monkeypatch):
    write_json(reopen(config, overwrite=True).workdir / "results.json", {"steps": 1})
    for launch, results in (("one", None), ("one", {"steps": 3}), ("two", None), ("two", {"steps": 3})):
        monkeypatch.setenv("LAUNCH_ID", launch)
        run = reopen(config, overwrite=True)
        assert run.results == results
        write_json(run.workdir / "results.json", {"steps": 3})
    monkeypatch.delenv("LAUNCH_ID")
    has_a_checkpoint(reopen(config, overwrite=True, seed=1).workdir)
    monkeypatch.setenv("LAUNCH_ID", "three")
    workdir = reopen(config, overwrite=True, seed=1).workdir  # goes on with what another began
    write_json(workdir / "results.json", {"steps": 3})
    assert reopen(config, overwrite=True, seed=1).results == {"steps": 3}


def files_in(folder):
    """All files by name but the lock, with what is in them."""
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def fill(folder, *contents):
    for name, text in {name: text for content in contents for name, text in content.items()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_run_is_not_begun_among_files_of_its_names(config, tmp_path):
    workdir = tmp_path / "run"
    mine = {"data/precious.txt": "precious", "config.json": '{"model_type": "bert"}', "notes.txt": "notes"}
    fill(workdir, mine)
    for overwrite in (False, True):
        with pytest.raises(UserError, match="run holds config.json, data, but no run: .* Give another --workdir"):
            reopen(config, overwrite=overwrite)
    assert files_in(workdir) == mine and not (workdir / ".lock").exists()
    other = dataclasses.replace(config, workdir=str(tmp_path / "other"))
    fill(tmp_path / "other", {"thesis.tex": "years of work", "logs/worker-0.log": "log"})
    reopen(other, overwrite=True)
    assert len(files_in(tmp_path / "other")) == 3


def test_a_run_is_begun_where_its_shards_are_already(config):
    workdir = Path(config.workdir)
    fill(workdir, {"data/manifest.json": '{"made_from": {}}', "tokens/0123456789abcdef/train/000000-5.ids": "ids"})
    assert reopen(config).results is None and (workdir / "data/manifest.json").exists()


def test_what_a_killed_process_was_writing_is_removed_and_nothing_like_it(config):
    workdir = reopen(config).workdir
    fill(workdir, {"config.json.0123456789ab.unfinished": "{", "novel.unfinished": "mine", "a.1.unfinished/b": "mine"})
    reopen(config)
    assert files_in(workdir).keys() == {"config.json", "novel.unfinished", "a.1.unfinished/b"}


def test_a_folder_that_cannot_be_written_or_is_in_use(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to the work directory"):
        open_run("a", Config(str(tmp_path / "file" / "run")))
    run = open_run("a", config)
    with pytest.raises(UserError, match="another process is running"):
        open_run("a", config)
    run.lock.close()


def test_a_file_that_is_not_json_is_no_end(config):
    workdir = reopen(config).workdir
    for text in ("", '{"steps": 3', "[]"):  # as a power cut may leave it
        (workdir / "results.json").write_text(text)
        assert reopen(config).results is None
    (workdir / "config.json").write_text("")
    with pytest.raises(UserError, match="holds config.json, results.json, but no run: its config.json is missing, or"):
        reopen(config)


def test_a_run_goes_on_with_the_same_data_only(config):
    has_a_checkpoint(reopen(config).workdir)

    def checked(sizes, checksums):
        run = reopen(config)
        run.scale(config, 2, 0.1, "adamw")
        run.check_data(sizes, checksums)

    sizes = {"train": 16, "validation": 1}
    for too_little in ({"train": 15}, {"validation": 0}):
        with pytest.raises(UserError, match="too few for a global batch of 16|no text is left for validation"):
            checked(sizes | too_little, {"train": 1})
    checked(sizes, {"train": 7})  # more of it than was refused
    checked(sizes, {"train": 7})
    with pytest.raises(UserError, match="has changed since the run"):
        checked(sizes, {"train": 8})


def test_a_dry_run_writes_nothing_and_takes_no_notice_of_a_run(config):
    dry = dataclasses.replace(config, dry_run=True, seed=1)
    run = open_run("a", dry)
    assert run.scale(config, 2, 0.1, "adamw")[::2] == (8, 0.1)
    assert not run.workdir.exists()
    reopen(config).scale(config, 4, 0.4, "adamw")
    write_json(run.workdir / "results.json", {"steps": 3})
    before = files_in(run.workdir)
    for recipe, overwrite in (("a", False), ("b", True)):
        run = open_run(recipe, dataclasses.replace(dry, overwrite=overwrite))
        assert run.results is None and run.scale(config, 2, 0.1, "adamw")[::2] == (8, 0.1)
        run.check_data({"train": 16, "validation": 1}, {"train": 9})
    assert files_in(run.workdir) == before


@dataclasses.dataclass(frozen=True)
class OfData(Config):
    data: str = ""


def test_a_complete_run_says_of_which_data_it_is(tmp_path, capsys):
    config = OfData(str(tmp_path / "run"), data="a.csv")
    write_json(reopen(config).workdir / "results.json", {"steps": 3})
    for data, told in (("b.csv", "is complete on the data a.csv; --overwrite"), ("a.csv", "is complete; --overwrite")):
        reopen(config, data=data)
        assert told in capsys.readouterr().out
