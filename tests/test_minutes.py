"""`--minutes`, for bert_mlm and bert_from_scratch."""

import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.model.sizes import SIZES
from common.run import minutes
from common.run.runs import Run
from keras_replicas.errors import UserError
from keras_replicas.strategy import make_strategy
from recipes import bert_from_scratch, bert_mlm


def losses(workdir):
    return [json.loads(line)["loss"] for line in Path(workdir, "steps.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [bert_mlm, bert_from_scratch])
def test_a_run_of_some_seconds_takes_them_and_is_that_of_its_steps(recipe, small, tmp_path, capsys):
    options = {name: value for name, value in small.items() if name not in ("epochs", "max_steps")}
    results = recipe.train_and_evaluate(recipe.Config(**options | {"minutes": 0.3}))  # 18 seconds
    steps = results["steps"]
    assert f"--minutes 0.3: {steps:,} steps, " in capsys.readouterr().out
    assert steps > 50 and 2 < results["seconds"] < 27
    assert results["learning_rate"]["last"] < 0.1 * results["learning_rate"]["peak"]  # the schedule is at its end
    given = {"workdir": str(tmp_path / "given"), "max_steps": steps, "epochs": steps}
    recipe.train_and_evaluate(recipe.Config(**options | given))
    assert losses(tmp_path / "given") == losses(options["workdir"])


def test_a_resumed_run_keeps_its_size_and_its_steps(tmp_path, monkeypatch):
    config = bert_mlm.Config(workdir=str(tmp_path), minutes=2)
    run = Run(tmp_path, {"chosen_model": "mini", "chosen_steps": 77}, None, None)
    monkeypatch.setattr(minutes, "device_peak", lambda dtype: 1e6)
    sized = minutes.choose_size(config, run, make_strategy(1))
    assert (sized.model, sized.learning_rate) == ("mini", 2.5e-3)
    assert minutes.count_steps(config, run, None, {"train": 10}, None, None) == 77


def test_the_size_is_the_largest_that_sees_enough(tmp_path, monkeypatch, capsys):
    def chosen(peak, **options):
        monkeypatch.setattr(minutes, "device_peak", lambda dtype: peak)
        config = bert_mlm.Config(workdir=str(tmp_path / "run"), **{"minutes": 1} | options)
        return minutes.choose_size(config, Run(tmp_path, {}, None, None), make_strategy(1)).model

    sizes = [chosen(10.0**power) for power in range(6, 20)]
    assert sizes == sorted(sizes, key=list(SIZES).index) and {sizes[0], sizes[-1]} == {"tiny", "large"}
    # Hand count for mini: the weights of its layers, and for a token of 64 these and 30 % of the head's, six-fold.
    weights = 4 * (4 * 256**2 + 2 * 256 * 1024)
    flops = 6 * weights + 12 * 4 * 256 * 64 + 6 * 0.3 * (256**2 + 256 * 4096)
    enough = 20 * weights * flops / 60 / minutes.UTILISATION
    assert (chosen(enough * 0.999), chosen(enough * 1.001)) == ("tiny", "mini")
    assert (chosen(enough * 1.001 / 2, minutes=2), chosen(enough * 0.999 / 2, minutes=2)) == ("mini", "tiny")
    assert chosen(1e6, model="small") == "small"
    assert chosen(1e19, minutes=None) is None
    file = tmp_path / "vocabulary.txt"
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(30_000))]))
    assert (chosen(enough * 1.01), chosen(enough * 1.01, vocabulary=str(file))) == ("mini", "tiny")
    capsys.readouterr()


def test_the_time_is_that_of_compiling_the_steps_and_whole_validations():
    """Hand count: a step of 1 s, epochs of 10 steps, validations of 6, which take 2 s; 5 s for compiling."""
    measured = {"compiling": 5.0, "step": 1.0, "train": 10, "validation": 6}
    ends = {4: 0, 5: 0, 7.5: 0, 8: 1, 16: 9, 17: 10, 18.9: 10, 19.5: 10, 20: 11, 29: 20, 32: 21}
    assert {seconds: minutes.steps_in(seconds, **measured) for seconds in ends} == ends


def test_no_time_is_refused():
    with pytest.raises(UserError, match="--minutes must be above 0; got 0"):
        bert_mlm.Config(minutes=0.0)


@pytest.mark.slow
def test_a_time_too_short_for_a_step_is_refused(small):
    options = {name: value for name, value in small.items() if name not in ("epochs", "max_steps")}
    with pytest.raises(
        UserError, match=r"--minutes 0.001 has no time for a step and a validation: [\d.]+ s each, after"
    ):
        bert_mlm.train_and_evaluate(bert_mlm.Config(**options | {"minutes": 0.001}))
    for given in ({"epochs": 2}, {"max_steps": 2}):
        with pytest.raises(UserError, match="--minutes chooses the steps: leave out"):
            bert_mlm.Config(minutes=1, **given)


@pytest.mark.slow
def test_the_model_that_was_timed_is_gone_before_another_is_made(small, monkeypatch):
    models = weakref.WeakSet()

    def build_model(*arguments):
        assert not models
        models.add(model := build(*arguments))
        return model

    build = bert_mlm.build_model
    monkeypatch.setattr(bert_mlm, "build_model", build_model)
    monkeypatch.setattr(minutes, "SECONDS", 0.1)
    options = {name: value for name, value in small.items() if name not in ("epochs", "max_steps")}
    bert_mlm.train_and_evaluate(bert_mlm.Config(**options | {"minutes": 10, "dry_run": True}))


def test_without_minutes_the_steps_are_those_of_the_epochs_or_fewer():
    for max_steps, steps in ((0, 30), (7, 7), (50, 30)):
        config = SimpleNamespace(minutes=0, epochs=3, max_steps=max_steps)
        assert minutes.count_steps(config, None, None, {"train": 10}, None, None) == steps
