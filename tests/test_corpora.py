import re
import subprocess
import sys

import datasets
import pytest

from common.data.corpora import DOCUMENT_LIMIT, HELD_OUT, open_corpus
from keras_replicas.errors import UserError


def test_wikitext_folder(wikitext):
    corpus = open_corpus(str(wikitext))
    assert list(corpus) == ["train", "validation", "test"]
    articles = list(corpus["train"]())
    assert sum(article.startswith("= ") for article in articles) == 24
    assert list(corpus["train"]()) == articles  # a stream can be opened again
    assert "[UNK]" in "".join(articles) and "<unk>" not in "".join(articles)
    words = (wikitext / "wiki.train.tokens").read_text().replace("<unk>", "[UNK]").split()
    assert "\n".join(articles).split() == words  # nothing is lost


def test_wikitext_folder_without_a_test_split(wikitext, tmp_path):
    for name in ("wiki.train.tokens", "wiki.valid.tokens"):
        (tmp_path / name).write_bytes((wikitext / name).read_bytes())
    assert list(open_corpus(str(tmp_path))) == ["train", "validation"]


def test_text_files_are_split_by_document(tmp_path):
    documents = [f"Document {i}\nhas two lines." for i in range(1000)]
    (tmp_path / "a.txt").write_text("\n\n".join(documents[:500]))
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/b.txt").write_text("\n \n\n".join(documents[500:]) + "\n")
    corpus = open_corpus(str(tmp_path))
    train, validation = list(corpus["train"]()), list(corpus["validation"]())
    assert sorted(train + validation) == sorted(documents)
    assert len(validation) == pytest.approx(1000 / HELD_OUT, rel=0.3)
    (tmp_path / "deeper/b.txt").unlink()
    assert set(open_corpus(str(tmp_path))["validation"]()) < set(validation)  # a document's split is its own


def test_a_long_line_becomes_documents(tmp_path):
    text = "word " * 20_000
    (tmp_path / "long.txt").write_text(text)
    corpus = open_corpus(str(tmp_path / "long.txt"))
    documents = [*corpus["train"](), *corpus["validation"]()]
    assert max(map(len, documents)) <= DOCUMENT_LIMIT
    assert sum(len(document.split()) for document in documents) == 20_000


@pytest.mark.slow
def test_docstrings_are_english_and_validation_is_held_out():
    corpus = open_corpus("docstrings")
    train, validation = list(corpus["train"]()), list(corpus["validation"]())
    assert sum(map(len, train)) > 2_000_000 and sum(map(len, validation)) > 150_000

    def eight_words(documents):
        for document in documents:
            for paragraph in document.splitlines():
                words = re.findall(r"\w+", paragraph.lower())
                yield from (tuple(words[i : i + 8]) for i in range(len(words) - 7))

    assert set(eight_words(train)).isdisjoint(eight_words(validation))
    paragraphs = [paragraph for document in train for paragraph in document.splitlines()]
    assert len(set(paragraphs)) == len(paragraphs)


@pytest.mark.slow
def test_docstrings_are_read_without_importing_the_packages():
    code = (
        "import sys; from common.data.corpora import open_corpus as o; o('docstrings'); print('keras' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_what_is_no_corpus(tmp_path):
    with pytest.raises(UserError, match="neither docstrings, wikitext-2"):
        open_corpus("wikitext2")
    with pytest.raises(UserError, match="no .txt file"):
        open_corpus(str(tmp_path))
    (tmp_path / "wiki.train.tokens").write_text("text")
    with pytest.raises(UserError, match="no wiki.valid.tokens"):
        open_corpus(str(tmp_path))
    (tmp_path / "latin1.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        list(open_corpus(str(tmp_path / "latin1.txt"))["train"]())


def test_wikitext_as_the_hub_gives_it(monkeypatch, wikitext):
    """The hub cannot be reached from here: the rows are the library's own, their text that of the local files."""
    splits = {"train": "train", "validation": "valid", "test": "test"}
    rows = {
        split: datasets.Dataset.from_dict({"text": (wikitext / f"wiki.{name}.tokens").read_text().splitlines(True)})
        for split, name in splits.items()
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda *words, streaming: datasets.DatasetDict(rows))
    hub, local = open_corpus("wikitext-2"), open_corpus(str(wikitext))
    assert list(hub) == list(local)
    for split in local:
        assert list(hub[split]()) == list(local[split]())


def test_the_hub_out_of_reach_says_what_to_do():
    with pytest.raises(UserError, match="cannot fetch Salesforce/wikitext .* --corpus FOLDER"):
        open_corpus("wikitext-2")
