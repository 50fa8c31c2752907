# SPDX-License-Identifier: Apache-2.0
"""Exports a BERT masked language model, or a causal language model, to Hugging Face transformers.

KerasHub exports causal models itself, of the families GPT-2, Llama 3, Mistral, Qwen and Gemma. GPT-2 is the same there
up to rounding. Tokenizers of GPT-2 and BERT are written here, because they split a text as KerasHub's do, not as those
of transformers: GPT-2's begins it with an end token, as KerasHub's preprocessor does; BERT's differs from KerasHub's in
characters that Unicode's NFKC changes, such as wide letters.

KerasHub's BERT differs in its head from every BERT of transformers. Its encoder has the tanh form of gelu and its head
the exact one; the head's norm has an epsilon of 1e-5 and all others 1e-12. A `config.json` has one `hidden_act` and one
`layer_norm_eps` for all: ours are the encoder's. In transformers, an exported model's logits are then off by up to 2e-3
and its probabilities by 2e-4 (for the default run's model, with logits from -9 to 12, on every token of ten sentences);
with the exact gelu, by 5e-3 and 2e-4. Nothing else differs: with both corrected in Keras's head, 5e-6 is left.
Published checkpoints have the exact gelu, so their encoder is off by as much here, as it is in KerasHub.
"""

import math
import os
import shutil
from pathlib import Path

import keras_hub
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from keras_replicas import UserError

from ..data.byte_pairs import SPLIT
from ..data.vocabulary import UNKNOWN
from ..files import write_json
from .huggingface import huggingface_weights
from .presets import from_preset, load_json, one_line, require_head

# What KerasHub's BertTokenizer splits at, and what of that is a word by itself: punctuation and Chinese characters.
SPACE = r"[ \t\n\r\f]|\p{Cc}|\p{Cf}"
CHINESE = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2CEAF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
ALONE = rf"[!-/:-@\[-`{{-~{CHINESE}]|\p{{P}}"


def export(preset: str, folder: Path) -> str:
    """Writes a folder that transformers loads, complete or not at all.

    Args:
        preset: what KerasHub saved of a `BertMaskedLM` or a causal language model: a name, or a folder.
        folder: destination; it must be empty or not exist.

    Returns:
        The task for which `transformers.pipeline(task, folder)` loads it: `fill-mask` or `text-generation`.

    Raises:
        UserError: when the preset is neither, its family is not exported, or the folder cannot be written.
    """
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} already exists; give a new folder")
    with one_line(f"cannot load {preset} as a model that KerasHub saved"):
        kind = load_json(preset, "task.json")["class_name"]
    bert, task = kind == "BertMaskedLM", getattr(keras_hub.models, kind, object)
    if not bert and not issubclass(task, keras_hub.models.CausalLM):
        raise UserError(f"cannot export {preset}, a {kind}: give a BertMaskedLM or a causal language model")
    if bert:
        require_head(preset, kind)
    model = from_preset(task, preset, dtype="float32", compile=False)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        with one_line(f"cannot write {folder}"):
            unfinished.mkdir(parents=True)
            (_write_bert if bert else _write_causal)(model, unfinished)
            # safetensors makes a file that only its owner can read.
            shutil.copymode(unfinished / "config.json", unfinished / "model.safetensors")
            os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return "fill-mask" if bert else "text-generation"


def _write_causal(model: keras_hub.models.CausalLM, folder: Path) -> None:
    model.export_to_transformers(str(folder))
    tokenizer = model.preprocessor.tokenizer
    if not isinstance(tokenizer, keras_hub.models.GPT2Tokenizer):
        return
    config = load_json(str(folder)) | {"architectures": ["GPT2LMHeadModel"]}  # which KerasHub's own loader asks for
    write_json(folder / "config.json", config)
    merges = [tuple(merge.split(" ")) for merge in tokenizer.merges if not merge.startswith("#version")]
    own, end = Tokenizer(models.BPE(dict(tokenizer.vocabulary), merges)), tokenizer.end_token
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"), to_bytes])
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([end])
    own.post_processor = processors.TemplateProcessing(f"{end} $0", special_tokens=[(end, tokenizer.end_token_id)])
    _write_tokenizer(own, folder, model, bos_token=end, eos_token=end, unk_token=end)


def _write_bert(model: keras_hub.models.BertMaskedLM, folder: Path) -> None:
    backbone, tokenizer, variables = model.backbone, model.preprocessor.tokenizer, huggingface_weights(model)
    tensors = {}
    for name, variable in variables.items():
        tensor = np.array(variable)
        if variable.path.endswith("kernel"):
            outputs = variables[name.replace(".weight", ".bias")]
            tensor = np.ascontiguousarray(tensor.reshape(-1, math.prod(outputs.shape)).T)
        tensors[name] = tensor.ravel() if name.endswith(".bias") else tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": backbone.vocabulary_size,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
        "hidden_size": backbone.hidden_dim,
        "intermediate_size": backbone.intermediate_dim,
        "max_position_embeddings": backbone.max_sequence_length,
        "type_vocab_size": backbone.num_segments,
        "hidden_dropout_prob": backbone.dropout,
        "attention_probs_dropout_prob": backbone.dropout,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-12,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    write_json(folder / "config.json", config)
    pieces = tokenizer.get_vocabulary()
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    ids = {piece: number for number, piece in enumerate(pieces)}
    own = Tokenizer(models.WordPiece(ids, unk_token=UNKNOWN))
    steps: list = [normalizers.NFD(), normalizers.Replace(Regex(r"\p{Mn}"), "")] if tokenizer.strip_accents else []
    if tokenizer.lowercase:  # Unicode's case folding
        steps += [normalizers.NFC(), normalizers.Lowercase()]
        steps += [normalizers.Replace("ß", "ss"), normalizers.Replace("ς", "σ")]
    own.normalizer = normalizers.Sequence(steps)
    splits = ((SPACE, "removed"), (ALONE, "isolated"))
    own.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(at), how) for at, how in splits])
    own.decoder = decoders.WordPiece()
    ends = {"cls_token": tokenizer.cls_token, "sep_token": tokenizer.sep_token}
    special = {"pad_token": tokenizer.pad_token, "unk_token": UNKNOWN, "mask_token": tokenizer.mask_token} | ends
    own.add_special_tokens([*special.values()])
    own.post_processor = processors.BertProcessing(*((token, ids[token]) for token in reversed(ends.values())))
    form = {"do_lower_case": tokenizer.lowercase, "strip_accents": tokenizer.strip_accents}
    _write_tokenizer(own, folder, model, **special, **form)


def _write_tokenizer(tokenizer: Tokenizer, folder: Path, model: keras_hub.models.Task, **settings) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    # The class takes tokenizer.json as it is; those of BERT and GPT-2 make their own.
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.backbone.max_sequence_length}
    write_json(folder / "tokenizer_config.json", settings)
