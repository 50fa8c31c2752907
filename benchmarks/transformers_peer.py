# SPDX-License-Identifier: Apache-2.0
"""The peer: Hugging Face transformers' `BertForMaskedLM` on torch, driven by Accelerate.

It follows transformers' `examples/pytorch/language-modeling/run_mlm_no_trainer.py`: text is packed into sequences of
one length, transformers' own collator masks 15 % of it afresh in every epoch, and `Accelerator` holds the loop's parts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    get_scheduler,
    set_seed,
)

from benchmarks.torch_loop import time_steps, train_step, without_end
from common.model.sizes import dimensions


def build(model: str, vocabulary_size: int, dropout: float) -> BertForMaskedLM:
    """A BERT of a size, with random weights, its token embedding tied to the head's, as in KerasHub."""
    size = dimensions(model)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=vocabulary_size,
            hidden_size=size["hidden_dim"],
            num_hidden_layers=size["num_layers"],
            num_attention_heads=size["num_heads"],
            intermediate_size=size["intermediate_dim"],
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def trainer(
    model: str, folder: str, dropout: float, batch_size: int, precision: str = "no", compiler: str = "no"
) -> Callable[..., dict[str, Any]]:
    """A function that trains some steps and times them; see `benchmarks.workers`.

    Args:
        model: a size.
        folder: with `vocab.txt` and `sequences.npy`.
        dropout: of the model.
        batch_size: sequences in a step.
        precision: Accelerate's `mixed_precision`: `no` or `bf16`.
        compiler: Accelerate's `dynamo_backend`: `no` or `inductor`.
    """
    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=precision, dynamo_backend=compiler)
    pieces = Path(folder, "vocab.txt").read_text(encoding="utf-8").splitlines()
    tokenizer = BertTokenizerFast(vocab={piece: number for number, piece in enumerate(pieces)})
    task = build(model, len(pieces), dropout)
    task.train()
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    loader = torch.utils.data.DataLoader(
        examples(np.load(Path(folder, "sequences.npy")), tokenizer),
        shuffle=True,
        batch_size=batch_size,
        collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
        drop_last=True,
    )
    schedule = get_scheduler("constant", optimizer)
    task, optimizer, loader, schedule = accelerator.prepare(task, optimizer, loader, schedule)
    batches = without_end(loader)

    def step(batch: dict[str, torch.Tensor]) -> float:
        return train_step(accelerator, task(**batch).loss, optimizer, schedule)

    def count(batch: dict[str, torch.Tensor]) -> dict[str, int]:
        return {"tokens": int(batch["attention_mask"].sum())}

    return lambda steps: time_steps(step, batches, steps, count)


def examples(sequences: np.ndarray, tokenizer: BertTokenizerFast) -> list[dict[str, np.ndarray]]:
    """The examples as the collator takes them, with the tokens that it may not mask."""
    special = np.isin(sequences, tokenizer.all_special_ids)
    tokens = sequences != tokenizer.pad_token_id
    ids = sequences.astype(np.int64)
    return [
        {"input_ids": ids[i], "attention_mask": tokens[i].astype(np.int64), "special_tokens_mask": special[i]}
        for i in range(len(ids))
    ]
