# SPDX-License-Identifier: Apache-2.0
"""Model cards on the Hugging Face Hub, `README.md` beside the weights: Markdown with the Hub's front matter."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FRONT_MATTER = """\
---
library_name: keras-hub
pipeline_tag: {pipeline}
tags:
- {tag}
- keras
---
"""
USE = """
## Use

Where this repository is private, its owner runs `hf auth login` first.

```python
{code}```
"""
# Options that say how the model was trained. The others say where, which is private.
OPTIONS = (
    *("architecture", "model", "lora_rank", "vocabulary_size", "seq_length", "mask_rate", "dropout", "epochs"),
    *("batch_size", "learning_rate", "lr_scaling", "warmup", "optimizer", "weight_decay", "clip_norm"),
    *("precision", "seed"),
)


@dataclass(frozen=True)
class Kind:
    """What all models of a kind have in common."""

    name: str  # such as `masked language model`
    tag: str  # on the Hub
    pipeline: str  # the Hub's name for what it does
    labels: str  # what the loss is a mean over, such as `masked token`
    code: str  # an example of its use, from `{uri}`


def model_card(kind: Kind, results: dict[str, Any], summary: str, limits: str) -> str:
    """The card of a finished model, from what `results.json` holds.

    Of the options in its `config`, it shows those in `OPTIONS`, and where the model was pushed to.

    Args:
        kind: the model's kind.
        results: the run's results.
        summary: the first paragraph.
        limits: the last one.
    """
    config, rate, hardware = dict(results["config"]), results["learning_rate"], results["hardware"]
    if config.get("preset") or config.get("data"):  # which has a vocabulary of its own
        config["vocabulary_size"] = None
    if config.get("max_steps"):  # the run may have been shorter
        config["epochs"] = None
    rows = [
        ("steps", f"{results['steps']:,} of {results['global_batch_size']} sequences"),
        ("replicas, workers", f"{results['replicas']}, {results['workers']}"),
        ("learning rate", f"first {rate['first']:.2e}, peak {rate['peak']:.2e}, last {rate['last']:.2e}"),
        ("training loss", f"{results['train_loss']:.3f}, mean of the last epoch"),
    ]
    for split, name in (("val", "validation"), ("test", "test")):
        if f"{split}_loss" in results:
            baselines = [baseline for baseline in ("unigram", "bigram") if f"{split}_{baseline}_loss" in results]
            rows += [
                (f"{name} loss", f"{results[f'{split}_loss']:.3f}, perplexity {results[f'{split}_perplexity']:.1f}"),
                *((f"{name} loss of the {b} baseline", f"{results[f'{split}_{b}_loss']:.3f}") for b in baselines),
                (f"{name} accuracy", f"{results[f'{split}_accuracy']:.1%}"),
            ]
    rows += [
        ("time", f"{results['seconds']:.0f} s, {results['tokens_per_second']:,.0f} tokens/s"),
        ("hardware", ", ".join(hardware["gpus"]) or f"{hardware['cpu']}, {hardware['cores']} cores"),
        ("versions", _listed(results["versions"])),
        ("configuration", _listed({name: config[name] for name in OPTIONS if config.get(name) not in (None, "")})),
    ]
    note = f"Losses are in nats per {kind.labels}. A model below a baseline has learned more from the context than it."
    uri = config["push_to"] or str(Path(config["workdir"], "preset"))
    return _card(kind, uri, summary, rows, note, f"\n## Limits\n\n{limits}\n")


def snapshot_card(kind: Kind, uri: str, step: int, logs: dict[str, float]) -> str:
    """The card of a model that is still training, at `hf://user/name`, after this step, with Keras's logs of it."""
    names = ("loss", "accuracy", "val_loss", "val_accuracy")
    return _card(
        kind,
        uri,
        f"An intermediate snapshot, at step {step:,}, of a {kind.name} that is still training. The\n"
        "finished model replaces it.",
        [("step", f"{step:,}"), *((name, f"{logs[name]:.4f}") for name in names if name in logs)],
        f"Losses are in nats per {kind.labels}, those of the epoch that ended with this step.",
    )


def last_part(source: str) -> str:
    """The bare name of a folder or a file, whose path is private; another name, such as `hf://user/name`, as it is."""
    return source if source.startswith("hf://") else Path(source).name


def _card(kind: Kind, uri: str, summary: str, rows: list[tuple[str, str]], note: str, limits: str = "") -> str:
    front = FRONT_MATTER.format(pipeline=kind.pipeline, tag=kind.tag)
    title = Path(uri).name if uri.startswith("hf://") else Path(uri).absolute().parent.name
    table = "".join(f"| {name} | {value} |\n" for name, value in (("", ""), ("---", "---"), *rows))
    use = USE.format(code=kind.code.format(uri=uri))
    return f"{front}\n# {title}\n\n{summary}\n\n{table}\n{note}\n{limits}{use}"


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
