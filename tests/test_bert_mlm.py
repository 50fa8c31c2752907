import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from common.training import Muon
from common.training import WarmUpPolynomialDecay
from recipes import __main__, bert_mlm

ROOT = Path(__file__).parent.parent


def sequences_of(config):
    return {split: part.numpy() for split, part in bert_mlm.make_datasets(config)[1].items()}


def train(options, **changes):
    return bert_mlm.train_and_evaluate(bert_mlm.Config(**(options | changes)))


def steps_of(results):
    lines = (Path(results["config"]["workdir"]) / "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def weights_of(results):
    model = keras_hub.models.BertMaskedLM.from_preset(f"{results['config']['workdir']}/preset", compile=False)
    # In theory an attention key's bias has no gradient: its value is rounding noise.
    return {f"{i} {v.path}": np.array(v) for i, v in enumerate(model.weights) if "key/bias" not in v.path}


@pytest.fixture(scope="module")
def printed(wikitext, tmp_path_factory):
    """The real command line, in a new process: two epochs on two replicas, whose last batches are not full."""
    workdir = tmp_path_factory.mktemp("finished")
    options = {"corpus": wikitext, "workdir": workdir, "model": "nano", "vocabulary-size": 300, "seq-length": 32}
    options |= {"batch-size": 64, "epochs": 2}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "recipes", "run", "bert_mlm", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, workdir


@pytest.fixture(scope="module")
def finished(printed):
    return json.loads((printed[1] / "results.json").read_text())


def test_the_command_prints_a_report_and_nothing_else(printed):
    """Quiet on standard error, and the report ends with filled masks."""
    for expected in (
        "peak learning rate: 0.0141421, sqrt scaling of 0.01",
        "validation loss",
        "unigram baseline",
        "[MASK]",
    ):
        assert expected in printed[0]


def test_masks_are_filled_by_the_command(finished, monkeypatch, capsys):
    preset = f"{finished['config']['workdir']}/preset"
    monkeypatch.setattr(sys, "argv", ["recipes", "fill-mask", "--preset", preset, "The [MASK] of [MASK]."])
    __main__.main()
    _, sentence, *guesses = capsys.readouterr().out.splitlines()
    assert sentence == "The [MASK] of [MASK]." and len(guesses) == 10  # five for each
    for scores in ([float(guess.split()[0]) for guess in half] for half in (guesses[:5], guesses[5:])):
        assert scores == sorted(scores, reverse=True) and 0 < sum(scores) <= 1


def test_results_hold_every_entry_and_add_up(finished):
    workdir = Path(finished["config"]["workdir"])
    scores = {
        f"{split}_{name}" for split in ("val", "test") for name in ("loss", "accuracy", "perplexity", "unigram_loss")
    }
    assert scores <= set(finished)
    assert finished["replicas"] == 2 and finished["workers"] == 1 and finished["global_batch_size"] == 128
    assert finished["val_perplexity"] == pytest.approx(np.exp(finished["val_loss"]))
    assert finished["config"]["batch_size"] == 64 and finished["versions"]["keras"] == keras.__version__
    steps = steps_of(finished)
    assert [step["step"] for step in steps] == list(range(1, finished["steps"] + 1))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    left = {"config.json", "results.json", "steps.jsonl", "tensorboard", "checkpoints", "preset", ".lock"}
    assert {path.name for path in workdir.iterdir()} == left


def test_a_test_split_without_text_is_left_out(small, wikitext, tmp_path, capsys):
    corpus = tmp_path / "corpus"
    shutil.copytree(wikitext, corpus)
    (corpus / "wiki.test.tokens").write_text("")
    assert list(sequences_of(bert_mlm.Config(**small | {"corpus": str(corpus)}))) == ["train", "validation"]
    assert capsys.readouterr().out == "test: no text; this split is left out\n"


def test_each_epoch_reads_every_token_once(finished):
    sequences = sequences_of(bert_mlm.Config(**finished["config"]))
    tokens = int((sequences["train"] != 0).sum())
    steps = [step["tokens"] for step in steps_of(finished)]
    half = len(steps) // 2
    assert sum(steps[:half]) == sum(steps[half:]) == tokens
    assert len(sequences["train"]) % 128 and steps[half - 1] < steps[0]  # the last batch was not full
    assert finished["padding_fraction"] == pytest.approx(1 - 2 * tokens / (len(steps) * 128 * 32))


def test_the_learning_rate_is_the_schedules(finished):
    rates = [step["learning_rate"] for step in steps_of(finished)]
    total = finished["steps"]
    peak = 2**0.5 * finished["config"]["learning_rate"]
    schedule = WarmUpPolynomialDecay(peak, int(0.1 * total), total)
    # Near the end, a rate is the small difference of large numbers: float32 leaves 1e-7 of the peak.
    np.testing.assert_allclose(rates, [float(schedule(step)) for step in range(total)], rtol=1e-6, atol=2e-7 * peak)
    assert finished["learning_rate"] == {"first": rates[0], "peak": max(rates), "last": rates[-1]}
    assert finished["learning_rate"]["peak"] == pytest.approx(peak, rel=0.05)


def test_the_optimizer_follows_the_schedule(finished):
    config = bert_mlm.Config(**finished["config"])
    vocabulary, _ = bert_mlm.make_datasets(config)
    schedule = WarmUpPolynomialDecay(1.0, 3, 10)
    optimizer = bert_mlm.build_model(config, vocabulary, schedule).optimizer
    for step in (0, 3, 7):
        optimizer.iterations.assign(step)
        assert float(optimizer.learning_rate) == float(schedule(step))
    assert isinstance(optimizer, Muon)


def test_weight_decay_spares_biases_and_norms(finished):
    config = bert_mlm.Config(**finished["config"])
    vocabulary, _ = bert_mlm.make_datasets(config)
    with bert_mlm.make_strategy(2).scope():
        model = bert_mlm.build_model(config, vocabulary, 0.1)
    before = [np.array(v) for v in model.trainable_variables]

    def apply_nothing():
        gradients = [tf.zeros_like(variable.value) for variable in model.trainable_variables]
        model.optimizer.apply(gradients, model.trainable_variables)

    step = tf.function(lambda: model.distribute_strategy.run(apply_nothing), autograph=False)
    step()
    for variable, old in zip(model.trainable_variables, before, strict=True):
        spared = any(word in variable.path for word in ("bias", "gamma", "beta"))
        np.testing.assert_allclose(np.array(variable), old * (1 if spared else 0.999), rtol=1e-5, err_msg=variable.path)


def test_tensorboard_holds_each_step(finished):
    workdir = Path(finished["config"]["workdir"])
    values, texts = {}, []
    for file in (workdir / "tensorboard").glob("events*"):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                values.setdefault(value.tag, {})[event.step] = tf.make_ndarray(value.tensor)
    texts = str(values.pop("config")[0])
    assert "batch_size = 64" in texts
    assert set(values) == {
        *(f"train/{name}" for name in ("loss", "accuracy", "learning_rate")),
        *(f"train/{name}" for name in ("tokens_per_second", "mfu", "peak_memory_mb")),
        *(f"validation/{name}" for name in ("loss", "accuracy")),
    }
    speeds, shares = (np.array(list(values[f"train/{name}"].values())) for name in ("tokens_per_second", "mfu"))
    np.testing.assert_allclose(shares / speeds, finished["mfu"] / finished["tokens_per_second"], rtol=1e-3)
    for step in steps_of(finished):
        assert values["train/loss"][step["step"]] == np.float32(step["loss"])
        assert values["train/learning_rate"][step["step"]] == np.float32(step["learning_rate"])
    assert sorted(values["validation/loss"]) == [finished["steps"] // 2, finished["steps"]]
    assert values["validation/loss"][finished["steps"]] == pytest.approx(finished["val_loss"])


@pytest.mark.slow
def test_the_preset_is_whole_and_can_be_gone_on_from(finished, small):
    preset = f"{finished['config']['workdir']}/preset"
    plain = keras_hub.models.BertMaskedLM.from_preset(preset)
    assert plain.preprocessor.tokenizer.vocabulary_size() == 300
    results = train(small, model=None, preset=preset, max_steps=1, learning_rate=0.0)
    assert results["val_loss"] == pytest.approx(finished["val_loss"], rel=1e-5)


def test_a_second_run_gives_the_results_again(finished, capsys):
    assert bert_mlm.train_and_evaluate(bert_mlm.Config(**finished["config"])) == finished
    assert "complete" in capsys.readouterr().out


@pytest.mark.slow
def test_replicas_do_not_change_what_is_computed(small, tmp_path):
    """Same global batch, two epochs with an uneven last batch, on 1 and 4 replicas."""
    options = small | {"lr_scaling": "none", "epochs": 2, "max_steps": 0, "learning_rate": 1e-3}
    one, four = (
        train(options, replicas=replicas, batch_size=256 // replicas, workdir=str(tmp_path / str(replicas)))
        for replicas in (1, 4)
    )
    assert one["steps"] >= 4
    for a, b in zip(steps_of(one), steps_of(four), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert (a["tokens"], a["learning_rate"]) == (b["tokens"], b["learning_rate"])
    for name in ("val_loss", "val_accuracy", "test_loss"):
        assert four[name] == pytest.approx(one[name], rel=1e-6)
    weights = weights_of(four)
    for name, weight in weights_of(one).items():
        np.testing.assert_allclose(weights[name], weight, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_one_line_a_sequence_is_trimmed_to_a_bucket(small):
    results = train(small, pack="none", seq_length=128)
    assert 0.2 < results["padding_fraction"] < 0.8
    assert results["val_loss"] < np.log(300)


def test_a_dry_run_prints_the_plan_trains_three_steps_and_writes_nothing(finished, tmp_path, capsys, monkeypatch):
    models, build = [], bert_mlm.build_model
    with monkeypatch.context() as patch:
        patch.setattr(bert_mlm, "build_model", lambda *given: models.append(build(*given)) or models[0])
        assert train(finished["config"], dry_run=True, workdir=str(tmp_path / "run")) == {}
    assert not (tmp_path / "run").exists()
    plan = capsys.readouterr().out
    assert models[0].optimizer.iterations == 3
    assert re.search(r"\npeak memory in the first 3 step\(s\): [\d,]{3,} MiB of host memory\n$", plan)
    sequences = sequences_of(bert_mlm.Config(**finished["config"]))["train"]
    assert f"train: {np.count_nonzero(sequences):,} tokens in {len(sequences):,} sequences" in plan
    parameters = sum(weight.size for weight in weights_of(finished).values()) + 64  # the key bias left out there
    assert f"{parameters:,} parameters in float32; {finished['steps']} steps" in plan
    rates = dict(re.findall(r"^ +(\d+) +(\S+)", plan.split("learning rate by step:\n")[1], re.MULTILINE))
    steps = {str(step["step"]): step["learning_rate"] for step in steps_of(finished)}
    assert len(rates) > 4
    assert {step: float(rate) for step, rate in rates.items()} == {s: pytest.approx(steps[s], rel=0.01) for s in rates}
    assert plan.count("«") - 1 == round(0.3 * 30) and "    [CLS]" in plan


@pytest.mark.long
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_learns_for_200_steps(precision, small):
    steps = [
        steps_of(train(small, precision=p, workdir=f"{small['workdir']}/{p}", epochs=4, max_steps=200))
        for p in ("float32", precision)
    ]
    losses = [[step["loss"] for step in run] for run in steps]
    assert len(losses[1]) == 200 and np.isfinite(losses[1]).all()
    assert np.mean(losses[1][-10:]) == pytest.approx(np.mean(losses[0][-10:]), rel=0.01)
    assert np.mean(losses[1][-10:]) < losses[1][0] - 0.5


@pytest.mark.slow
def test_vocabulary_file(small, tmp_path):
    file = tmp_path / "vocab.txt"
    words = sorted(
        {"the", "a", "of", "is", *"abcdefghijklmnopqrstuvwxyz"} | {f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"}
    )
    file.write_text("\n".join(["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    train(small, vocabulary=str(file), max_steps=1)
    preset = keras_hub.models.BertTokenizer.from_preset(small["workdir"] + "/preset")
    assert preset.get_vocabulary() == file.read_text().split("\n")


def test_the_validation_masks_are_those_of_the_unigram_baseline(finished):
    """Hand count: the labels of every validation sequence, each once, by the frequencies in training."""
    config = bert_mlm.Config(**finished["config"])
    sequences = sequences_of(config)
    rule = bert_mlm.MaskingRule.of(bert_mlm.make_datasets(config)[0])
    counts = np.bincount(sequences["train"].ravel(), minlength=300).astype(float)
    counts[list(rule.never_masked)] = 0
    probability = (counts + 1) / (counts.sum() + 300)
    labels = []
    for i, sequence in enumerate(sequences["validation"]):
        seeds = tf.constant([[config.seed * 2**32 - 1, i]], tf.int64)
        _, y, weight = bert_mlm.mask_tokens(tf.constant(sequence[None].astype(np.int32)), seeds, rule)
        labels += np.asarray(y)[np.asarray(weight) > 0].tolist()
    assert finished["val_unigram_loss"] == pytest.approx(-np.log(probability[labels]).mean(), rel=1e-9)


def test_the_default_learning_rate_falls_with_the_width_and_a_presets_is_small(tmp_path):
    for size, rate in (None, 5e-3), ("nano", 1e-2), ("small", 1.25e-3), ("base", 0.64 / 768):
        assert bert_mlm.Config(model=size).learning_rate == rate
    assert bert_mlm.Config(preset="bert_base_en_uncased").learning_rate == 1e-4
    for rate in (0.0, 2e-4):
        assert bert_mlm.Config(preset="bert_base_en_uncased", learning_rate=rate).learning_rate == rate
    assert bert_mlm.Config(optimizer="adamw").learning_rate == 5e-4


def test_options_are_a_frozen_dataclass():
    with pytest.raises(dataclasses.FrozenInstanceError):
        bert_mlm.Config().seed = 1


@pytest.mark.long
def test_the_default_run_learns(tmp_path):
    """The README's first command, whole: no option but where to."""
    subprocess.run(
        [sys.executable, "-m", "recipes", "run", "bert_mlm", "--workdir", str(tmp_path)], cwd=ROOT, check=True
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["val_loss"] <= results["val_unigram_loss"] - 1.9
    assert results["learning_rate"]["last"] < 0.02 * results["learning_rate"]["peak"]
    assert results["padding_fraction"] < 0.01
