import os
import unicodedata

import keras_hub
import numpy as np
import pytest

from common.data import vocabulary as vocabulary_module
from common.data.byte_pairs import BYTE_PAIR_TOKENS, train_byte_pairs
from common.data.vocabulary import WORDPIECE_TOKENS, encode, load_wordpieces, train_wordpieces
from keras_replicas import UserError
from tests.conftest import python

TEXTS = ["The quick brown fox jumps over the lazy dog; it wasn't impressed.", "In 2024 foo(bar) was 12345.6 </s>", ""]
# Also for test_huggingface.py.
AWKWARD = [
    "",
    " \t \n",
    "Crème brûlée, naïve coöperation, Ångström, e\u0301 and é, İstanbul, straße",
    "今日は良い天気 mixed中文text 한국어 ไทย",
    "🙂🙃 👩‍👩‍👧 flags 🇳🇱",
    "  spaces\tand\n\nempty lines \n",
    "x" * 100 + " " + "y" * 101 + " Donaudampfschifffahrtsgesellschaftskapitän",
    "don't self.attr __init__ a-b 1,000.5 $x += y**2; \u200bzero\u00a0width\u3000wide\x07 bell \ufffd",
    "an UNSEEN word",
    "ﬁne ＡＢＣ Ⅳ ½ 5² ㈱ ㎏ a…b … x⒫y !? ᾳδω ΣΑΣ ẞ É ❤\ufe0f a❤\ufe0fb 👩\u200d👩 so\u00adft 今\u3000日 ´x é",
    *(letter * count for letter, count in [("é", 51), ("ก", 33), ("ก", 34)]),
]


def ids_of(texts, tokenizer):
    return [ids.tolist() for ids in encode(texts, tokenizer)]


@pytest.fixture(scope="module")
def wordpieces():
    return train_wordpieces(lambda: iter(TEXTS * 3), "texts", 120)


@pytest.fixture(scope="module")
def byte_pairs():
    return train_byte_pairs(lambda: iter(TEXTS * 3), "texts", 400)


def test_trained_word_pieces_are_uncased_and_few(wordpieces):
    pieces = wordpieces.get_vocabulary()
    assert pieces[:5] == [*WORDPIECE_TOKENS] and 40 < len(pieces) <= 120 and len(set(pieces)) == len(pieces)
    assert wordpieces.lowercase and ids_of(["THE LAZY DOG"], wordpieces) == ids_of(["the lazy dog"], wordpieces)


def test_trained_byte_pairs_begin_with_robertas_special_tokens(byte_pairs):
    pieces = [byte_pairs.id_to_token(number) for number in range(byte_pairs.vocabulary_size())]
    assert pieces[:5] == [*BYTE_PAIR_TOKENS] and 261 < len(pieces) <= 400 and len(set(pieces)) == len(pieces)
    assert not {*BYTE_PAIR_TOKENS} & {merge.replace(" ", "") for merge in byte_pairs.merges}


# Of the Universal Declaration of Human Rights, article 1.
SCRIPTS = {
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "Japanese": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "Vietnamese": "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền.",
    "Chinese": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "Arabic": "يولد جميع الناس أحراراً متساوين في الكرامة والحقوق.",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_script_loses_a_character(script):
    text = unicodedata.normalize("NFC", SCRIPTS[script])
    tokenizer = train_wordpieces(lambda: iter([text] * 3), f"script {script}", 400)
    ids = ids_of([text], tokenizer)[0]
    assert 1 not in ids
    shown = "".join(tokenizer.id_to_token(number).removeprefix("##") for number in ids)
    assert unicodedata.normalize("NFKC", shown) == unicodedata.normalize("NFKC", text).lower().replace(" ", "")


def test_accents_are_stripped_where_they_are_few_and_a_size_holds_for_many_characters():
    assert train_wordpieces(lambda: iter(["It is a café. " + "There are few. " * 99]), "few", 120).strip_accents
    assert train_wordpieces(lambda: iter(SCRIPTS.values()), "many", 100).vocabulary_size() <= 100


@pytest.mark.parametrize("train", [train_wordpieces, train_byte_pairs])
@pytest.mark.usefixtures("cache")
def test_a_vocabulary_is_trained_once(train):
    opened = []

    def documents():
        opened.append(1)
        return iter(TEXTS)

    first, number = train(documents, "a", 300), len(opened)
    assert train(documents, "a", 300).get_vocabulary() == first.get_vocabulary() and len(opened) == number
    train(documents, "b", 300)
    assert train(documents, "a", 299).vocabulary_size() <= 299
    assert len(opened) == 3 * number


@pytest.mark.slow
@pytest.mark.parametrize(("module", "train"), [("vocabulary", "train_wordpieces"), ("byte_pairs", "train_byte_pairs")])
def test_training_gives_the_same_in_every_process(module, train, tmp_path):
    """The trainer's own ties fall by a hash table that is another one in each process."""
    code = (
        f"import pydoc_data.topics as t; from common.data.{module} import {train} as train;"
        "print(train(lambda: sorted(t.topics.values()), 'topics', 600).get_vocabulary())"
    )
    environments = [{"XDG_CACHE_HOME": str(tmp_path / seed), "PYTHONHASHSEED": seed} for seed in "12"]
    made = {python("-c", code, env=os.environ | each).stdout for each in environments}
    assert len(made) == 1 and len(made.pop()) > 600


@pytest.mark.parametrize("kind", ["wordpieces", "byte_pairs"])
def test_encode_gives_the_ids_of_keras_hub(kind, request):
    tokenizer = request.getfixturevalue(kind)
    texts = [*TEXTS, *AWKWARD]
    for text, ids in zip(texts, encode(texts, tokenizer), strict=True):
        assert ids.dtype == np.int32 and ids.tolist() == np.asarray(tokenizer(text)).tolist(), text
        assert kind == "wordpieces" or tokenizer.detokenize(ids) == text  # nothing is lost


def test_the_ids_come_in_order_and_few_texts_are_held(wordpieces, monkeypatch):
    monkeypatch.setattr(vocabulary_module, "TEXTS_AT_ONCE", 4)
    taken = []

    def texts():
        for number in range(1000):
            taken.append(number)
            yield f"{number % 50} fox" * (number % 7)

    found = encode(texts(), wordpieces)
    next(found)
    assert len(taken) <= 4 * ((os.cpu_count() or 1) + 2)
    assert len([*found]) == 999
    assert ids_of(texts(), wordpieces) == [np.asarray(wordpieces(text)).tolist() for text in texts()][:1000]
    assert ids_of([], wordpieces) == []


def test_of_special_tokens_only_unk_is_one_in_a_text(wordpieces, byte_pairs):
    unknown, named, word = ids_of(["[UNK]", "[MASK] [PAD] [CLS] [SEP]", "the"], wordpieces)
    assert unknown == [1] and not {0, 2, 3, 4} & {*named}
    assert ids_of(["the [UNK] the"], wordpieces) == [[*word, 1, *word]]
    assert byte_pairs.detokenize(ids_of(["the [UNK]"], byte_pairs)[0]) == "the [UNK]"


def test_a_vocabulary_file(tmp_path):
    file = tmp_path / "vocab.txt"
    pieces = [*WORDPIECE_TOKENS, "[ENT]", "a", "##b", "e"]
    for ending in ("\n", "\r\n"):
        file.write_bytes(("\ufeff" * (ending != "\n") + ending.join(pieces) + ending).encode())
        tokenizer = load_wordpieces(file)
        assert tokenizer.get_vocabulary() == pieces and tokenizer.lowercase and tokenizer.strip_accents
    file.write_text("\n".join([*WORDPIECE_TOKENS, "[unused1]", "Paris"]))
    assert isinstance(load_wordpieces(file), keras_hub.models.BertTokenizer) and not load_wordpieces(file).lowercase


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[PAD]\n[UNK]\n[CLS]\na\n", r"vocab.txt lacks \[SEP\] \[MASK\]; give a BERT WordPiece file"),
        ("\n".join([*WORDPIECE_TOKENS, "a", "b", "a"]).encode(), "vocab.txt, line 8 repeats 'a' of line 6"),
        ("\n".join([*WORDPIECE_TOKENS, "a", "\u2028"]).encode(), "vocab.txt, line 7 is empty or ends with a space"),
        (b"caf\xe9", "cannot read the vocabulary .*vocab.txt "),
        (None, "cannot read the vocabulary .*vocab.txt "),
    ],
)
def test_a_file_that_is_no_vocabulary(content, told, tmp_path):
    if content is not None:
        (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(UserError, match=told):
        load_wordpieces(tmp_path / "vocab.txt")
