# SPDX-License-Identifier: Apache-2.0
"""Models from a size, or from a preset in KerasHub's form or, of a BERT, Hugging Face's; and saved as a preset.

KerasHub 0.32 reads other families in Hugging Face's form by itself. Of a BERT, it leaves a masked language model's head
random, asks for a pooler, which `BertForMaskedLM` does not have, and for `vocab.txt`, and keeps accents.
"""

import contextlib
import errno
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import kagglehub
import keras
import keras_hub
import numpy as np
from safetensors import SafetensorError, safe_open

from keras_replicas import UserError, is_chief

from .sizes import dimensions

POSITION_SCALE = 0.14  # amplitude: a root mean square of 0.1, five times that of BERT's initial token embeddings
ADAPTERS = "adapters.lora.h5"
DECODER_BIAS = "cls.predictions.bias"  # the decoder's kernel is the token embedding
# Parts of the names of a BERT's weights: KerasHub's, and those of Hugging Face's form, to be replaced in this order.
NAMES = {
    "token_embedding": "bert.embeddings.word_embeddings",
    "position_embedding": "bert.embeddings.position_embeddings",
    "segment_embedding": "bert.embeddings.token_type_embeddings",
    "embeddings_layer_norm": "bert.embeddings.LayerNorm",
    "pooled_dense": "bert.pooler.dense",
    "mlm_head/output_bias": DECODER_BIAS,
    "mlm_head/intermediate_dense": "cls.predictions.transform.dense",
    "mlm_head/intermediate_layer_norm": "cls.predictions.transform.LayerNorm",
    "transformer_layer_": "bert.encoder.layer.",
    "self_attention_layer_norm": "attention.output.LayerNorm",
    "self_attention_layer/attention_output": "attention.output.dense",
    "self_attention_layer": "attention.self",
    "feedforward_intermediate_dense": "intermediate.dense",
    "feedforward_output_dense": "output.dense",
    "feedforward_layer_norm": "output.LayerNorm",
} | {"/embeddings": ".weight", "/kernel": ".weight", "/gamma": ".weight", "/beta": ".bias", "/": "."}


def masked_lm_from_size(
    size: str, tokenizer: keras_hub.models.Tokenizer, dropout: float, seq_length: int
) -> keras_hub.models.MaskedLM:
    """A BERT, or for a `RobertaTokenizer` a RoBERTa, with random weights, uncompiled; see `backbone_from_size`."""
    roberta = isinstance(tokenizer, keras_hub.models.RobertaTokenizer)
    task = keras_hub.models.RobertaMaskedLM if roberta else keras_hub.models.BertMaskedLM
    backbone = backbone_from_size(task.backbone_cls, size, tokenizer.vocabulary_size(), dropout, seq_length)
    return _without_pooler(task(backbone, compile=False))


def masked_lm_from_preset(preset: str, dropout: float = 0.0, dtype: str | None = None) -> keras_hub.models.MaskedLM:
    """A BERT or RoBERTa with the weights of a preset, uncompiled, in a Keras dtype policy; None for the current one.

    KerasHub's presets need not have a masked language model's head: it is then random. Raises a UserError when there is
    no such preset, it cannot be fetched, or it is of another kind.
    """
    models, options = keras_hub.models, {"dropout": dropout, "dtype": dtype, "load_weights": False}
    if huggingface_type(preset):
        model = models.BertMaskedLM(from_preset(models.BertBackbone, preset, **options), compile=False)
        read_weights(model, preset)
    else:
        backbone = from_preset(models.Backbone, preset, **options)
        model = from_preset(models.MaskedLM, preset, backbone=backbone, preprocessor=None, compile=False)
    return _without_pooler(model)


def _without_pooler(model: keras_hub.models.MaskedLM) -> keras_hub.models.MaskedLM:
    if isinstance(model, keras_hub.models.BertMaskedLM):
        model.backbone.pooled_dense.trainable = False  # it takes no part here: its weights would have no gradient
    return model


def backbone_from_size(kind: Any, size: str, vocabulary_size: int, dropout: float, seq_length: int) -> Any:
    """A `BertBackbone`, `RobertaBackbone` or `GPT2Backbone` of a size, with random weights and at least 512 positions.

    Its position embeddings, trained like all weights, begin as the sinusoids of Vaswani et al. 2017, arXiv:1706.03762,
    section 3.5. With these, one rotation leads to a token's neighbour, the same at every position; starting from BERT's
    noise, each position has to be learned by itself.
    """
    positions, sizes = max(512, seq_length), dimensions(size)
    backbone = kind(vocabulary_size=vocabulary_size, **sizes, dropout=dropout, max_sequence_length=positions)
    (table,) = [v for v in backbone.trainable_variables if v.path.endswith("position_embedding/embeddings")]
    table.assign(POSITION_SCALE * sinusoids(*table.shape))
    return backbone


def sinusoids(positions: int, width: int) -> np.ndarray:
    """Sines, then cosines, of every position, with wavelengths from 2 pi to 20,000 pi positions; [positions, width]."""
    angles = np.arange(positions)[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :width]


def enable_lora(backbone: keras_hub.models.Backbone, rank: int) -> None:
    """Freezes a backbone but for adapters of this rank, added to the attention's query and value kernels.

    They are those of Hu et al. 2021, arXiv:2106.09685. Raises a UserError when KerasHub has none for the backbone.
    """
    backbone.enable_lora(rank)
    for variable in backbone.trainable_variables:  # not the biases beside them: a file of adapters has none
        variable.trainable = variable.name.startswith("lora_")
    if not backbone.trainable_variables:
        raise UserError(f"KerasHub has no LoRA for a {type(backbone).__name__}: train all of its weights")


def check_positions(backbone: keras_hub.models.Backbone, seq_length: int, preset: str) -> None:
    """Raises a UserError when a preset's backbone has fewer positions than a sequence has tokens."""
    if seq_length > (positions := getattr(backbone, "max_sequence_length", math.inf)):
        raise UserError(f"{seq_length} tokens are more than the {positions} positions of the preset {preset}")


def save_task(model: keras_hub.models.Task, preprocessor: keras_hub.models.Preprocessor, folder: Path) -> None:
    """Saves a preset that KerasHub loads without this project, including the preprocessor; only the chief saves.

    Adapters are merged into their kernels; by themselves, for `backbone.load_lora_weights`, they are beside these in
    `adapters.lora.h5`. Raises an OSError, `ENOSPC`, before it writes to a disk without room: h5py would crash.
    """
    if not is_chief():
        return
    needed = sum(4 * math.prod(weight.shape) for weight in model.weights) + 2**20
    if shutil.disk_usage(folder.parent).free < needed:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))
    model.preprocessor = preprocessor
    model.save_to_preset(str(folder))
    if any(weight.name.startswith("lora_") for weight in model.weights):
        model.backbone.save_lora_weights(str(folder / ADAPTERS))


@contextlib.contextmanager
def one_line(message: str, way_out: str = "") -> Iterator[None]:
    """Turns errors of KerasHub, h5py, safetensors and the file system into a UserError with this message."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, KeyError, SafetensorError) as error:
        first = str(error).splitlines()[0].removesuffix(" A preset must be a one of:")
        raise UserError(f"{message} ({first}){way_out}") from error


def from_preset(kind: Any, preset: str, **kwargs) -> Any:
    """What `kind.from_preset(preset, **kwargs)` gives; a UserError of one line when it cannot be had."""
    way_out = ". Give a KerasHub name, which needs a network on first use, or a folder made by save_to_preset"
    with one_line(f"cannot load the preset {preset}", way_out):
        return kind.from_preset(preset, **kwargs)


def get_file(preset: str, name: str) -> Path:
    """The path of a preset's file, such as `config.json`, fetched first if it is not on this machine.

    Raises a FileNotFoundError when the preset, a folder or `hf://user/name`, has no such file, and a ValueError,
    OSError or RuntimeError when there is no such preset, or it cannot be fetched.
    """
    known = keras_hub.models.Backbone.presets | keras_hub.models.Task.presets
    handle = known[preset]["kaggle_handle"] if preset in known else preset
    if handle.startswith("kaggle://"):
        return Path(kagglehub.model_download(handle.removeprefix("kaggle://"), name))
    if handle.startswith("hf://"):
        try:
            return Path(huggingface_hub.hf_hub_download(handle.removeprefix("hf://"), name))
        except huggingface_hub.errors.EntryNotFoundError as error:
            raise FileNotFoundError(f"{preset} has no {name}") from error
    if not Path(handle).is_dir():
        raise UserError(f"there is no preset {preset}")
    if not (path := Path(handle, name)).is_file():
        raise FileNotFoundError(f"{preset} has no {name}")
    return path


def load_json(preset: str, name: str = "config.json") -> dict[str, Any]:
    """What a preset's JSON file holds; errors are those of `get_file`."""
    return json.loads(get_file(preset, name).read_text(encoding="utf-8"))


def huggingface_type(preset: str) -> str:
    """The type of a model in Hugging Face's form, such as `bert`; empty in KerasHub's, or without such a preset."""
    with contextlib.suppress(ValueError, OSError, RuntimeError):  # loading it will report what is wrong
        return load_json(preset).get("model_type", "")
    return ""


def preset_tokenizer(preset: str) -> keras_hub.models.Tokenizer:
    """KerasHub's tokenizer of a preset. Raises a UserError when there is no such preset, or it has none."""
    if huggingface_type(preset) != "bert":
        return from_preset(keras_hub.models.Tokenizer, preset)
    settings: dict[str, Any] = {}
    with one_line(f"cannot load {preset}"):
        with contextlib.suppress(FileNotFoundError):  # the oldest checkpoints have vocab.txt alone
            settings = load_json(preset, "tokenizer_config.json")
        try:
            pieces = get_file(preset, "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except FileNotFoundError:  # as transformers 5 saves it
            ids = load_json(preset, "tokenizer.json")["model"]["vocab"]
            pieces = sorted(ids, key=ids.get)
    lowercase, strip = settings.get("do_lower_case", True), settings.get("strip_accents")
    strip = lowercase if strip is None else strip
    return keras_hub.models.BertTokenizer(pieces, lowercase=lowercase, strip_accents=strip)


def huggingface_weights(model: keras.Model) -> dict[str, keras.Variable]:
    """The variables of a `BertBackbone` or `BertMaskedLM` by their names in Hugging Face's form."""
    named = {}
    for variable in model.weights:
        name = variable.path
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        named[name] = variable
    return named


def read_weights(model: keras.Model, preset: str) -> bool:
    """Loads a `BertBackbone` or `BertMaskedLM` from Hugging Face's form; returns whether that has a pooler.

    If not, the model's is left as it is. Raises a UserError when other weights are missing, such as the head's.
    """
    variables = huggingface_weights(model)
    with one_line(f"cannot load {preset}"), safe_open(get_file(preset, "model.safetensors"), "numpy") as file:
        # Checkpoints that come from TensorFlow have a norm's gamma and beta; those of an encoder alone have no `bert.`
        names = {name.replace(".gamma", ".weight").replace(".beta", ".bias"): name for name in file.keys()}  # noqa: SIM118
        names |= {f"bert.{name}": own for name, own in names.items()}
        names.setdefault(DECODER_BIAS, names.get("cls.predictions.decoder.bias", ""))  # another name for the same
        if missing := [name for name in variables if not names.get(name) and ".pooler." not in name]:
            raise UserError(f"it lacks {missing[0]}: give a BERT{' with its head' * (DECODER_BIAS in variables)}")
        for name, variable in variables.items():
            if name in names:  # where a kernel is [outputs, inputs]
                tensor = file.get_tensor(names[name])
                variable.assign(np.reshape(tensor.T if variable.path.endswith("kernel") else tensor, variable.shape))
    return "bert.pooler.dense.weight" in names
