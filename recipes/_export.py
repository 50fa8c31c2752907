# SPDX-License-Identifier: Apache-2.0
"""Exports a model to Hugging Face transformers, or its graph to ONNX, TensorFlow's SavedModel or LiteRT.

KerasHub exports causal models itself, and Keras graphs. What both lack is here: BERT's weights for transformers, and
`tokenizer.json`, which splits a text as KerasHub's tokenizer does. Transformers' own differ: GPT-2's begins a text with
an end token, and BERT's folds case without NFKC. Ours differs in words of over 100 bytes in several scripts, and some
rare letters, as Cherokee's; and of two long texts by one token, if their room is odd and the second not the shorter.

KerasHub's BERT has the tanh form of gelu in its encoder. In a masked language model, the head has the exact one, and a
norm with an epsilon of 1e-5, all others 1e-12. A `config.json` has one of each: ours are the encoder's. Its logits are
then off by up to 2e-3 in transformers, probabilities by 2e-4 (the default run's model, all tokens of ten sentences).
Nothing else differs.
"""

import importlib.util
import math
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.data.byte_pairs import SPLIT
from common.data.vocabulary import NO_PIECE, UNKNOWN
from common.files import one_line, write_json
from common.model.masked_lm import get_file, huggingface_weights, load_json
from common.model.presets import from_preset
from keras_replicas import UserError
from recipes._classify import saved_labels

# What KerasHub's BertTokenizer splits at, and what of that is a word by itself: punctuation and Chinese characters. It
# splits first, then folds case, which makes "..." of an ellipsis, and nothing of a variation selector.
SPACE = r"[ \t\n\r\f]|\p{Cc}|\p{Cf}"
HAN = r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2CEAF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
ALONE = rf"[!-/:-@\[-`{{-~{HAN}]|\p{{P}}"
SPLITS = rf"{SPACE}|(?<=.)(?={ALONE})|(?<={ALONE})"  # at a text's very start, `Replace` cannot insert
MARK = "\ufdd0"  # a noncharacter, where a text is split
IGNORED = r"[\p{Default_Ignorable_Code_Point}&&[^\p{Cf}]]"
# Words of more than 100 bytes, which are unknown, but some that mix scripts.
LONG = rf"(?<![^{MARK}])[^{MARK}]*([\x{{800}}-\x{{10FFFF}}&&[^{MARK}]]{{34}}|[^\x00-\x7F{MARK}]{{51}})[^{MARK}]*"
HUB = keras_hub.models
HEADS = ("MaskedLM", "TextClassifier")
SPECIAL = ("pad_token", "mask_token", "cls_token", "sep_token")  # beside `[UNK]`
# Of each graph: its file's name, Keras's name of the format, and what loads it.
GRAPHS = {
    "onnx": ("model.onnx", "onnx", "onnxruntime.InferenceSession"),
    "saved_model": ("", "tf_saved_model", "tensorflow.saved_model.load"),
    "litert": ("model.tflite", "litert", "ai_edge_litert.interpreter.Interpreter"),
}
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


def export(preset: str, folder: Path, form: str = "huggingface") -> str:
    """Writes a preset with its head to an empty or new folder, whole or not at all; returns the code that loads it.

    `huggingface` takes a `BertMaskedLM`, a `BertTextClassifier` or a causal language model. A form of `GRAPHS` takes a
    masked language model or a text classifier, of a BERT, DistilBERT or RoBERTa: any number of texts, of any length.
    Beside the graph are a `tokenizer.json` that cuts and pads texts, and a classifier's `labels.json`.

    Raises a UserError when the form does not take the preset, a package is missing, or the folder cannot be written.
    """
    given, folder = folder, folder.resolve()
    if os.path.exists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} already exists; give a new folder")
    with one_line(f"cannot load {preset} as a model that KerasHub saved"):
        kind = load_json(preset, "task.json")["class_name"]
        task = getattr(HUB, kind, object)
        if not (causal := issubclass(task, HUB.CausalLM)):
            get_file(preset, "task.weights.h5")  # without it, the head would be random
    if form == "huggingface":
        takes, wanted = causal or kind in {f"Bert{head}" for head in HEADS}, "a BERT or a causal language model"
    else:
        takes, wanted = kind.startswith(("Bert", "DistilBert", "Roberta")) and kind.endswith(HEADS), "a BERT or RoBERTa"
    if not takes:
        raise UserError(f"cannot export {preset}, a {kind}, to {form}: give {wanted} with its head")
    if form == "onnx" and not importlib.util.find_spec("tf2onnx"):
        raise UserError("an export to onnx needs tf2onnx: pip install -e '.[export]' in the clone")
    classes = saved_labels(preset)[0] if kind.endswith("TextClassifier") else None
    model = from_preset(task, preset, dtype="float32", compile=False)
    if classes is not None and len(classes or [0]) != model.num_classes:
        raise UserError(f"labels.json of {preset} is not that of its model, which has {model.num_classes} outputs")
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")  # another may be of one that was killed
    with one_line(f"cannot write {folder}"):
        unfinished.mkdir(parents=True)
    try:
        with one_line(f"cannot write {folder}", errors=(Exception,)):  # converters have errors of their own
            if form != "huggingface":
                _write_graph(model, unfinished, form)
            else:
                _write_causal(model, unfinished) if causal else _write_bert(model, unfinished, classes)
                # safetensors makes a file that only its owner can read.
                shutil.copymode(unfinished / "config.json", unfinished / "model.safetensors")
            if classes is not None:
                write_json(unfinished / "labels.json", load_json(preset, "labels.json"))
            os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    if form != "huggingface":
        return f'{GRAPHS[form][2]}("{given / GRAPHS[form][0]}")'
    pipeline = "text-generation" if causal else "fill-mask" if classes is None else "text-classification"
    return f'transformers.pipeline("{pipeline}", "{given}")'


def _write_graph(model: Any, folder: Path, form: str) -> None:
    file, theirs, _ = GRAPHS[form]
    preprocessor, graph = model.preprocessor, keras.Model(model.input, model.output)  # which has no preprocessor
    options: dict[str, Any] = {"input_signature": [dict(model.input)]}
    if form == "litert":  # else also TensorFlow's operations, which the interpreter alone lacks
        options["target_spec"] = {"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS]}
    if form == "onnx":
        _add_erfc()
    with warnings.catch_warnings(action="ignore"):
        graph.export(folder / file, format=theirs, verbose=False, **options)
    if form == "onnx":
        import onnx

        onnx.checker.check_model(folder / file)  # tf2onnx keeps an operation that it does not know
    tokenizer, classifier = preprocessor.tokenizer, isinstance(model, HUB.TextClassifier)
    own = (_byte_pairs if isinstance(tokenizer, HUB.RobertaTokenizer) else _word_pieces)(tokenizer, classifier)
    own.enable_truncation(preprocessor.sequence_length if classifier else model.backbone.max_sequence_length)
    own.enable_padding(pad_id=tokenizer.pad_token_id, pad_token=tokenizer.pad_token)
    own.save(str(folder / "tokenizer.json"))


def _add_erfc() -> None:
    """Teaches tf2onnx the operation of the exact gelu that version 1.17 lacks: 1 - erf."""
    from tf2onnx.handler import tf_op
    from tf2onnx.utils import make_name

    @tf_op("Erfc")
    class Erfc:
        @classmethod
        def version_9(cls, graph, node, **_):
            shape, dtype = graph.get_shape(node.output[0]), graph.get_dtype(node.output[0])
            one = graph.make_const(make_name("one"), np.float32(1)).output[0]
            erf = graph.make_node("Erf", node.input).output[0]
            graph.remove_node(node.name)
            graph.make_node("Sub", [one, erf], outputs=node.output, shapes=[shape], dtypes=[dtype])


def _write_causal(model: Any, folder: Path) -> None:
    model.export_to_transformers(str(folder))
    tokenizer = model.preprocessor.tokenizer
    if isinstance(tokenizer, HUB.GPT2Tokenizer):
        config = load_json(str(folder)) | {"architectures": ["GPT2LMHeadModel"]}  # which KerasHub's own loader asks for
        write_json(folder / "config.json", config)
        end = tokenizer.end_token
        special = {"bos_token": end, "eos_token": end, "unk_token": end}
        _write_tokenizer(_byte_pairs(tokenizer), folder, model.backbone.max_sequence_length, special)


def _write_bert(model: Any, folder: Path, classes: list[str] | None) -> None:
    backbone, tokenizer, variables = model.backbone, model.preprocessor.tokenizer, huggingface_weights(model)
    tensors = {name: np.array(variable) for name, variable in variables.items()}
    for name, tensor in tensors.items():
        if variables[name].path.endswith("kernel"):  # there [outputs, inputs]
            outputs = math.prod(variables[name.replace(".weight", ".bias")].shape)
            tensors[name] = np.ascontiguousarray(tensor.reshape(-1, outputs).T)
        elif name.endswith(".bias"):
            tensors[name] = tensor.ravel()
    tensors = {name.replace("logits.", "classifier."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "dtype": "float32"}
    config |= {theirs: getattr(backbone, ours) for theirs, ours in CONFIG.items()}
    config |= {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-12, "pad_token_id": tokenizer.pad_token_id}
    length = backbone.max_sequence_length
    if classes is not None:
        names = {str(number): name for number, name in enumerate(classes or ["number"])}
        config |= {"architectures": ["BertForSequenceClassification"], "id2label": names}
        config |= {"label2id": {name: int(number) for number, name in names.items()}}
        config["problem_type"] = "single_label_classification" if classes else "regression"
        length = model.preprocessor.sequence_length
    write_json(folder / "config.json", config)
    (folder / "vocab.txt").write_text("".join(f"{p}\n" for p in tokenizer.get_vocabulary()), encoding="utf-8")
    special = {name: getattr(tokenizer, name) for name in SPECIAL} | {"unk_token": UNKNOWN}
    form = {"do_lower_case": tokenizer.lowercase, "strip_accents": tokenizer.strip_accents}
    form["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]  # else no type tells texts of a pair
    _write_tokenizer(_word_pieces(tokenizer), folder, length, special | form)


def _word_pieces(tokenizer: Any, plain: bool = False) -> Tokenizer:
    """BERT's or DistilBERT's; where `plain`, the names of special tokens but `[UNK]` in a text are text."""
    ids = {piece: number for number, piece in enumerate(tokenizer.get_vocabulary())}
    own = Tokenizer(models.WordPiece(ids, unk_token=UNKNOWN))
    steps: list = [normalizers.NFD(), normalizers.Replace(Regex(r"\p{Mn}"), "")] if tokenizer.strip_accents else []
    steps.append(normalizers.Replace(Regex(SPLITS), MARK))
    if tokenizer.lowercase:  # Unicode's case folding, with NFKC
        steps += [normalizers.Replace(Regex(IGNORED), ""), normalizers.NFKD(), normalizers.Lowercase()]
        pairs = ("ß", "ss"), ("ς", "σ"), ("\u0345", "ι")
        steps += [*(normalizers.Replace(*pair) for pair in pairs), normalizers.NFC()]
    own.normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(LONG), NO_PIECE)])
    own.pre_tokenizer = pre_tokenizers.Split(MARK, "removed")
    own.decoder = decoders.WordPiece()
    own.add_special_tokens([UNKNOWN] if plain else [*(getattr(tokenizer, name) for name in SPECIAL), UNKNOWN])
    sep, cls = ((token, ids[token]) for token in (tokenizer.sep_token, tokenizer.cls_token))
    own.post_processor = processors.BertProcessing(sep, cls)
    return own


def _byte_pairs(tokenizer: Any, plain: bool = False) -> Tokenizer:
    """GPT-2's or RoBERTa's; unless `plain`, a mask brings the space before it, as a masked word does."""
    merges = [tuple(merge.split(" ")) for merge in tokenizer.merges if not merge.startswith("#version")]
    own, end = Tokenizer(models.BPE(dict(tokenizer.vocabulary), merges)), tokenizer.end_token
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), to_bytes])
    own.decoder = decoders.ByteLevel()
    if isinstance(tokenizer, HUB.GPT2Tokenizer):
        own.add_special_tokens([end])
        own.post_processor = processors.TemplateProcessing(f"{end} $0", special_tokens=[(end, tokenizer.end_token_id)])
        return own
    start, mask = tokenizer.start_token, AddedToken(tokenizer.mask_token, lstrip=not plain)
    own.add_special_tokens([start, tokenizer.pad_token, end, mask])
    ends = (end, tokenizer.end_token_id), (start, tokenizer.start_token_id)
    own.post_processor = processors.RobertaProcessing(*ends, trim_offsets=False, add_prefix_space=False)
    return own


def _write_tokenizer(tokenizer: Tokenizer, folder: Path, length: int, settings: dict[str, Any]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    # The class takes tokenizer.json as it is; those of BERT and GPT-2 make their own.
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length}
    write_json(folder / "tokenizer_config.json", settings)
