"""Presets of KerasHub's other families, with random weights: trained alike on one and two replicas, and saved."""

import json

import keras
import keras_hub
import numpy as np
import pytest

from common.data.byte_pairs import train_byte_pairs
from common.model.causal_lm import make_preprocessor
from recipes import causal_lm, text_classifier
from tests.conftest import ROOT
from tests.test_examples import sentence_pieces, tokenizer_of

pytestmark = pytest.mark.slow

HUB = keras_hub.models
SIZE = {"num_layers": 2, "hidden_dim": 32, "intermediate_dim": 64}
ENCODER = {"num_heads": 2, "max_sequence_length": 32}
SHARED = {"num_query_heads": 2, "num_key_value_heads": 1}  # keys and values, between two heads
ENCODERS = dict.fromkeys(("Roberta", "DistilBert", "DebertaV3"), ENCODER)
ENCODERS["Albert"] = ENCODER | {"embedding_dim": 16, "num_groups": 1, "num_inner_repetitions": 1}
DECODERS = dict.fromkeys(("Llama", "Qwen", "Mistral"), SHARED)
DECODERS |= {"GPT2": {"num_heads": 2, "max_sequence_length": 64}, "Gemma": SHARED | {"head_dim": 16}}


def documents():
    return iter((ROOT / "LICENSE").read_text().split("\n\n"))


def decoders_tokenizer(family):
    if family in ("GPT2", "Qwen"):
        tokenizer = make_preprocessor("", train_byte_pairs(documents, "licence", 300), 32).tokenizer
        return getattr(HUB, f"{family}Tokenizer")(tokenizer.vocabulary, tokenizer.merges)
    ends = ("<bos>", "<eos>") if family == "Gemma" else ("<s>", "</s>")
    return getattr(HUB, f"{family}Tokenizer")(sentence_pieces(documents(), 200, "<pad>", "<unk>", *ends))


def preset_of(family, task, tokenizer, folder, own, *classes):
    """Has KerasHub save one."""
    keras.utils.set_random_seed(0)
    backbone = getattr(HUB, f"{family}Backbone")(tokenizer.vocabulary_size(), **SIZE, **own)
    preprocessor = getattr(HUB, f"{family}{task}Preprocessor")(tokenizer, sequence_length=24)
    getattr(HUB, f"{family}{task}")(backbone, *classes, preprocessor=preprocessor).save_to_preset(str(folder))


def trained(recipe, folder, **options):
    """The losses of a run's steps, and its validation."""
    shared = {"model": None, "preset": str(folder / "preset"), "dropout": 0.0, "max_steps": 3, "lr_scaling": "none"}
    results = recipe.train_and_evaluate(recipe.Config(**shared | options))
    lines = (folder / "run/steps.jsonl").read_text().splitlines()
    return [*(json.loads(line)["loss"] for line in lines), results["val_loss"]]


def check(recipe, folder, task, kind, **options):
    """One replica and two; what KerasHub alone makes of the preset that was saved; then adapters alone, from that."""
    losses = []
    for replicas in (1, 2):
        own = {"replicas": replicas, "batch_size": 16 // replicas, "workdir": str(folder / "run"), "overwrite": True}
        losses.append(trained(recipe, folder, **options | own))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    plain = getattr(HUB, task).from_preset(str(folder / "run/preset"))
    assert type(plain).__name__ == kind
    own |= {"lora_rank": 2, "learning_rate": 0.05}
    trained(recipe, folder, **options | own)
    before, after = (HUB.Backbone.from_preset(str(folder / each)).weights for each in ("preset", "run/preset"))
    pairs = zip(before, after, strict=True)
    changed = [weight.path for weight, other in pairs if not np.array_equal(weight, other)]
    assert changed and all("query" in path or "value" in path for path in changed)
    return plain


def before_a_release(families, *but):
    return [pytest.param(name, marks=[] if name in but else pytest.mark.long) for name in families]


@pytest.mark.parametrize("family", before_a_release(ENCODERS, "Roberta"))
def test_an_encoder_becomes_a_classifier(family, tmp_path):
    preset_of(family, "TextClassifier", tokenizer_of(family), tmp_path / "preset", ENCODERS[family], 3)
    plain = check(text_classifier, tmp_path, "TextClassifier", f"{family}TextClassifier", seq_length=32)
    assert plain.num_classes == 2 and plain.predict((["the cat"], ["a dog"]), verbose=0).shape == (1, 2)


@pytest.mark.parametrize("family", before_a_release(DECODERS, "GPT2"))
def test_a_decoder_goes_on_and_writes(family, tmp_path):
    preset_of(family, "CausalLM", decoders_tokenizer(family), tmp_path / "preset", DECODERS[family])
    options = {"corpus": str(ROOT / "LICENSE"), "seq_length": 24}
    plain = check(causal_lm, tmp_path, "CausalLM", f"{family}CausalLM", **options)
    plain.compile(sampler="greedy")
    assert len(plain.generate("You may", max_length=12)) > len("You may")
