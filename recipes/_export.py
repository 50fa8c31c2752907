# SPDX-License-Identifier: Apache-2.0
"""Exports a BERT masked language model, or a causal language model, to Hugging Face transformers.

KerasHub exports causal models itself. Tokenizers of GPT-2 and BERT are written here, for they split a text as those of
KerasHub do: GPT-2's begins it with an end token, and BERT's differs in characters that Unicode's NFKC changes.

KerasHub's BERT has the tanh form of gelu in its encoder and the exact one in its head, whose norm has an epsilon of
1e-5, all others 1e-12. A `config.json` has one of each: ours are the encoder's. In transformers, logits are then off by
up to 2e-3 and probabilities by 2e-4 (the default run's model, all tokens of ten sentences). Nothing else differs.
"""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import keras_hub
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.data.byte_pairs import SPLIT
from common.data.vocabulary import UNKNOWN
from common.files import one_line, write_json
from common.model.masked_lm import get_file, huggingface_weights, load_json
from common.model.presets import from_preset
from keras_replicas import UserError

# What KerasHub's BertTokenizer splits at, and what of that is a word by itself: punctuation and Chinese characters.
SPACE = r"[ \t\n\r\f]|\p{Cc}|\p{Cf}"
HAN = r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2CEAF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
ALONE = rf"[!-/:-@\[-`{{-~{HAN}]|\p{{P}}"
# In a `config.json`, what a BertBackbone has under another name.
CONFIG = {
    "vocab_size": "vocabulary_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "hidden_size": "hidden_dim",
    "intermediate_size": "intermediate_dim",
    "max_position_embeddings": "max_sequence_length",
    "type_vocab_size": "num_segments",
} | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), "dropout")


def export(preset: str, folder: Path) -> str:
    """Writes a preset of a `BertMaskedLM` or a causal language model to an empty or new folder, whole or not at all.

    Returns the task for which `transformers.pipeline(task, folder)` loads it: `fill-mask` or `text-generation`. Raises
    a UserError when the preset is neither, its family is not exported, or the folder cannot be written.
    """
    folder = folder.resolve()
    if os.path.exists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} already exists; give a new folder")
    with one_line(f"cannot load {preset} as a model that KerasHub saved"):
        kind = load_json(preset, "task.json")["class_name"]
        if bert := kind == "BertMaskedLM":
            get_file(preset, "task.weights.h5")  # without it, the head would be random
    task = getattr(keras_hub.models, kind, object)
    if not bert and not issubclass(task, keras_hub.models.CausalLM):
        raise UserError(f"cannot export {preset}, a {kind}: give a BertMaskedLM or a causal language model")
    model = from_preset(task, preset, dtype="float32", compile=False)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    with one_line(f"cannot write {folder}"):
        unfinished.mkdir(parents=True)
    try:
        with one_line(f"cannot write {folder}"):
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
    if isinstance(tokenizer, keras_hub.models.GPT2Tokenizer):
        config = load_json(str(folder)) | {"architectures": ["GPT2LMHeadModel"]}  # which KerasHub's own loader asks for
        write_json(folder / "config.json", config)
        merges = [tuple(merge.split(" ")) for merge in tokenizer.merges if not merge.startswith("#version")]
        own, end = Tokenizer(models.BPE(dict(tokenizer.vocabulary), merges)), tokenizer.end_token
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        own.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), to_bytes])
        own.decoder = decoders.ByteLevel()
        own.add_special_tokens([end])
        own.post_processor = processors.TemplateProcessing(f"{end} $0", special_tokens=[(end, tokenizer.end_token_id)])
        _write_tokenizer(own, folder, model, bos_token=end, eos_token=end, unk_token=end)


def _write_bert(model: keras_hub.models.BertMaskedLM, folder: Path) -> None:
    backbone, tokenizer, variables = model.backbone, model.preprocessor.tokenizer, huggingface_weights(model)
    tensors = {name: np.array(variable) for name, variable in variables.items()}
    for name, tensor in tensors.items():
        if variables[name].path.endswith("kernel"):  # there [outputs, inputs]
            outputs = math.prod(variables[name.replace(".weight", ".bias")].shape)
            tensors[name] = np.ascontiguousarray(tensor.reshape(-1, outputs).T)
        elif name.endswith(".bias"):
            tensors[name] = tensor.ravel()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "dtype": "float32"}
    config |= {theirs: getattr(backbone, ours) for theirs, ours in CONFIG.items()}
    config |= {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-12, "pad_token_id": tokenizer.pad_token_id}
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
    splits = [pre_tokenizers.Split(Regex(SPACE), "removed"), pre_tokenizers.Split(Regex(ALONE), "isolated")]
    own.pre_tokenizer = pre_tokenizers.Sequence(splits)
    own.decoder = decoders.WordPiece()
    special = {name: getattr(tokenizer, name) for name in ("pad_token", "mask_token", "cls_token", "sep_token")}
    special["unk_token"] = UNKNOWN
    own.add_special_tokens([*special.values()])
    cls, sep = special["cls_token"], special["sep_token"]
    own.post_processor = processors.BertProcessing((sep, ids[sep]), (cls, ids[cls]))
    form = {"do_lower_case": tokenizer.lowercase, "strip_accents": tokenizer.strip_accents}
    _write_tokenizer(own, folder, model, **special, **form)


def _write_tokenizer(tokenizer: Tokenizer, folder: Path, model: keras_hub.models.Task, **settings) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    # The class takes tokenizer.json as it is; those of BERT and GPT-2 make their own.
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.backbone.max_sequence_length}
    write_json(folder / "tokenizer_config.json", settings)
