# SPDX-License-Identifier: Apache-2.0
"""The names of scores, in `results.json` and in reports."""

# Names in reports. The first that a task has is its main metric: accuracy for MRPC, Pearson's correlation for STS-B, as
# in Liu et al. 2019, arXiv:1907.11692. Higher is better.
METRICS = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearman": "Spearman",
}


def entry(split: str, name: str) -> str:
    """The name of an entry: `val_loss` for the split `validation` and the name `loss`."""
    return f"{'val' if split == 'validation' else split}_{name}"
