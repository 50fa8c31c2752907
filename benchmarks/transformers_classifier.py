# SPDX-License-Identifier: Apache-2.0
"""The peer in fine-tuning: Hugging Face transformers' `AutoModelForSequenceClassification` on torch, with Accelerate.

It follows transformers' `examples/pytorch/text-classification/run_glue_no_trainer.py`: each batch is padded to its
longest example, and transformers' `LengthGroupedSampler` draws the batches.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_scheduler,
    set_seed,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from benchmarks.torch_loop import time_steps, train_step, without_end
from common.classification_scores import scores_of
from common.data.labelled import open_examples

LENGTH = 128  # tokens to which an example is cut


class ShuffledBatches(torch.utils.data.Sampler):
    """A sampler's batches in a random order: by length, the longest come first, and a few steps are not typical."""

    def __init__(self, sampler, batch_size: int):
        self.sampler, self.batch_size = sampler, batch_size

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        examples = list(self.sampler)
        batches = [examples[start : start + self.batch_size] for start in range(0, len(examples), self.batch_size)]
        return iter([batches[place] for place in torch.randperm(len(batches))])


class FineTuning:
    """A model of a preset, the examples of a task, and what trains one on the other.

    Args:
        preset: a folder in Hugging Face's format.
        task, data: as in `text_classifier`.
        batch_size: examples in a step.
        precision: Accelerate's `mixed_precision`: `no` or `bf16`.
        rate: the learning rate's peak.
        epochs: the rate rises over a tenth of their steps, and decays over the rest; 0 for a constant rate.
        seed: of the head, the order and the dropout.
    """

    def __init__(
        self,
        preset: str,
        task: str,
        data: str,
        batch_size: int,
        precision: str = "no",
        rate: float = 5e-5,
        epochs: int = 0,
        seed: int = 0,
    ):
        set_seed(seed)
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=precision)
        tokenizer = AutoTokenizer.from_pretrained(preset)
        self.texts = texts = open_examples(task, data)
        self.splits: dict[str, list[dict[str, Any]]] = {}
        for split in ("train", "validation"):
            examples = texts.splits[split]
            encoded = [tokenizer(*parts, truncation=True, max_length=LENGTH) for parts in examples.texts]
            self.splits[split] = [dict(x) | {"labels": y} for x, y in zip(encoded, examples.labels, strict=True)]
        train, collate = self.splits["train"], DataCollatorWithPadding(tokenizer)
        sampler = LengthGroupedSampler(batch_size, lengths=[len(x["input_ids"]) for x in train])
        batches = ShuffledBatches(sampler, batch_size)
        loader = torch.utils.data.DataLoader(train, batch_sampler=batches, collate_fn=collate)
        evaluation = torch.utils.data.DataLoader(self.splits["validation"], batch_size=32, collate_fn=collate)
        model = AutoModelForSequenceClassification.from_pretrained(preset, num_labels=len(texts.classes))
        optimizer = torch.optim.AdamW(parameter_groups(model), lr=rate, fused=True)
        steps = len(loader) * epochs
        schedule = get_scheduler("linear" if epochs else "constant", optimizer, steps // 10, steps)
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule, evaluation)
        self.model, self.optimizer, self.loader, self.schedule, self.evaluation = prepared
        self.model.train()

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """Trains on a batch, and returns its loss."""
        return train_step(self.accelerator, self.model(**batch).loss, self.optimizer, self.schedule)


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """A model's weights, with the weight decay of each: biases and norms have none."""
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, weight in model.named_parameters():
        groups["bias" in name or "LayerNorm" in name].append(weight)
    return [{"params": groups[False], "weight_decay": 0.01}, {"params": groups[True], "weight_decay": 0.0}]


def trainer(**arguments: Any) -> Callable[..., dict[str, Any]]:
    """A function that trains some steps and times them; see `benchmarks.workers`."""
    tuned = FineTuning(**arguments)
    batches = without_end(tuned.loader)

    def count(batch: dict[str, torch.Tensor]) -> dict[str, int]:
        mask = batch["attention_mask"]
        return {"examples": len(mask), "tokens": int(mask.sum()), "slots": mask.numel()}

    def run(steps: int) -> dict[str, Any]:
        return time_steps(tuned.step, batches, steps, count)

    return run


def scorer(epochs: int, **arguments: Any) -> Callable[[], dict[str, Any]]:
    """A function that trains for some epochs; it returns the validation scores."""
    tuned = FineTuning(epochs=epochs, **arguments)

    def run() -> dict[str, Any]:
        for _ in range(epochs):
            for batch in tuned.loader:
                tuned.step(batch)
        tuned.model.eval()
        with torch.no_grad():
            logits = [tuned.model(**batch).logits.float().numpy() for batch in tuned.evaluation]
        scores = scores_of(tuned.texts, "validation", np.concatenate(logits))
        return {name.removeprefix("val_"): score for name, score in scores.items()}

    return run


def follower(preset: str, rate: float) -> Callable[..., dict[str, Any]]:
    """A function that does the steps of `ours_classifier.leader`; it returns losses, and validation outputs.

    What the libraries define differently is set alike: KerasHub's BERT has the tanh form of GELU, and Keras's AdamW
    adds its epsilon before it corrects the second moment's bias.
    """
    alike = {"hidden_act": "gelu_pytorch_tanh", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    names = {"token_ids": "input_ids", "segment_ids": "token_type_ids", "padding_mask": "attention_mask"}

    def run(head: list, batches: list[dict[str, list]], validation: dict[str, list]) -> dict[str, Any]:
        kernel, bias = map(torch.tensor, head)
        model = AutoModelForSequenceClassification.from_pretrained(preset, num_labels=len(bias), **alike).train()
        model.classifier.load_state_dict({"weight": kernel.T, "bias": bias})
        optimizer = torch.optim.AdamW(parameter_groups(model), betas=(0.9, 0.98))

        def compute(inputs):
            return model(**{names.get(name, name): torch.tensor(values) for name, values in inputs.items()})

        losses = []
        for step, batch in enumerate(batches):
            epsilon = 1e-6 / (1 - 0.98 ** (step + 1)) ** 0.5
            for group in optimizer.param_groups:
                group |= {"lr": rate * (1 - step / len(batches)), "eps": epsilon}
            loss = compute(batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            return {"losses": losses, "outputs": compute(validation).logits.tolist()}

    return run
