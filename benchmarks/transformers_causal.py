# SPDX-License-Identifier: Apache-2.0
"""The peer in training causal language models: transformers' `GPT2LMHeadModel` on torch, driven by Accelerate.

It follows transformers' `examples/pytorch/language-modeling/run_clm_no_trainer.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler, set_seed

from benchmarks.machine import peak_memory_mb
from benchmarks.torch_loop import time_steps, train_step, without_end
from common.model.sizes import dimensions


def trainer(
    model: str, folder: str, dropout: float, batch_size: int, precision: str = "no", compiler: str = "no"
) -> Callable[..., dict[str, Any]]:
    """A function that trains some steps and times them; see `benchmarks.workers`.

    Args:
        model: a size.
        folder: with `sequences.npy`, ids [sequences, length + 1], of which all but the first are labels.
        dropout: of the model.
        batch_size: sequences in a step.
        precision: Accelerate's `mixed_precision`: `no` or `bf16`.
        compiler: Accelerate's `dynamo_backend`: `no` or `inductor`.
    """
    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=precision, dynamo_backend=compiler)
    sequences = torch.from_numpy(np.load(Path(folder, "sequences.npy")).astype(np.int64))
    size = dimensions(model)
    task = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=int(sequences.max()) + 1,
            n_embd=size["hidden_dim"],
            n_layer=size["num_layers"],
            n_head=size["num_heads"],
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )
    task.train()
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    loader = torch.utils.data.DataLoader(sequences, shuffle=True, batch_size=batch_size, drop_last=True)
    task, optimizer, loader, schedule = accelerator.prepare(
        task, optimizer, loader, get_scheduler("constant", optimizer)
    )
    batches = without_end(loader)

    def step(batch: torch.Tensor) -> float:
        return train_step(accelerator, task(input_ids=batch, labels=batch).loss, optimizer, schedule)

    def run(steps: int) -> dict[str, Any]:
        found = time_steps(step, batches, steps, lambda batch: {"tokens": batch[:, 1:].numel()})
        return found | {"peak_memory_mb": peak_memory_mb()}

    return run
