import dataclasses
import json

import pytest

from common.command_line import UserError
from common.results import open_run, write_json


@dataclasses.dataclass(frozen=True)
class Config:
    workdir: str
    batch_size: int = 8
    seed: int = 0
    overwrite: bool = False


def test_a_run_with_other_knobs_is_refused_by_name(tmp_path):
    config = Config(str(tmp_path / "run"))
    assert open_run("a", config) == (tmp_path / "run", None)
    with pytest.raises(UserError, match="batch_size 8, not 16, seed 0, not 1.* --overwrite"):
        open_run("a", dataclasses.replace(config, batch_size=16, seed=1))
    with pytest.raises(UserError, match="recipe 'a', not 'b'"):
        open_run("b", config)
    assert json.loads((tmp_path / "run/config.json").read_text())["batch_size"] == 8


def test_a_complete_run_is_given_back_and_overwrite_starts_afresh(tmp_path):
    config = Config(str(tmp_path))
    open_run("a", config)
    write_json(tmp_path / "results.json", {"steps": 3})
    assert open_run("a", config) == (tmp_path, {"steps": 3})
    assert open_run("a", dataclasses.replace(config, batch_size=16, overwrite=True)) == (tmp_path, None)
    assert not (tmp_path / "results.json").exists()


def test_overwrite_deletes_nothing_but_a_run(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    open_run("a", Config(str(tmp_path), overwrite=True))
    assert (tmp_path / "thesis.tex").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to the work folder"):
        open_run("a", Config(str(tmp_path / "file" / "run")))


def test_json_is_written_whole_or_not_at_all(tmp_path):
    write_json(tmp_path / "a.json", {"old": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"new": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1}
