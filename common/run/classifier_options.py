# SPDX-License-Identifier: Apache-2.0
"""Options shared by the text-classification recipes."""

from dataclasses import dataclass
from typing import Literal

from common.data.glue import open_examples
from common.model.sizes import check_model
from common.run.options import RunOptions


@dataclass(frozen=True)
class ClassifierOptions(RunOptions):
    """The texts, the model and its training, beside `RunOptions`.

    Raises:
        UserError: as `RunOptions`, and when there are no such texts or no such model.
    """

    # roles: generated pairs; own: your own files; the others: of GLUE
    task: Literal["roles", "cola", "mrpc", "qnli", "rte", "sst2", "stsb", "own"] = "roles"
    # folder in GLUE's format, or empty to download GLUE from the Hub; own: a .tsv, .csv or .jsonl file, or a folder
    data: str = ""
    text_columns: str = ""  # own: name of the text column, or two names separated by a comma
    label_column: str = ""  # own: name of the label column
    regression: bool = False  # own: the labels are numbers to be predicted, with the squared error as the loss
    preset: str = ""  # KerasHub name, or folder such as runs/bert_mlm/preset, to start from; empty: random weights
    # BERT size, with random weights; default: tiny, unless a preset is given
    model: Literal["nano", "tiny", "mini", "small", "medium", "base", "large"] | None = None
    vocabulary_size: int = 4096  # word pieces in the vocabulary trained where there is no preset
    seq_length: int = 128  # maximum tokens per example
    batch_size: int = 16  # examples per replica in a step
    learning_rate: float = 0.0  # peak learning rate for one replica; 0: 3e-5 from a preset, 5e-4 from random weights
    warmup: float = 0.1  # fraction of all steps that are warm-up
    dropout: float = 0.1
    epochs: int = 3

    @property
    def peak_rate(self) -> float:
        """The learning rate's peak for one replica, the default filled in."""
        return self.learning_rate or (3e-5 if self.preset else 5e-4)

    def __post_init__(self):
        super().__post_init__()
        check_model(self.preset, self.model, self.seq_length)
        open_examples(self.task, self.data, self.text_columns, self.label_column, self.regression)
