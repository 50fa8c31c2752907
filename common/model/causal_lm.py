# SPDX-License-Identifier: Apache-2.0
"""Causal language models: GPT-2 from a size, or any of KerasHub's from a preset; their rows, and what they write."""

import functools
import inspect
from collections.abc import Iterator, Sequence

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from keras_replicas import UserError, is_chief

from ..data.byte_pairs import train_byte_pairs
from ..data.corpora import Documents, open_corpus
from ..data.dialogues import answer_rows, is_dialogues, read_dialogues, said_in
from ..data.row_folders import open_folder
from ..data.rows import Rows, corpus_rows
from ..files import plain
from .presets import backbone_from_size, check_positions, enable_lora, from_preset

END = "<|endoftext|>"  # GPT-2's only special token
SAMPLES, TOKENS = 3, 4  # texts to be continued; tokens of one, if its row has no prompt
TEN_LIKELIEST = {"k": 10, "seed": 0}  # for a top-k sampler, which draws the same ones each time


def causal_rows(
    corpus: str, data: str, preset: str, vocabulary_size: int, seq_length: int
) -> tuple[keras_hub.models.CausalLMPreprocessor, dict[str, Rows]]:
    """A model's preprocessor, which has the tokenizer, and each split's rows: one token longer than a sequence.

    All text of a corpus becomes one row, with the tokenizer's end token and, if it is another one, its start token
    between documents, and each row begins with the last token of the one before: every token but the first is a label.

    The `data` are prompts with answers, for `read_dialogues`; or a folder of rows of text, which have their own length;
    without them, a corpus of `open_corpus` is read. Without a preset, a tokenizer of `vocabulary_size` tokens is
    trained on the text. Raises a UserError when there is no such data or preset, or they do not belong together.
    """
    if data and not is_dialogues(data):
        rows, tokenizer = open_folder(data)
        return make_preprocessor(preset, tokenizer, rows["train"].length - 1), rows
    texts: Documents
    if data:
        dialogues = read_dialogues(data)
        texts, source = functools.partial(said_in, dialogues["train"]), repr(dialogues)
    else:
        opened = open_corpus(corpus)
        texts, source = opened.splits["train"], opened.fingerprint
    trained = None if preset else train_byte_pairs(texts, source, vocabulary_size)
    preprocessor = make_preprocessor(preset, trained, seq_length)
    tokenizer = preprocessor.tokenizer
    if data:
        return preprocessor, answer_rows(dialogues, tokenizer, seq_length + 1)
    start, end = tokenizer.start_token_id, tokenizer.end_token_id
    before, after = (start,) if start is not None else (), (end,) if end != start else ()
    return preprocessor, corpus_rows(opened, tokenizer, seq_length + 1, before=before, after=after, overlap=1)


def make_preprocessor(
    preset: str, tokenizer: keras_hub.models.Tokenizer | None, seq_length: int
) -> keras_hub.models.CausalLMPreprocessor:
    """A model's preprocessor, for `seq_length` tokens: a preset's, or GPT-2's for a vocabulary of byte pairs.

    Of a `RobertaTokenizer`, the end token `</s>` becomes GPT-2's, with the same id; the other four special tokens stand
    for no text, and are never predicted. Raises a UserError when there is no such preset of a causal language model, it
    cannot be fetched, or it and the tokenizer do not agree; or when that is not of byte pairs.
    """
    if not isinstance(tokenizer, keras_hub.tokenizers.BytePairTokenizer | None):
        raise UserError(f"a causal language model needs byte pairs; this vocabulary is a {type(tokenizer).__name__}")
    ids = dict(tokenizer.vocabulary) if tokenizer else {}
    if isinstance(tokenizer, keras_hub.models.RobertaTokenizer):
        ids[END] = ids.pop(tokenizer.end_token)
    if preset:
        preprocessor = from_preset(keras_hub.models.CausalLMPreprocessor, preset, sequence_length=seq_length)
        if tokenizer and getattr(preprocessor.tokenizer, "vocabulary", None) != ids:
            raise UserError(f"the preset {preset} has another vocabulary than the data: give text, not token ids")
        return preprocessor
    assert tokenizer, "neither a preset nor a tokenizer"
    gpt2 = keras_hub.models.GPT2Tokenizer(ids, tokenizer.merges)
    return keras_hub.models.GPT2CausalLMPreprocessor(gpt2, sequence_length=seq_length)


def make_causal_lm(
    preset: str,
    size: str,
    preprocessor: keras_hub.models.CausalLMPreprocessor,
    dropout: float,
    lora_rank: int | None = None,
) -> keras_hub.models.CausalLM:
    """A causal language model of any family that KerasHub has, from a preset or, without one, a GPT-2 from a size.

    Call it inside the strategy's scope. With a `lora_rank`, only adapters of the attention's query and value kernels
    are trained. Raises a UserError when there is no such preset, it cannot be fetched, it needs more than text, it has
    too few positions or another vocabulary than its tokenizer, or KerasHub has no LoRA for it.
    """
    models, tokens = keras_hub.models, preprocessor.tokenizer.vocabulary_size()
    if preset:
        has_dropout = "dropout" in inspect.signature(preprocessor.backbone_cls).parameters
        options = {"dropout": dropout} if has_dropout else {}
        backbone = from_preset(models.Backbone, preset, dtype=keras.config.dtype_policy(), **options)
    else:
        backbone = backbone_from_size(models.GPT2Backbone, size, tokens, dropout, preprocessor.sequence_length)
    if {*backbone.input} != {"token_ids", "padding_mask"}:
        raise UserError(f"the preset {preset} takes {', '.join(sorted(backbone.input))}; give a model of text alone")
    check_positions(backbone, preprocessor.sequence_length, preset)
    if tokens > backbone.vocabulary_size:
        known = f"its tokenizer has {tokens} tokens, the model {backbone.vocabulary_size}"
        raise UserError(f"the files of the preset {preset} do not belong together: {known}")
    # Embedding weights are not cast: even in mixed precision, logits would be computed in float32, twice as slowly.
    backbone.token_embedding.reverse_dtype = backbone.token_embedding.compute_dtype
    if lora_rank:
        enable_lora(backbone, lora_rank)
    options = {"backbone": backbone, "preprocessor": preprocessor, "compile": False}
    if preset:
        return from_preset(models.CausalLM, preset, load_weights=False, **options)
    return models.GPT2CausalLM(**options)


def continuations(
    model: keras_hub.models.CausalLM, prompts: Sequence[str], sampler: keras_hub.samplers.Sampler, tokens: int = 40
) -> Iterator[str]:
    """The prompts, each followed by what the model adds, up to its end token or `tokens` tokens.

    The sampler starts afresh for each: a prompt gives the same text each time, whatever the other prompts. Raises a
    UserError when a prompt has no token, or leaves no room for one within the preprocessor's `sequence_length`; when k
    exceeds the vocabulary; when the model's logits are not finite, and the sampler draws.
    """
    if (getattr(sampler, "k", None) or 1) > (size := model.backbone.vocabulary_size):
        raise UserError(f"top-k has k={sampler.k}, but the vocabulary has {size} tokens: give a smaller k")
    if model.sampler is not sampler:  # `compile` would do so too, but lose what is compiled for training
        model.sampler, model.generate_function = sampler, None
    room = model.preprocessor.sequence_length
    for prompt in prompts:
        length = int(np.sum(model.preprocessor.generate_preprocess([prompt], room + 1)["padding_mask"]))
        if not 0 < length < room:
            raise UserError(f"the prompt has {length} tokens or more: it may have 1 to {room - 1}")
        for state in sampler.variables:
            state.assign([sampler.seed, 0])
        try:
            yield model.generate([prompt], max_length=min(length + tokens, room))[0]
        except tf.errors.InvalidArgumentError as error:  # a draw from probabilities that are NaN
            raise UserError("the model has diverged: its logits are not finite, and so it writes nothing") from error


def causal_lm_for_generation(preset: str) -> keras_hub.models.CausalLM:
    """A preset's model, in float32; a UserError when there is none of a causal language model, or it cannot be had."""
    model = from_preset(keras_hub.models.CausalLM, preset, dtype="float32", compile=False)
    model.compile(jit_compile=False)  # XLA would take longer to compile than to write a text
    return model


def print_continuations(preset: str, prompts: Sequence[str]) -> None:
    """Prints texts as the model saved in a preset continues them; or, in one line, why it cannot."""
    try:
        sampler = keras_hub.samplers.TopKSampler(**TEN_LIKELIEST)
        for text in continuations(causal_lm_for_generation(preset), prompts, sampler):
            print(plain(f"\n{text}"))
    except UserError as error:
        print(f"\n{error}")


class Samples(keras.callbacks.Callback):
    """Writes to `board`, at each epoch's end, how the model continues `texts`, with the same draws each time.

    They are the prompts of the first rows or, of rows without prompts, the first tokens.
    """

    def __init__(self, board: tf.summary.SummaryWriter, rows: Rows, tokenizer: keras_hub.models.Tokenizer):
        super().__init__()
        self.board, self.sampler = board, keras_hub.samplers.TopKSampler(**TEN_LIKELIEST)
        self.texts: list[str] = []
        ids, _, is_label = (part.numpy() for part in rows.read(tf.range(min(SAMPLES, len(rows)), dtype=tf.int64)))
        for row, labels in zip(ids.tolist(), is_label, strict=True):
            end = min(int(labels[1:].argmax()) + 1, rows.length // 2)  # the first token is no label, or a start token
            text = [token for token in row[: end if end > 1 else TOKENS] if token not in tokenizer.special_token_ids]
            self.texts += [tokenizer.detokenize(text)] if text else []

    def on_epoch_end(self, epoch, logs=None):
        """Writes the texts verbatim, line breaks included, on the chief; for a diverged model, why there are none."""
        if is_chief() and self.texts:
            try:
                written = list(continuations(self.model, self.texts, self.sampler))
            except UserError as error:
                written = [str(error)]
            with self.board.as_default(step=self.model.steps_done):
                tf.summary.text("samples", ["    " + text.replace("\n", "\n    ") for text in written])
