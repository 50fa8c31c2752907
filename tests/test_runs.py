import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from common.run.run_folder import bring_back, discard_replaced, set_aside

from common.data.glue_tasks import TASKS
from common.files import write_json
from common.run import run_folder
from common.run.runs import open_run
from common.run.step_log import StepLog
from keras_replicas.errors import UserError
from recipes import bert_from_scratch, bert_mlm, glue_controller, glue_custom_loop, text_classifier


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


OLD = {
    "results.json": "{}",
    "steps.jsonl": "1",
    "checkpoints/ckpt-4.index": "index",
    "checkpoints/ckpt-4.data-00000-of-00001": "data",
    "tensorboard/events.out.tfevents.1": "events",
    "preset/model.weights.h5": "weights",
    "preset/assets/tokenizer/vocabulary.txt": "words",
    "data/train-00000-of-00001-9.tfrecord": "records",
    "snapshots/step-4/config.json": "{}",
    "tokens/0123456789abcdef/train/000000-5.ids": "ids",
}
NEW = {
    "steps.jsonl": "new",
    "checkpoints/ckpt-4.data-00000-of-00001": "new",
    "predictions/test.tsv": "new",
    "best.json": "{}",
}
USERS = {
    "thesis.tex": "years of work",
    "logs/worker-0.log": "log",
    "data/precious.txt": "precious",
    "preset/notes.md": "notes",
    "tokens/mine": "mine",
    "snapshots/step-final/notes": "notes",
    "checkpoints/best.keras": "model",
}


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


def test_overwrite_keeps_the_old_run_until_the_first_checkpoint_of_the_new(config, capsys):
    workdir = reopen(config).workdir
    fill(workdir, OLD, USERS)
    before = files_in(workdir)
    reopen(config, seed=1, overwrite=True)
    assert f"The old run is kept in {workdir}/.replaced until the new one has its first" in capsys.readouterr().out
    fill(workdir, NEW)
    replaced = {name for name in files_in(workdir) if name.startswith(".replaced/")}
    assert replaced == {f".replaced/{name}" for name in before.keys() - USERS.keys()}
    assert reopen(config).results == {}  # the new one ended before its first checkpoint
    assert files_in(workdir) == before and not (workdir / ".replaced").exists()
    assert "is restored: the one that was to replace it" in capsys.readouterr().out
    reopen(config, seed=1, overwrite=True)
    fill(workdir, NEW)
    discard_replaced(workdir)
    assert files_in(workdir).keys() == {"config.json", *NEW, *USERS}
    assert reopen(config, seed=1).results is None


def test_overwrite_takes_no_file_that_the_run_there_never_wrote(config):
    """A run of one recipe, replaced by others, among files by the very names that other recipes give theirs."""
    workdir = Path(config.workdir)
    mine = {
        "predictions/validation.tsv": "mine",
        "predictions/x.tsv": "mine",
        "data/tokenizer.json": "mine",
        "best/model.weights.h5": "mine",
        "best.json": "mine",
        "preset/README.md": "mine",
        "checkpoints/ckpt-best.data-00000-of-00001": "mine",
    }
    own = {"steps.jsonl": "1", "preset/config.json": "{}", "results.json": "{}"}
    reopen(config, writes=())
    fill(workdir, own, mine)
    reopen(config, writes=(), seed=1, overwrite=True)
    assert files_in(workdir).keys() == {"config.json", *mine, *(f".replaced/{name}" for name in (*own, "config.json"))}
    for other, first in (("predictions", "predictions/validation.tsv"), ("data", "data/tokenizer.json")):
        with pytest.raises(UserError, match=f"run holds {first}, which the run there did not write. Give another"):
            reopen(config, recipe="b", writes=(other,), overwrite=True)
        assert files_in(workdir).keys() == {"config.json", *own, *mine}  # the first run is back
    new = {"predictions/MRPC.tsv": "new", "steps.jsonl": "new"}
    (workdir / "predictions/validation.tsv").unlink()
    reopen(config, recipe="b", writes=("predictions",), overwrite=True)
    fill(workdir, new)
    reopen(config, writes=())  # the new one ended before its first checkpoint
    del mine["predictions/validation.tsv"]
    assert files_in(workdir).keys() == {"config.json", *own, *mine}
    assert all((workdir / name).read_text() == text for name, text in mine.items())


def test_a_run_begun_anew_in_the_place_of_another_recipes_notes_what_both_wrote(config):
    workdir = reopen(config, writes=("data",)).workdir
    fill(workdir, {"data/tokenizer.json": "{}"})
    assert reopen(config, recipe="b", writes=("predictions",)).saved["writes"] == ["data", "predictions"]
    reopen(config, writes=("data",), overwrite=True)
    assert not (workdir / "data").exists()


def test_what_a_run_of_0_1_0_wrote_is_all_that_a_run_can_write(config):
    workdir = reopen(config).workdir
    fill(workdir, OLD)
    saved = json.loads((workdir / "config.json").read_text())
    del saved["writes"]
    write_json(workdir / "config.json", saved)
    reopen(config, writes=(), seed=1, overwrite=True)
    assert {name for name in files_in(workdir) if not name.startswith(".replaced/")} == {"config.json"}


@pytest.mark.parametrize(
    "name", [".lock", ".discarded/thesis.tex", ".replaced/results.json", ".replaced", ".discarded"]
)
def test_users_files_by_the_names_that_a_run_needs_are_not_touched(config, name):
    workdir = Path(config.workdir)
    fill(workdir, {name: "mine", "config.unfinished": "mine", "results.unfinished": "mine"})
    before = files_in(workdir) | {name: (workdir / name).read_text()}
    with pytest.raises(UserError, match=f"run.*{name.split('/')[0]}.* (no|part of a) run.*ive another --workdir"):
        reopen(config, overwrite=True)
    assert files_in(workdir) | {name: (workdir / name).read_text()} == before
    (workdir / name).unlink()
    if "/" in name:
        (workdir / name).parent.rmdir()
    reopen(config)
    fill(workdir, {name: "mine"})
    if name == ".replaced/results.json":  # where a run is, this is a part of one
        return
    with pytest.raises(UserError, match="not part of a run. Move it, or give another --workdir"):
        reopen(config, seed=1, overwrite=True)
    (workdir / name).unlink()
    if "/" in name:
        (workdir / name).parent.rmdir()
    reopen(config, overwrite=True)
    assert (workdir / "config.unfinished").read_text() == (workdir / "results.unfinished").read_text() == "mine"


def test_what_a_killed_process_was_writing_is_removed_and_nothing_like_it(config):
    workdir = reopen(config).workdir
    fill(workdir, {"config.json.0123456789ab.unfinished": "{", "novel.unfinished": "mine", "a.1.unfinished/b": "mine"})
    reopen(config)
    assert files_in(workdir).keys() == {"config.json", "novel.unfinished", "a.1.unfinished/b"}


def test_a_run_that_comes_back_overwrites_no_file_that_was_put_in_its_place(config):
    workdir = reopen(config).workdir
    fill(workdir, OLD, {"predictions/test.tsv": "old"})
    before = files_in(workdir)
    reopen(config, writes=(), seed=1, overwrite=True)
    fill(workdir, {"predictions/test.tsv": "mine"})
    for _ in range(2):
        with pytest.raises(UserError, match=r"run/predictions/test.tsv is in the way of the old run in"):
            reopen(config)
    assert (workdir / "predictions/test.tsv").read_text() == "mine"
    (workdir / "predictions/test.tsv").unlink()
    reopen(config)
    assert files_in(workdir) == before


def test_a_run_that_is_complete_without_a_checkpoint_stays(config):
    workdir = reopen(config).workdir
    fill(workdir, OLD)
    reopen(config, seed=1, overwrite=True)
    write_json(workdir / "results.json", {"steps": 3})
    assert reopen(config, seed=1).results == {"steps": 3}
    assert files_in(workdir).keys() == {"config.json", "results.json"}


def test_a_kill_between_the_first_checkpoint_and_the_end_of_the_old_run_keeps_the_new(config):
    workdir = reopen(config).workdir
    fill(workdir, OLD)
    reopen(config, seed=1, overwrite=True)
    has_a_checkpoint(workdir)
    assert reopen(config, seed=1).saved["seed"] == 1
    assert files_in(workdir).keys() == {"config.json", "checkpoints/ckpt-4.index"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [bert_mlm, bert_from_scratch, text_classifier, glue_controller, glue_custom_loop])
def test_overwrite_takes_all_that_a_recipe_writes(recipe, small, tmp_path):
    """What stays would be taken for the user's, and the next run be refused for it."""
    options = small | {"max_steps": 2}
    if recipe in (text_classifier, glue_controller, glue_custom_loop):
        lines = [f"{'good' if i % 2 else 'bad'} number {i},{i % 2}" for i in range(200)]
        (tmp_path / "own.csv").write_text("\n".join(["text,label", *lines]))
        del options["corpus"]
        options |= {"task": "own", "data": str(tmp_path / "own.csv"), "text_columns": "text", "label_column": "label"}
    recipe.train_and_evaluate(recipe.Config(**options))
    workdir = Path(options["workdir"])
    written = {str(path.relative_to(workdir)) for path in workdir.rglob("*") if path.is_file()} - {".lock"}
    set_aside(workdir)
    left = {str(path.relative_to(workdir)) for path in workdir.rglob("*") if path.is_file()} - {".lock"}
    assert left == {f".replaced/{name}" for name in written}


class Killed(BaseException):
    pass


def test_a_kill_between_any_two_changes_of_the_folder_loses_nothing(config, tmp_path, monkeypatch):
    """Set aside, begun anew, brought back: killed before each change in turn, and then once more on the way back."""
    workdir = reopen(config).workdir
    fill(workdir, OLD, USERS)
    old = files_in(workdir)
    really = {
        (module, name): getattr(module, name)
        for module, name in ((os, "replace"), (os, "rmdir"), (os, "unlink"), (shutil, "rmtree"))
    }

    def killed_at(count, work):
        """Whether the work came to so many changes."""
        left = [count]

        def counted(do):
            def change(*words, **options):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return do(*words, **options)

            return change

        with monkeypatch.context() as patch:
            for (module, name), do in really.items():
                patch.setattr(module, name, counted(do))
            try:
                work()
            except Killed:
                return True
            return False

    def begin():
        bring_back(workdir)
        set_aside(workdir)
        fill(workdir, NEW, {"config.json": "new"})

    def end():
        begin()
        bring_back(workdir)

    kills = 0
    while killed_at(kills, end):
        killed_at(kills % 7, lambda: bring_back(workdir))
        bring_back(workdir)
        assert files_in(workdir) == old, kills
        assert not set(os.listdir(workdir)) & {run_folder.REPLACED, run_folder.DISCARDED}
        kills += 1
    assert kills > 20
    for count in range(2):
        begin()
        assert killed_at(count, lambda: discard_replaced(workdir))
        bring_back(workdir)
        if count == 0:  # before it began
            assert files_in(workdir) == old
    assert files_in(workdir).keys() == {"config.json", *NEW, *USERS}


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


def test_a_run_knows_its_predictions_by_every_name_that_glue_wants():
    names = {f"predictions/{task.submission}" for task in TASKS.values()}
    assert names < {*run_folder.OF_SOME_RUNS["predictions"]}


@dataclasses.dataclass(frozen=True)
class OfData(Config):
    data: str = ""


def test_a_complete_run_says_of_which_data_it_is(tmp_path, capsys):
    config = OfData(str(tmp_path / "run"), data="a.csv")
    write_json(reopen(config).workdir / "results.json", {"steps": 3})
    for data, told in (("b.csv", "is complete on the data a.csv; --overwrite"), ("a.csv", "is complete; --overwrite")):
        reopen(config, data=data)
        assert told in capsys.readouterr().out
