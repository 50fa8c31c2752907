"""The recipe `causal_lm`: GPT-2 from scratch, and other families from tiny presets with random weights."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import keras
import keras_hub
import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
from common.data.byte_pairs import train_byte_pairs
from common.data.shard_writer import make_shards
from common.data.stream import one_epoch

from common.data.corpora import open_corpus
from common.data.dialogues import read_dialogues
from common.model.causal_lm import make_causal_lm, make_preprocessor
from common.model.generate import causal_lm_for_generation, continuations, make_sampler
from common.model.sizes import dimensions
from common.training import Scaled
from keras_replicas import Checkpoints
from keras_replicas.errors import UserError
from recipes import causal_lm
from recipes._generate import generate

ROOT = Path(__file__).parent.parent
HUB = keras_hub.models
SLOW = pytest.mark.slow
WIDTHS = {"num_layers": 2, "hidden_dim": 32, "intermediate_dim": 64}
SHARED = {"num_query_heads": 2, "num_key_value_heads": 1}  # keys and values, between two heads
FAMILIES = {
    "GPT2": {"num_heads": 2, "max_sequence_length": 64},
    "Gemma": SHARED | {"head_dim": 16},
    "Llama": SHARED,
    "Qwen": SHARED,
    "Mistral": SHARED,
}


def documents():
    return iter((ROOT / "LICENSE").read_text().split("\n\n"))


def tokenizer_of(family):
    if family in ("GPT2", "Qwen"):
        tokenizer = make_preprocessor("", train_byte_pairs(documents, 300), 32).tokenizer
        return getattr(HUB, f"{family}Tokenizer")(tokenizer.vocabulary, tokenizer.merges)
    model, start, end = io.BytesIO(), *(("<bos>", "<eos>") if family == "Gemma" else ("<s>", "</s>"))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=documents(), model_writer=model, vocab_size=200, hard_vocab_limit=False, minloglevel=2,
        pad_id=0, unk_id=1, bos_id=2, eos_id=3, pad_piece="<pad>", unk_piece="<unk>", bos_piece=start, eos_piece=end,
    )  # fmt: skip
    return getattr(HUB, f"{family}Tokenizer")(model.getvalue())


@pytest.fixture(scope="module")
def presets(tmp_path_factory):
    """A function of a family's name: the folder of its preset, and the model."""
    made = {}

    def preset(family):
        if family not in made:
            tokenizer = tokenizer_of(family)
            keras.utils.set_random_seed(0)
            backbone = getattr(HUB, f"{family}Backbone")(tokenizer.vocabulary_size(), **WIDTHS, **FAMILIES[family])
            preprocessor = getattr(HUB, f"{family}CausalLMPreprocessor")(tokenizer, sequence_length=24)
            model = getattr(HUB, f"{family}CausalLM")(backbone, preprocessor)
            folder = tmp_path_factory.mktemp(family) / "preset"
            model.save_to_preset(str(folder))
            made[family] = str(folder), model
        return made[family]

    return preset


@pytest.fixture
def small(small):
    return small | {"precision": "float32"}


def train(options, **changes):
    return causal_lm.train_and_evaluate(causal_lm.Config(**options | changes))


def steps_of(results):
    lines = (Path(results["config"]["workdir"]) / "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def weights_of(results):
    model = HUB.CausalLM.from_preset(f"{results['config']['workdir']}/preset", compile=False)
    # In theory an attention key's bias has no gradient: its value is rounding noise.
    return {f"{i} {v.path}": np.array(v) for i, v in enumerate(model.weights) if "key/bias" not in v.path}


def assert_same(ours, theirs, bound=1e-6):
    """Losses of each step and all weights together, relatively."""
    assert [step["loss"] for step in steps_of(ours)] == pytest.approx([s["loss"] for s in steps_of(theirs)], rel=bound)
    assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=bound)
    one, other = (np.concatenate([w.ravel() for w in weights_of(results).values()]) for results in (ours, theirs))
    assert np.linalg.norm(one - other) <= bound * np.linalg.norm(other)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.long if f in ("Llama", "Mistral") else SLOW) for f in FAMILIES]
)
def test_every_family_trains_alike_on_one_and_two_replicas_and_is_saved(family, presets, small, tmp_path, capsys):
    small |= {"preset": presets(family)[0], "model": None, "max_steps": 3}
    two = train(small, replicas=2, lr_scaling="none")
    if family in ("GPT2", "Gemma"):  # the others' layers are among Gemma's
        assert_same(two, train(small, batch_size=16, replicas=1, workdir=str(tmp_path / "one")))

    plain = HUB.CausalLM.from_preset(f"{small['workdir']}/preset")
    assert type(plain) is getattr(HUB, f"{family}CausalLM") and plain.preprocessor.sequence_length == 32
    plain.compile(sampler="greedy")
    text = plain.generate("You may", max_length=12)
    assert text.startswith("You may") and len(text) > len("You may")
    snippet = (Path(small["workdir"]) / "preset/README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(snippet, {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("Returns a")


@SLOW
@pytest.mark.parametrize("family", ["GPT2", "Gemma"])
def test_lora_trains_adapters_alone(family, presets, small, tmp_path):
    preset, base = presets(family)
    results = train(small, preset=preset, model=None, lora_rank=2, learning_rate=0.05, max_steps=20)
    before, after = (
        {weight.path: np.array(weight) for weight in model.weights}
        for model in (base, HUB.CausalLM.from_preset(f"{small['workdir']}/preset"))
    )
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert len(changed) == 4 and all("query" in name or "value" in name for name in changed)  # two layers' kernels
    losses = [step["loss"] for step in steps_of(results)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])

    # The adapter's file, on the base: what is merged in the preset.
    adapter = json.loads((tmp_path / "run/adapter/adapter.json").read_text())
    assert adapter == {"base": preset, "rank": 2}
    backbone = HUB.Backbone.from_preset(adapter["base"])
    backbone.load_lora_weights(str(tmp_path / "run/adapter/adapter.lora.h5"))
    merged = HUB.Backbone.from_preset(f"{small['workdir']}/preset")
    ids = np.arange(20, 30)[None]
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    np.testing.assert_allclose(backbone(inputs), merged(inputs), atol=1e-5)

    # Of a checkpoint, these and their two moments; the rest is counters.
    saved = [shape for _, shape in tf.train.list_variables(str(tmp_path / "run/checkpoints/ckpt-20"))]
    adapters = [weight for weight in backbone.weights if weight.name.startswith("lora_")]
    numbers = sum(int(np.prod(weight.shape)) for weight in adapters)
    assert 3 * numbers <= sum(int(np.prod(shape)) for shape in saved if shape) <= 3 * numbers + 4


def test_adapters_resume_on_the_weights_that_they_adapt(presets, small, tmp_path):
    preset = {"preset": presets("GPT2")[0], "model": None, "lora_rank": 2}
    config = causal_lm.Config(**small | preset)
    data = causal_lm.make_datasets(config)
    model, train = (
        causal_lm.build_model(config, data, 0.1),
        causal_lm.causal_batches(config, data, "train", Scaled(8, 8)),
    )

    class Interrupted(keras.callbacks.Callback):
        """Notes an adapter when `fit` begins and after its first step, and ends it in the second."""

        def on_train_begin(self, logs=None):
            self.first_step, self.begins_with = self.model.steps_done, np.array(self.model.trainable_variables[0])

        def on_train_batch_end(self, batch, logs=None):
            if self.model.steps_done > self.first_step + 1:
                raise InterruptedError
            self.after = np.array(self.model.trainable_variables[0])

    def interrupted():
        note, checkpoints = Interrupted(), Checkpoints(tmp_path / "run", every=1, trained_only=True)
        with pytest.raises(InterruptedError):
            model.fit(train, callbacks=[note, checkpoints], verbose=0)
        return note

    first = interrupted()
    model.trainable_variables[0].assign(first.after + 1)
    again = interrupted()
    assert again.first_step == 1
    np.testing.assert_array_equal(again.begins_with, first.after)
    model.backbone.token_embedding.embeddings.assign_add(model.backbone.token_embedding.embeddings)
    with pytest.raises(UserError, match=r"checksum of the weights that are not trained \d+, not \d+"):
        model.fit(train, callbacks=[Checkpoints(tmp_path / "run", trained_only=True)], verbose=0)


def test_a_dry_run_shows_labels(small, capsys):
    assert train(small, dry_run=True) == {}
    assert "its labels as «labels»:" in capsys.readouterr().out


def test_a_row_is_all_documents_with_end_tokens_and_each_token_is_a_label_once(small, wikitext):
    config = causal_lm.Config(**small)
    data = causal_lm.make_datasets(config)
    end = data.tokenizer.end_token_id
    row = [end]
    for document in open_corpus(str(wikitext))["train"]():
        row += [*data.tokenizer(document), end]
    sequences = (len(row) - 1) // 32
    ids = data.sequences["train"].numpy()
    np.testing.assert_array_equal(ids[:, 1:].ravel(), row[1 : 32 * sequences + 1])  # the labels
    np.testing.assert_array_equal(ids[:, :-1].ravel(), row[: 32 * sequences])

    steps = data.steps("train", 16)
    train = causal_lm.causal_batches(config, data, "train", Scaled(16, 16))
    batches = list(train.iter_from_step(0, tf.distribute.InputContext()).take(2 * steps))
    for epoch in (batches[:steps], batches[steps:]):
        seen = [y[w > 0] for _, y, w in epoch]
        np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.sort(row[1 : 32 * sequences + 1]))
    assert any(np.any(a[1] != b[1]) for a, b in zip(batches[:steps], batches[steps:], strict=True))  # in another order
    again = train.iter_from_step(steps + 1, tf.distribute.InputContext()).take(1)
    np.testing.assert_array_equal(next(iter(again))[1], batches[steps + 1][1])
    assert all(text in " ".join(open_corpus(str(wikitext))["validation"]()) for text in data.prompts(2))


@SLOW
def test_the_loss_is_the_mean_over_all_labels_of_the_split(small):
    """By plain KerasHub, all at once."""
    results = train(small, batch_size=64, max_steps=0)
    data = causal_lm.make_datasets(causal_lm.Config(**small))
    plain = HUB.CausalLM.from_preset(f"{small['workdir']}/preset", compile=False)
    ids = data.sequences["validation"].numpy().astype(int)
    logits = plain({"token_ids": ids[:, :-1], "padding_mask": np.ones_like(ids[:, :-1])})
    total = float(np.sum(keras.losses.sparse_categorical_crossentropy(ids[:, 1:], logits, from_logits=True)))
    assert results["val_loss"] == pytest.approx(total / (32 * len(ids)), rel=1e-6)
    characters = len(
        data.tokenizer.detokenize([i for i in ids[:, 1:].ravel().tolist() if i != data.tokenizer.end_token_id])
    )
    assert results["val_bits_per_character"] == pytest.approx(total / np.log(2) / characters, rel=1e-6)
    assert (
        results["val_bigram_loss"] < results["val_unigram_loss"] and results["val_loss"] < results["val_unigram_loss"]
    )
    last = steps_of(results)[-1]
    assert last["labels"] == last["tokens"] < last["slots"] and len(results["prompts"]) == 3


@SLOW
def test_replicas_do_not_change_what_is_computed(small, tmp_path):
    """Same global batch, two epochs with an uneven last batch, on 1 and 4 replicas."""
    options = small | {"lr_scaling": "none", "epochs": 2, "max_steps": 0, "learning_rate": 1e-3, "weight_decay": 0.1}
    one, four = (
        train(options, replicas=replicas, batch_size=1024 // replicas, workdir=str(tmp_path / str(replicas)))
        for replicas in (1, 4)
    )
    assert one["steps"] >= 4 and steps_of(one)[-1]["tokens"] < steps_of(one)[0]["tokens"]
    assert_same(four, one)


@SLOW
def test_a_model_that_diverges_ends_with_its_report_and_writes_nothing(small, capsys):
    config = causal_lm.Config(**small | {"optimizer": "sgd", "learning_rate": 1e9, "clip_norm": 0.0})
    causal_lm.main(config)
    told = "the model has diverged: its logits are not finite, and so it writes nothing"
    assert capsys.readouterr().out.endswith(f"\n{told}\n")
    assert {text.strip() for texts in samples_of(small["workdir"]).values() for text in texts} == {told}
    with pytest.raises(UserError, match=told):
        generate(f"{small['workdir']}/preset", ["a"], "random", 1, 0.9, 1.0, 0, 4)


def test_logits_have_the_precision_of_the_rest(small):
    config = causal_lm.Config(**small)
    data = causal_lm.make_datasets(config)
    for policy, dtype in (("mixed_bfloat16", "bfloat16"), ("float32", "float32")):
        keras.config.set_dtype_policy(policy)
        model = causal_lm.build_model(config, data)
        assert model({name: np.ones((1, 4), "int32") for name in model.input}).dtype == dtype


def samples_of(workdir):
    """TensorBoard's texts, by step."""
    found = {}
    for file in Path(workdir, "tensorboard").glob("events*"):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.tag == "samples":
                    found[event.step] = [text.decode() for text in tf.make_ndarray(value.tensor)]
    return found


@pytest.mark.slow
def test_each_epochs_samples_are_in_tensorboard(small):
    results = train(small, batch_size=128, epochs=2, max_steps=0)
    found = samples_of(small["workdir"])
    assert list(found) == [results["steps"] // 2, results["steps"]]
    model = causal_lm_for_generation(f"{small['workdir']}/preset")
    texts = continuations(model, results["prompts"], make_sampler())
    assert found[results["steps"]] == ["    " + text.replace("\n", "\n    ") for text in texts]
    assert found[results["steps"] // 2] != found[results["steps"]]
    for text, prompt in zip(texts, results["prompts"], strict=True):
        assert text.startswith(prompt) and len(text) > len(prompt) + 10


def stop_after(steps, workdir):
    """SIGTERM to this process."""
    file = Path(workdir, "steps.jsonl")
    while not file.exists() or file.read_text().count("\n") < steps:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGTERM)


@SLOW
def test_stopped_it_goes_on_with_the_same_bits(small, presets, answers, tmp_path):
    """Adapters, of prompts with answers."""
    small |= {"dropout": 0.1, "max_steps": 24, "checkpoint_every": 5, "corpus": "docstrings", "data": str(answers)}
    small |= {"preset": presets("GPT2")[0], "model": None, "lora_rank": 2, "seq_length": 24, "epochs": 9}
    whole = train(small, workdir=str(tmp_path / "whole"))
    threading.Thread(target=stop_after, args=(8, small["workdir"]), daemon=True).start()
    with pytest.raises(SystemExit):
        train(small)
    results = train(small)
    assert 8 <= results["resumed_from_step"] < 24 and steps_of(results) == steps_of(whole)
    for name, weight in weights_of(whole).items():
        np.testing.assert_array_equal(weights_of(results)[name], weight, err_msg=name)


def command(options, *words):
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    return [sys.executable, "-m", "recipes", *words, "causal_lm", *given]


@SLOW
def test_two_workers_compute_what_one_process_does_and_a_kill_changes_no_bit(small, tmp_path):
    small |= {"max_steps": 40, "lr_scaling": "none", "checkpoint_every": 6, "learning_rate": 5e-3}
    one = train(small, replicas=1, batch_size=16, workdir=str(tmp_path / "one"))
    done = subprocess.run(command(small, "launch", "--workers", "2"), cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("bigram baseline") == 2
    two = json.loads(Path(small["workdir"], "results.json").read_text())
    assert two["workers"] == 2
    assert_same(two, one)

    workdir = tmp_path / "killed"
    killed = small | {"replicas": 1, "batch_size": 16, "workdir": str(workdir)}
    process = subprocess.Popen(command(killed, "run"), cwd=ROOT, stdout=subprocess.DEVNULL)
    while not (workdir / "steps.jsonl").exists() or (workdir / "steps.jsonl").read_text().count("\n") < 15:
        time.sleep(0.002)
    process.kill()
    process.wait()
    results = train(killed)
    assert results["resumed_from_step"] >= 6 and steps_of(results) == steps_of(one)
    for name, weight in weights_of(one).items():
        np.testing.assert_array_equal(weights_of(results)[name], weight, err_msg=name)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """A file of prompts of all lengths, and what follows from them."""
    file = tmp_path_factory.mktemp("answers") / "sums.jsonl"
    lines = [
        {"prompt": f"{'Say, ' * (i % 7)}what comes after {i}? ", "response": f"It is {i + 1}."} for i in range(200)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@SLOW
def test_of_prompts_with_answers_the_answers_alone_are_learned(small, answers, tmp_path):
    small |= {"corpus": "docstrings", "data": str(answers), "seq_length": 64}
    one = train(small, replicas=1, batch_size=16, workdir=str(tmp_path / "one"))
    two = train(small, replicas=2, lr_scaling="none")
    assert_same(two, one)
    data = causal_lm.make_datasets(causal_lm.Config(**small))
    plain = HUB.CausalLM.from_preset(f"{small['workdir']}/preset", compile=False)
    losses = []
    for dialogue in read_dialogues(str(answers))["validation"]:
        (_, prompt), (_, response) = dialogue
        start = [data.tokenizer.start_token_id, *data.tokenizer(prompt)]
        ids = np.array([[*start, *data.tokenizer(response), data.tokenizer.end_token_id]])
        logits = plain({"token_ids": ids[:, :-1], "padding_mask": np.ones_like(ids[:, :-1])})
        each = keras.losses.sparse_categorical_crossentropy(ids[:, 1:], logits, from_logits=True)
        losses += np.array(each)[0, len(start) - 1 :].tolist()
    assert two["val_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert sum(step["labels"] for step in steps_of(two)) < 0.6 * sum(step["tokens"] for step in steps_of(two))
    assert two["prompts"][0].startswith(("what comes after", "Say, "))


@pytest.fixture(scope="module")
def shards(wikitext, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    options = {
        "corpus": str(wikitext),
        "architecture": "roberta",
        "vocabulary_size": 300,
        "seq_length": 32,
        "shards": 4,
    }
    make_shards(options, str(folder), str(folder / "tokens"))
    return str(folder)


@SLOW
def test_shards_are_text_too(small, shards, wikitext, tmp_path):
    small |= {"corpus": "docstrings", "data": shards}
    train(small, max_steps=2)
    config = causal_lm.Config(**small)
    data = causal_lm.make_datasets(config)
    epoch = one_epoch(causal_lm.causal_batches(config, data, "train", Scaled(16, 16)), 1)
    labels = sum(int(np.sum(w)) for _, _, w in epoch)
    assert labels == data.count_tokens()["train"][1] == 29 * data.sizes()["train"]
    text = next(open_corpus(str(wikitext))["train"]())
    ids = next(iter(data.rows("train", Scaled(1, 1), None)))[0][0]
    assert text.startswith(data.tokenizer.detokenize(ids.numpy().tolist()[:20]))
    again = train(small, workdir=str(tmp_path / "again"), preset=f"{small['workdir']}/preset", model=None, max_steps=1)
    assert again["steps"] == 1


def test_shards_that_do_not_fit_are_refused(small, shards, presets, wikitext, tmp_path):
    def refused(told, **changes):
        with pytest.raises(UserError, match=told):
            causal_lm.make_datasets(causal_lm.Config(**small | {"corpus": "docstrings"} | changes))

    refused("have sequences of 32 tokens: give --seq-length 32", data=shards, seq_length=64)
    refused("has neither shards, which bert_from_scratch", data=str(tmp_path))
    refused("has another vocabulary than the shards", data=shards, preset=presets("Llama")[0], model=None)
    options = {"corpus": str(wikitext), "architecture": "bert", "vocabulary_size": 300, "seq_length": 32, "shards": 4}
    make_shards(options, str(tmp_path / "words"), str(tmp_path / "tokens"))
    refused("are of word pieces: write them with --architecture roberta", data=str(tmp_path / "words"))


def test_bad_options_and_presets(small, presets, tmp_path):
    for told, changes in (
        ("--lora-rank must be at least 1; got 0", {"lora_rank": 0}),
        ("--lora-rank adapts the weights of a preset: give --preset", {"lora_rank": 2}),
        ("--preset brings its own model", {"preset": "gpt2_base_en"}),
        ("--push-public needs --push-to", {"push_public": True}),
    ):
        with pytest.raises(UserError, match=told):
            causal_lm.Config(**small | changes)
    config = causal_lm.Config(**small | {"preset": presets("GPT2")[0], "model": None, "seq_length": 64})
    data = causal_lm.make_datasets(config)
    data.preprocessor.sequence_length = 65
    with pytest.raises(UserError, match="--seq-length 65 is more than the 64 positions of the preset"):
        causal_lm.build_model(config, data)
    backbone = HUB.BertBackbone(5, 1, 1, 8, 8, max_sequence_length=64)
    backbone.save_to_preset(str(tmp_path / "bert"))
    HUB.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]).save_to_preset(str(tmp_path / "bert"))
    with pytest.raises(UserError, match="cannot load the preset"):
        causal_lm.make_datasets(causal_lm.Config(**small | {"preset": str(tmp_path / "bert"), "model": None}))
    with pytest.raises(UserError, match="takes padding_mask, segment_ids, token_ids; give a model of text alone"):
        make_causal_lm(
            str(tmp_path / "bert"),
            "tiny",
            SimpleNamespace(sequence_length=32, backbone_cls=keras_hub.models.GPT2Backbone),
            0.0,
        )
    tokenizer = SimpleNamespace(vocabulary_size=lambda: 9999)
    with pytest.raises(UserError, match="its tokenizer has 9999 tokens, the model [0-9]+$"):
        make_causal_lm(
            presets("GPT2")[0],
            "tiny",
            SimpleNamespace(sequence_length=32, tokenizer=tokenizer, backbone_cls=keras_hub.models.GPT2Backbone),
            0.0,
        )


def test_gpt2s_own_sizes_and_the_default_rate():
    assert dimensions("gpt2-xl") == {"num_layers": 48, "num_heads": 25, "hidden_dim": 1600, "intermediate_dim": 6400}
    assert causal_lm.Config(model="gpt2-medium").learning_rate == 0.64 / 1024
    assert causal_lm.Config(preset="p").learning_rate == 1e-4
    assert causal_lm.Config(preset="p", lora_rank=8).learning_rate == 1e-3


@pytest.fixture(scope="module")
def written(presets):
    """A function of options: what `generate` prints, by a GPT-2 of 24 tokens."""

    def write(capsys, *prompts, **options):
        given = {"sampler": "top-k", "k": 10, "p": 0.9, "temperature": 1.0, "seed": 0, "tokens": 8} | options
        generate(given.pop("preset", presets("GPT2")[0]), prompts or ["You may"], **given)
        return capsys.readouterr().out

    return write


@SLOW
def test_the_same_seed_writes_the_same_text(written, capsys):
    first, greedy = written(capsys), written(capsys, sampler="greedy")
    assert first.startswith("You may") and first != greedy
    assert written(capsys, "You must", "You may").endswith(first)  # whatever else is asked
    assert written(capsys, seed=1) != first != written(capsys, sampler="random")
    assert written(capsys, temperature=1e-4) == written(capsys, k=1) == greedy
    assert written(capsys, sampler="top-p", p=1e-6) == greedy


def test_greedy_text_is_the_likeliest_token_each_time_as_without_a_cache(presets, written, capsys):
    _, model = presets("GPT2")
    tokenizer = model.preprocessor.tokenizer
    ids = [tokenizer.start_token_id, *tokenizer("You may")]
    for _ in range(8):
        logits = model({"token_ids": np.array([ids]), "padding_mask": np.ones((1, len(ids)), int)})
        ids.append(int(np.argmax(logits[0, -1])))
    assert written(capsys, sampler="greedy") == tokenizer.detokenize([int(i) for i in ids[1:]]) + "\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sampler": "beam"}, "--sampler must be greedy, top-k, top-p or random; got beam"),
        ({"k": 0}, "--top-k must be at least 1; got 0"),
        ({"k": 10_000}, "--top-k 10000 is more than the 300 tokens of the vocabulary"),
        ({"p": 1.5}, "--top-p must be above 0, and at most 1; got 1.5"),
        ({"temperature": 0.0}, "--temperature must be at least 1e-6, and finite; got 0"),
        ({"temperature": 1e-45}, "--temperature must be at least 1e-6, and finite; got 1e-45"),
        ({"temperature": float("nan")}, "--temperature must be at least 1e-6"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"tokens": 0}, "--tokens must be at least 1; got 0"),
        ({"preset": "/nowhere"}, "cannot load the preset /nowhere"),
    ],
)
def test_bad_values_are_told_of(options, told, written, capsys):
    with pytest.raises(UserError, match=told):
        written(capsys, **options)


def test_a_prompt_that_is_no_text_is_told_of(written, capsys):
    with pytest.raises(UserError, match="a prompt is not text that UTF-8 can encode"):
        written(capsys, "You \udcff")


def test_a_prompt_longer_than_the_model_is_told_of(written, capsys):
    with pytest.raises(UserError, match=r"the prompt has at least 25 tokens; the model takes 24, with those it adds"):
        written(capsys, "You may " * 20)


def test_each_prompt_gets_its_own_tokens_and_needs_one(presets):
    _, model = presets("GPT2")
    prompts, draw = ["You", "You may reproduce"], make_sampler("greedy")
    together = continuations(model, prompts, draw, tokens=3)
    assert together == [continuations(model, [prompt], draw, tokens=3)[0] for prompt in prompts]
    assert len(together[0]) - len(prompts[0]) <= 3 * 8  # characters, for a token has few here

    preprocessor = HUB.QwenCausalLMPreprocessor(tokenizer_of("Qwen"), sequence_length=24)
    without_start = SimpleNamespace(sampler=draw, preprocessor=preprocessor)
    with pytest.raises(UserError, match="the prompt is empty, and the model has no start token to begin with"):
        continuations(without_start, [""], draw)


@SLOW
def test_the_command_prints_the_text_alone(presets):
    words = ["generate", "You may", "--sampler", "greedy", "--preset", presets("GPT2")[0]]
    done = subprocess.run([sys.executable, "-m", "recipes", *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("You may")
