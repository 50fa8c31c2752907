# SPDX-License-Identifier: Apache-2.0
"""The peer: Hugging Face transformers' `BertForMaskedLM` on torch, driven by Accelerate.

In the form of transformers' `examples/pytorch/language-modeling/run_mlm_no_trainer.py`: text packed into sequences of
one length, their own collator masks 15 % of it anew in every epoch, `Accelerator` holds the loop's parts.
"""

import itertools
import time
from collections.abc import Callable, Iterator
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

from common.model.sizes import dimensions

WARM = 2  # as in benchmarks.clock, which needs Keras


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
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-4, weight_decay=0.01)
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

    def run(steps: int) -> dict[str, Any]:
        for batch in itertools.islice(batches, WARM):
            train_step(batch)
        tokens, began = 0, time.perf_counter()
        for batch in itertools.islice(batches, steps):
            train_step(batch)
            tokens += int(batch["attention_mask"].sum())
        return {"steps": steps, "seconds": time.perf_counter() - began, "tokens": tokens}

    def train_step(batch: dict[str, torch.Tensor]) -> float:
        loss = task(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.item()  # as the others, it shows each step's loss

    return run


def examples(sequences: np.ndarray, tokenizer: BertTokenizerFast) -> list[dict[str, np.ndarray]]:
    """What the collator takes, with the tokens that it may not mask."""
    special = np.isin(sequences, tokenizer.all_special_ids)
    tokens = sequences != tokenizer.pad_token_id
    ids = sequences.astype(np.int64)
    return [
        {"input_ids": ids[i], "attention_mask": tokens[i].astype(np.int64), "special_tokens_mask": special[i]}
        for i in range(len(ids))
    ]


def without_end(loader) -> Iterator[dict[str, torch.Tensor]]:
    """Epoch after epoch."""
    while True:
        yield from loader
