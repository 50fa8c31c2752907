# SPDX-License-Identifier: Apache-2.0
"""A long run of `bert_from_scratch` on WikiText-2, as the README shows it: `python -m benchmarks.wikitext RUN`.

RUN is the folder of the complete run. Writes `benchmarks/results/wikitext-2.json` (its results, the loss after each
epoch, and what it fills into five sentences) and the picture of its loss, `docs/wikitext-2.png`. It needs matplotlib.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
SENTENCES = (
    "He was born in [MASK] and went to school in the city .",
    "The film received [MASK] reviews from critics .",
    "The ship was sunk during the second world [MASK] .",
    "The song was released as a [MASK] in the united states .",
    "The species is found in the [MASK] of south america .",
)
SMOOTHED = 100  # steps over which the picture averages the loss


def main(run: Path) -> None:
    """Reads the run and writes both files."""
    from common.model.fill_mask import fill_mask
    from common.model.masked_lm import masked_lm_from_preset, preset_vocabulary

    results = json.loads((run / "results.json").read_text())
    results["config"] |= {"workdir": "runs/wikitext-2", "corpus": "wikitext-2"}  # where they were is of no interest
    validation = _validation_losses(run / "tensorboard")
    model, vocabulary = masked_lm_from_preset(str(run / "preset")), preset_vocabulary(str(run / "preset"))
    filled = {sentence: fill_mask(model, vocabulary, sentence)[0] for sentence in SENTENCES}
    manifest = json.loads((run / "data/manifest.json").read_text())["splits"]
    splits = {split: {name: n for name, n in counts.items() if name != "shards"} for split, counts in manifest.items()}
    summary = {"results": results, "splits": splits, "validation_loss": validation, "filled": filled}
    (ROOT / "benchmarks/results/wikitext-2.json").write_text(json.dumps(summary, indent=2) + "\n")
    losses = [json.loads(line)["loss"] for line in (run / "steps.jsonl").read_text().splitlines()]
    _draw(np.array(losses), validation, results["val_unigram_loss"], ROOT / "docs/wikitext-2.png")


def _validation_losses(folder: Path) -> dict[int, float]:
    import tensorflow as tf

    losses = {}
    for file in folder.glob("events*"):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.tag == "validation/loss":
                    losses[event.step] = float(tf.make_ndarray(value.tensor))
    return losses


def _draw(losses: np.ndarray, validation: dict[int, float], unigram: float, path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    means = np.convolve(losses, np.ones(SMOOTHED) / SMOOTHED, mode="valid")
    axes.plot(np.arange(len(means)) + SMOOTHED, means, label=f"training, mean of {SMOOTHED} steps", linewidth=1)
    axes.plot(list(validation), list(validation.values()), "o-", label="validation, after each epoch", markersize=4)
    axes.axhline(unigram, color="gray", linestyle="--", label="unigram baseline")
    axes.set(xlabel="step", ylabel="loss in nats per masked token", title="bert_from_scratch on WikiText-2")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    main(Path(sys.argv[1]))
