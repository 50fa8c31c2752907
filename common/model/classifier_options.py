# SPDX-License-Identifier: Apache-2.0
"""Options shared by the recipes that fine-tune a text classifier."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ..command_line import FIRST, INPUT, Bounds, Count, Rate, RunOptions, Share
from .sizes import Size, check_model


@dataclass(frozen=True, kw_only=True)
class ClassifierOptions(RunOptions):
    """Options of the texts, the model and its training."""

    # roles: generated pairs; own: your own files; the others: of GLUE
    task: Annotated[Literal["roles", "cola", "mrpc", "qnli", "rte", "sst2", "stsb", "own"], FIRST] = "roles"
    # folder in GLUE's format, or empty to download GLUE from the Hub; own: a .tsv, .csv or .jsonl file, or a folder
    data: Annotated[str, FIRST, INPUT] = ""
    text_columns: Annotated[str, FIRST] = ""  # own: name of the text column, or two names separated by a comma
    label_column: Annotated[str, FIRST] = ""  # own: name of the label column
    regression: bool = False  # own: the labels are numbers to be predicted, with the squared error as the loss
    # KerasHub name, or folder such as runs/bert_mlm/preset, to start from; empty: random weights
    preset: Annotated[str, FIRST, INPUT] = ""
    # BERT size, with random weights; default: tiny, unless a preset is given
    model: Annotated[Size | None, FIRST] = None
    vocabulary_size: Annotated[int, Bounds(100, 2**20)] = 4096  # word pieces, of a vocabulary trained without a preset
    seq_length: Annotated[int, Bounds(3, 2**16)] = 128  # maximum tokens per example
    batch_size: Annotated[Count, FIRST] = 16  # examples per replica in a step
    learning_rate: Annotated[Rate, FIRST] = None  # peak for one replica; default: 5e-4, or 5e-5 from a preset
    dropout: Share = 0.1  # of the encoder and the head
    # of a preset, train adapters of this rank (LoRA) and the head alone, with a learning rate of 4e-4; default: all
    lora_rank: Annotated[int | None, Bounds(1, 2**10)] = None
    epochs: Annotated[Count, FIRST] = 3  # passes over the examples

    def __post_init__(self):
        super().__post_init__()
        check_model(self.preset, self.model, self.seq_length, self.lora_rank)
