import dataclasses
import json

import pytest

from common.command_line import UserError
from common.runs import open_run, write_json


@dataclasses.dataclass(frozen=True)
class Config:
    workdir: str
    batch_size: int = 8
    replicas: int = 0
    seed: int = 0
    rate: float = 0.1
    overwrite: bool = False
    dry_run: bool = False


@pytest.fixture
def config(tmp_path):
    return Config(str(tmp_path / "run"))


def reopen(config, recipe="a", **changes):
    """Opens, looks, and lets go."""
    run = open_run(recipe, dataclasses.replace(config, **changes))
    run.lock.close()
    return run


def test_a_run_with_other_knobs_is_refused_by_name(config):
    assert reopen(config).results is None
    with pytest.raises(UserError, match="seed 0, not 1, rate 0.1, not 0.2.* --overwrite"):
        reopen(config, seed=1, rate=0.2)
    with pytest.raises(UserError, match="recipe 'a', not 'b'"):
        reopen(config, recipe="b")
    assert json.loads((reopen(config).workdir / "config.json").read_text())["seed"] == 0


def test_the_global_batch_and_the_peak_stay_and_the_split_may_change(config):
    assert reopen(config).split(config, replicas=4, peak_learning_rate=0.4) == (8, 0.4)
    assert reopen(config).split(config, replicas=2, peak_learning_rate=0.2) == (16, 0.4)
    other = dataclasses.replace(config, batch_size=32)
    assert reopen(other).split(other, replicas=1, peak_learning_rate=0.1) == (32, 0.4)
    for replicas, batch_size in ((3, 8), (2, 32)):
        with pytest.raises(UserError, match="a global batch of 32, which is not"):
            other = dataclasses.replace(config, batch_size=batch_size)
            reopen(other).split(other, replicas, 0.1)


def test_a_complete_run_is_given_back_and_overwrite_starts_afresh(config):
    workdir = reopen(config).workdir
    write_json(workdir / "results.json", {"steps": 3})
    assert reopen(config).results == {"steps": 3}
    assert reopen(config, seed=1, overwrite=True).results is None
    assert not (workdir / "results.json").exists()


def test_overwrite_deletes_nothing_but_a_run(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    reopen(Config(str(tmp_path), overwrite=True))
    assert (tmp_path / "thesis.tex").exists()


def test_a_folder_that_cannot_be_written_or_is_in_use(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to the work folder"):
        open_run("a", Config(str(tmp_path / "file" / "run")))
    run = open_run("a", config)
    with pytest.raises(UserError, match="another process is running"):
        open_run("a", config)
    run.lock.close()


def test_json_is_written_whole_or_not_at_all(tmp_path):
    write_json(tmp_path / "a.json", {"old": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"new": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1}


def test_a_run_goes_on_with_the_same_data_only(config):
    reopen(config).check_data({"train": 7})
    reopen(config).check_data({"train": 7})
    with pytest.raises(UserError, match="has changed since the run"):
        reopen(config).check_data({"train": 8})


def test_a_dry_run_writes_nothing(config):
    run = open_run("a", dataclasses.replace(config, dry_run=True))
    assert run.split(config, replicas=2, peak_learning_rate=0.1) == (8, 0.1)
    assert not run.workdir.exists()
