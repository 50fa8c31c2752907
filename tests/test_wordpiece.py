import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.command_line import UserError
from common.models import masked_lm_preprocessor
from common.wordpiece import SPECIAL_TOKENS, Vocabulary, load_vocabulary, make_tokenizer, train_vocabulary

ROOT = Path(__file__).parent.parent
TEXTS = ["The quick brown fox jumps over the lazy dog; it wasn't impressed.", "Café naïve Zürich", "中文 text ok?", ""]


def test_a_trained_vocabulary_is_uncased_small_and_the_same_again():
    vocabulary = train_vocabulary(lambda: iter(TEXTS), 120)
    assert tuple(vocabulary.pieces[:5]) == SPECIAL_TOKENS and 40 < len(vocabulary) <= 120
    assert vocabulary.lowercase and len(set(vocabulary.pieces)) == len(vocabulary)
    assert train_vocabulary(lambda: iter(TEXTS), 120) == vocabulary


def test_training_gives_the_same_in_every_process(tmp_path):
    """The trainer's own ties fall by a hash table that is another one in each process."""
    code = (
        "import pydoc_data.topics as t; from common.wordpiece import train_vocabulary;"
        "print(train_vocabulary(lambda: sorted(t.topics.values()), 600).pieces)"
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
    vocabulary = train_vocabulary(lambda: iter(TEXTS), 120)
    ours, theirs = make_tokenizer(vocabulary), masked_lm_preprocessor(vocabulary, 32).tokenizer
    for text in [*TEXTS, "An UNSEEN word: fjord", "semi-colons; (brackets) & 1,234.5", "  spaces\tand\nlines "]:
        assert ours.encode(text, add_special_tokens=False).ids == np.asarray(theirs(text)).tolist(), text


def test_only_unk_is_special_in_a_text():
    vocabulary = train_vocabulary(lambda: ["about [MASK] and [PAD] tokens"] * 3, 100)
    tokenizer = make_tokenizer(vocabulary)
    assert tokenizer.encode("[UNK]", add_special_tokens=False).ids == [1]
    ids = tokenizer.encode("[MASK] [PAD] [CLS] [SEP]", add_special_tokens=False).ids
    assert not {0, 2, 3, 4} & set(ids)


def test_a_vocabulary_file(tmp_path):
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join([*SPECIAL_TOKENS, "a"]) + "\n")
    assert load_vocabulary(file) == Vocabulary([*SPECIAL_TOKENS, "a"], lowercase=True, strip_accents=True)
    file.write_text("\n".join([*SPECIAL_TOKENS, "Paris"]) + "\n")
    assert not load_vocabulary(file).lowercase
    file.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
    with pytest.raises(UserError, match=r"lacks \[MASK\]"):
        load_vocabulary(file)
    with pytest.raises(UserError, match="cannot read the vocabulary"):
        load_vocabulary(tmp_path / "missing.txt")
