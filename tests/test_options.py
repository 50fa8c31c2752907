"""The bounds of options that pages share, by those of one."""

import math

import pytest

from keras_replicas import UserError
from recipes.bert_mlm import Config


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("seq_length", 2, "--seq-length must be from 3 to 65536; got 2"),
        ("batch_size", 2**31, "--batch-size must be from 1 to 2147483647; got 2147483648"),
        ("max_steps", 10**400, f"--max-steps must be from 0 to 2147483647; got {10**400}"),
        ("replicas", 1025, "--replicas must be from 0 to 1024; got 1025"),
        ("seed", 2**32, "--seed must be from 0 to 4294967295; got 4294967296"),
        ("learning_rate", math.nan, "--learning-rate must be from 1e-30 to 1000000000.0; got nan"),
        ("warmup", 1.0, "--warmup must be from 0 to 0.9999999999999999; got 1.0"),
        ("corpus", "", "--corpus is empty: name one, or leave it out"),
        ("workdir", "gs://bucket/run", "--workdir gs://bucket/run must be a folder of this machine"),
        ("accumulate", 3, "--accumulate 3 must divide --batch-size 16"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused(name, value, told):
    with pytest.raises(UserError) as error:
        Config(**{name: value})
    assert str(error.value) == told


def test_values_at_their_bounds_are_taken():
    Config(
        seq_length=3, batch_size=2**31 - 1, seed=2**32 - 1, learning_rate=1e-30, warmup=0.0, preset="", replicas=1024
    )
    Config(seq_length=2**16, batch_size=8, accumulate=8, warmup=math.nextafter(1, 0), max_steps=0)


def test_an_input_must_not_lie_in_the_runs_folder(tmp_path, monkeypatch):
    (tmp_path / "run/deeper").mkdir(parents=True)
    (tmp_path / "run/deeper/a.txt").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    inside = ("run", "run/deeper/a.txt"), ("link", "run/deeper"), (str(tmp_path / "run"), "link"), (".", "run")
    for workdir, corpus in inside:
        with pytest.raises(UserError, match=f"--corpus {corpus} lies in the run's folder, which --overwrite moves"):
            Config(workdir=workdir, corpus=corpus)
    with pytest.raises(UserError, match="the run's folder lies in --corpus run, which is read: give another"):
        Config(workdir="run/deeper/new", corpus="run")
    for workdir, corpus in (("other", "run"), ("run", "gs://run/deeper"), ("run", "x" * 300)):
        Config(workdir=workdir, corpus=corpus)


def test_a_resumed_run_must_have_all_options_but_the_free_ones():
    free = {"workdir", "replicas", "checkpoint_every", "overwrite", "dry_run", "accumulate", "jit"}
    config = Config(seed=7)
    fixed = {name: value for name, value in vars(config).items() if name not in free}
    assert config.fixed("a") == {"recipe": "a"} | fixed and fixed["seed"] == 7
