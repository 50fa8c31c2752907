# SPDX-License-Identifier: Apache-2.0
"""Options shared by the text-classification recipes."""

from dataclasses import dataclass
from typing import Literal

from common.data.glue import open_examples
from common.model.sizes import check_lora, check_model
from common.run.options import RunOptions


@dataclass(frozen=True)
class ClassifierOptions(RunOptions):
    """Options of the texts, the model and its training, on top of `RunOptions`.

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
    # peak learning rate for one replica; 0: 0.024 / width from a preset, with LoRA 4e-4, and 5e-4 from random weights
    learning_rate: float = 0.0
    warmup: float = 0.1  # fraction of all steps that are warm-up
    dropout: float = 0.1
    lora_rank: int | None = None  # train adapters of this rank (LoRA) and the head alone; default: all weights
    epochs: int = 3

    def peak_rate(self, width: int) -> float:
        """The peak learning rate for one replica, with the default filled in.

        From a preset, it falls with the width of the model's layers, as the best one for Adam does (Yang et al. 2022,
        arXiv:2203.03466); it is 3e-5 for BERT-base. LoRA's is that of Hu et al. 2021, arXiv:2106.09685, section D.1.
        """
        own = 4e-4 if self.lora_rank else 0.024 / width if self.preset else 5e-4
        return self.learning_rate or own

    def __post_init__(self):
        super().__post_init__()
        check_model(self.preset, self.model, self.seq_length)
        check_lora(self.lora_rank, self.preset)
        open_examples(self.task, self.data, self.text_columns, self.label_column, self.regression)
