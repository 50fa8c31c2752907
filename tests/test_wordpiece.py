import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.data.wordpiece import WordPieces, load_wordpieces, train_wordpieces
from common.model.saving import keras_tokenizer
from keras_replicas.errors import UserError

ROOT = Path(__file__).parent.parent
SPECIAL = WordPieces.special
TEXTS = ["The quick brown fox jumps over the lazy dog; it wasn't impressed.", "Café naïve Zürich", "中文 text ok?", ""]


def test_a_trained_vocabulary_is_uncased_small_and_the_same_again():
    vocabulary = train_wordpieces(lambda: iter(TEXTS), 120)
    assert tuple(vocabulary.pieces[:5]) == SPECIAL and 40 < len(vocabulary.pieces) <= 120
    assert vocabulary.lowercase and len(set(vocabulary.pieces)) == len(vocabulary.pieces)
    assert train_wordpieces(lambda: iter(TEXTS), 120) == vocabulary


@pytest.mark.parametrize("train", ["common.data.wordpiece.train_wordpieces", "common.data.byte_pairs.train_byte_pairs"])
def test_training_gives_the_same_in_every_process(train, tmp_path):
    """The trainer's own ties fall by a hash table that is another one in each process."""
    module, function = train.rsplit(".", 1)
    code = (
        f"import pydoc_data.topics as t; from {module} import {function} as train;"
        "print(train(lambda: sorted(t.topics.values()), 600))"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / str(process))},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for process in range(3)
    }
    assert len(made) == 1 and len(made.pop()) > 600


def test_keras_hub_gives_the_same_ids():
    vocabulary = train_wordpieces(lambda: iter(TEXTS), 120)
    ours, theirs = vocabulary.tokenizer(), keras_tokenizer(vocabulary)
    awkward = [
        *("An UNSEEN word: fjord", "semi-colons; (brackets) & 1,234.5", "  spaces\tand\n\nempty lines \n"),
        *(
            "Crème brûlée, Ångström, e\u0301",
            "今日は良い天気 mixed中文text 한국어",
            "🙂🙃 👩‍👩‍👧 flags 🇳🇱",
            "x" * 99,
            "y" * 300,
        ),
    ]
    for text in [*TEXTS, *awkward]:
        assert ours.encode(text, add_special_tokens=False).ids == np.asarray(theirs(text)).tolist(), text


def test_only_unk_is_special_in_a_text():
    vocabulary = train_wordpieces(lambda: ["about [MASK] and [PAD] tokens"] * 3, 100)
    tokenizer = vocabulary.tokenizer()
    assert tokenizer.encode("[UNK]", add_special_tokens=False).ids == [1]
    ids = tokenizer.encode("[MASK] [PAD] [CLS] [SEP]", add_special_tokens=False).ids
    assert not {0, 2, 3, 4} & set(ids)


def test_a_vocabulary_file(tmp_path):
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join([*SPECIAL, "a"]) + "\n")
    assert load_wordpieces(file) == WordPieces([*SPECIAL, "a"], lowercase=True, strip_accents=True)
    file.write_text("\n".join([*SPECIAL, "Paris"]) + "\n")
    assert not load_wordpieces(file).lowercase
    file.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
    with pytest.raises(UserError, match=r"lacks \[MASK\]"):
        load_wordpieces(file)
    with pytest.raises(UserError, match="cannot read the vocabulary"):
        load_wordpieces(tmp_path / "missing.txt")
