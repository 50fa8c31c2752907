# SPDX-License-Identifier: Apache-2.0
"""The model card on the Hugging Face Hub, `README.md` beside the weights."""

from pathlib import Path
from typing import Any

FRONT_MATTER = """\
---
library_name: keras-hub
pipeline_tag: fill-mask
tags:
- masked-language-modeling
- keras
---
"""
LOAD = """
## Use

Where this repository is private, its owner runs `hf auth login` first.

```python
import keras_hub
import numpy as np

model = keras_hub.models.MaskedLM.from_preset("{uri}")
tokenizer = model.preprocessor.tokenizer
before, after = (np.array(tokenizer(part)) for part in ("returns a", " with the same shape."))
ids = np.array([[tokenizer.start_token_id, *before, tokenizer.mask_token_id, *after, tokenizer.end_token_id]])
inputs = {{"token_ids": ids, "padding_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids)}}
inputs["mask_positions"] = np.array([[1 + len(before)]])
logits = np.array(model({{name: inputs[name] for name in model.input}}))[0, 0]
print([tokenizer.id_to_token(int(i)) for i in logits.argsort()[::-1][:5]])
```
"""
NAMES = {"bert": "BERT", "roberta": "RoBERTa"}
# Options that say how the model was trained. The others say where, which is private.
OPTIONS = (
    *(
        "architecture",
        "model",
        "vocabulary_size",
        "seq_length",
        "mask_rate",
        "dropout",
        "epochs",
        "minutes",
        "batch_size",
    ),
    *("learning_rate", "lr_scaling", "warmup", "optimizer", "weight_decay", "clip_norm", "precision", "seed"),
)


def model_card(results: dict[str, Any]) -> str:
    """The card of a finished model, in Markdown with the Hub's front matter, by what `results.json` holds.

    Of the options in its `config`, those in `OPTIONS` are shown, where it was pushed to, and the last part of `corpus`.
    """
    config, rate, hardware = results["config"], results["learning_rate"], results["hardware"]
    rows = [
        ("steps", f"{results['steps']:,} of {results['global_batch_size']} sequences"),
        ("replicas, workers", f"{results['replicas']}, {results['workers']}"),
        ("learning rate", f"first {rate['first']:.2e}, peak {rate['peak']:.2e}, last {rate['last']:.2e}"),
        ("training loss", f"{results['train_loss']:.3f}, mean of the last epoch"),
    ]
    for split, name in (("val", "validation"), ("test", "test")):
        if f"{split}_loss" in results:
            rows += [
                (f"{name} loss", f"{results[f'{split}_loss']:.3f}, perplexity {results[f'{split}_perplexity']:.1f}"),
                (f"{name} loss of the unigram baseline", f"{results[f'{split}_unigram_loss']:.3f}"),
                (f"{name} accuracy", f"{results[f'{split}_accuracy']:.1%}"),
            ]
    rows += [
        ("time", f"{results['seconds']:.0f} s, {results['tokens_per_second']:,.0f} tokens/s"),
        ("hardware", ", ".join(hardware["gpus"]) or f"{hardware['cpu']}, {hardware['cores']} cores"),
        ("versions", _listed(results["versions"])),
        ("configuration", _listed({name: config[name] for name in OPTIONS if config.get(name) is not None})),
    ]
    corpus = Path(config["corpus"]).name  # of a private text, its name alone
    return _card(
        config["push_to"] or f"{config['workdir']}/preset",
        f"A masked language model in the form of {NAMES[config['architecture']]}, trained from random weights on\n"
        f"`{corpus}` for {results['steps']:,} steps: it predicts the masked words of a text.",
        rows,
        "\nLosses are in nats per masked token. The unigram baseline ignores the context: a lower loss is what\n"
        "the model has learned from it.\n",
        "\n## Limits\n\nThe published BERT had 1,000,000 steps of 256 sequences of 512 tokens; this model had those\n"
        "above, on the one corpus named there, whose errors and biases it repeats. It is for learning and for\n"
        "comparing trainings, not for decisions, facts, or text of another kind or language.\n",
    )


def snapshot_card(uri: str, step: int, logs: dict[str, float]) -> str:
    """The card of a model during its training, at `hf://user/name`, after so many steps, with Keras's logs of it."""
    names = ("loss", "accuracy", "val_loss", "val_accuracy")
    return _card(
        uri,
        f"An intermediate snapshot, at step {step:,}, of a masked language model that is still training. The\n"
        "finished model replaces it.",
        [("step", f"{step:,}"), *((name, f"{logs[name]:.4f}") for name in names if name in logs)],
        "\nLosses are in nats per masked token, those of the epoch that ended with this step.\n",
    )


def _card(uri: str, summary: str, rows: list[tuple[str, str]], *notes: str) -> str:
    table = "".join(f"| {name} | {value} |\n" for name, value in (("", ""), ("---", "---"), *rows))
    title = uri.removesuffix("/preset").rsplit("/", 1)[-1]
    return f"{FRONT_MATTER}\n# {title}\n\n{summary}\n\n{table}{''.join(notes)}{LOAD.format(uri=uri)}"


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
