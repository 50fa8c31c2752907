import json
import os
import re

import datasets
import pytest

from common.data import corpora, tables
from common.data.corpora import DOCUMENT_LIMIT, open_corpus
from common.files import HELD_OUT
from keras_replicas import UserError


def documents_of(path, *splits):
    """The documents of some splits, or of each."""
    corpus = open_corpus(str(path))
    return [text for split in splits or corpus.splits for text in corpus.splits[split]()]


def test_wikitext_folder(wikitext, tmp_path):
    corpus = open_corpus(str(wikitext))
    assert list(corpus.splits) == ["train", "validation", "test"]
    articles = list(corpus.splits["train"]())
    assert sum(article.startswith("= ") for article in articles) == 10
    assert list(corpus.splits["train"]()) == articles  # a stream can be opened again
    assert "[UNK]" in "".join(articles) and "<unk>" not in "".join(articles)
    words = (wikitext / "wiki.train.tokens").read_text().replace("<unk>", "[UNK]").split()
    assert "\n".join(articles).split() == words  # nothing is lost
    for name in ("wiki.train.tokens", "wiki.valid.tokens"):
        (tmp_path / name).write_bytes((wikitext / name).read_bytes() + b" = = A part = = \n \n Of the last article.\n")
    assert [*open_corpus(str(tmp_path)).splits] == ["train", "validation"]
    assert len(documents_of(tmp_path, "train")) == 10


def test_text_files_are_split_by_document(tmp_path):
    documents = [f"Document {i}\nhas two lines." for i in range(1000)]
    (tmp_path / "a.txt").write_text("\n\n".join(documents[:500]))
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/b.txt").write_text("\n \n\t\n".join(documents[500:]) + "\n")  # a blank line may have spaces
    validation = documents_of(tmp_path, "validation")
    assert sorted(documents_of(tmp_path)) == sorted(documents)
    assert len(validation) == pytest.approx(1000 / HELD_OUT, rel=0.3)
    (tmp_path / "deeper/b.txt").unlink()
    assert set(documents_of(tmp_path, "validation")) < set(validation)  # a document's split is its own


def test_a_long_line_becomes_documents(tmp_path):
    (tmp_path / "long.txt").write_text("word " * 20_000 + "x" * 50_000)
    documents = documents_of(tmp_path / "long.txt")
    assert max(map(len, documents)) < 1.01 * DOCUMENT_LIMIT
    words = " ".join(documents).split()
    assert words.count("word") == 20_000 and sum(map(len, words)) == 80_000 + 50_000


@pytest.mark.parametrize("name", ["a[1].txt", "what?.txt", "a*b.txt", "{a,b}.txt", "é ü.txt"])
def test_a_file_of_any_name_is_read(name, tmp_path):
    (tmp_path / name).write_text("one\n\ntwo")
    assert sorted(documents_of(tmp_path / name)) == sorted(documents_of(tmp_path)) == ["one", "two"]


def test_odd_files_are_read(tmp_path):
    folder = tmp_path / ".hidden/corpus"
    folder.mkdir(parents=True)
    paragraphs = [f"Paragraph {i} of text.\n" for i in range(200)]
    (folder / "plain.txt").write_text("\n".join(paragraphs))
    expected = documents_of(folder)
    (folder / "plain.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(p.strip() + "\r\n" for p in paragraphs).encode())
    assert documents_of(folder) == expected  # a byte order mark, and lines that end as on Windows
    (folder / "loop").symlink_to(folder)
    (folder / "dangling.txt").symlink_to(folder / "nowhere")
    os.rename(folder / "plain.txt", tmp_path / "elsewhere.txt")
    (folder / "plain.txt").symlink_to(tmp_path / "elsewhere.txt")
    assert documents_of(folder) == expected


@pytest.mark.parametrize("sentences", [600, 2000])
def test_of_a_file_without_blank_lines_a_tenth_is_held_out(sentences, tmp_path):
    lines = [
        f"This is sentence number {i} of a file with one on each line and no blank line.\n" for i in range(sentences)
    ]
    (tmp_path / "a.txt").write_text("".join(lines))
    validation = "\n".join(documents_of(tmp_path, "validation"))
    assert len(validation) == pytest.approx(len("".join(lines)) / HELD_OUT, rel=0.6)
    assert sorted("\n".join(documents_of(tmp_path)).splitlines()) == sorted("".join(lines).splitlines())


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet"])
def test_tables_are_read_by_their_column_of_text(name, tmp_path, capsys):
    texts = ["NA", *(f"Text {i}, with a comma." for i in range(99))]
    for column in ("text", "review"):
        table = datasets.Dataset.from_dict({column: texts, "n": [*range(100)]})
        options = {"sep": "\t"} if name == "a.tsv" else {}
        getattr(table, f"to_{name[2:].removesuffix('l').replace('tsv', 'csv')}")(tmp_path / name, **options)
        assert sorted(documents_of(tmp_path / name)) == sorted(texts)
    (tmp_path / "README.txt").write_text("What this is.")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/hidden.jsonl").write_text("{}" * 9999)
    assert sorted(documents_of(tmp_path)) == sorted(texts)
    size = (tmp_path / name).stat().st_size
    told = f"corpus: 1 file(s) of {size:,} bytes ({name}); not read: 1 file(s) of 13 bytes (README.txt)\n"
    assert told in capsys.readouterr().out


def test_a_row_without_text_is_a_blank_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "A."}\n{"text": null}\n{"text": "B."}\n')
    assert sorted(documents_of(tmp_path / "a.jsonl")) == ["A.", "B."]
    (tmp_path / "b.jsonl").write_text("")
    assert sorted(documents_of(tmp_path)) == ["A.", "B."] and not [*documents_of(tmp_path / "b.jsonl")]


@pytest.mark.parametrize("name", ["a.html", "a.zip", "a.txt.gz", "a.PDF"])
def test_what_is_neither_text_nor_table_is_refused(name, tmp_path):
    (tmp_path / name).write_text("text")
    with pytest.raises(UserError, match=f"{name} is neither plain text nor a table: give its text as .txt"):
        open_corpus(str(tmp_path / name))
    with pytest.raises(
        UserError,
        match=rf"has no file that ends in .txt, .* wiki.train.tokens; it has 1 file\(s\) of 4 bytes \({name}\)",
    ):
        open_corpus(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "b"\n', "JSON parse error"),
        ("a.jsonl", '{"text": "a"}\n{"text": 1}\n', "row 2 of column 'text' is 1, which is no text"),
        ("a.csv", "text\na, b\nc, d\n", ".*line 2: 2 fields, divided by ',', for 1 columns, 'text': quote texts"),
        ("a.csv", 'text\na\n"b\n', ".*a.csv, line 3: unexpected end of data, in the row that begins in line 3"),
        ("a.parquet", "PAR1", "Parquet file size is 4 bytes"),
    ],
)
def test_a_broken_table_is_named(name, content, told, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"cannot read .*{name} .{told}"):
        documents_of(tmp_path / name)


def test_what_is_here_goes_before_a_corpus_of_its_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2/a.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert documents_of("wikitext-2") == ["mine"]
    assert capsys.readouterr().out.startswith("corpus: wikitext-2 in this folder, not the corpus of that name\n")


def test_a_fingerprint_follows_every_byte(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    one, both, again = (open_corpus(str(path)).fingerprint for path in (tmp_path / "a.txt", tmp_path, tmp_path))
    (tmp_path / "b.txt").write_text("twO")
    assert len({one, both, again, open_corpus(str(tmp_path)).fingerprint}) == 3 and both == again


@pytest.mark.slow
def test_docstrings_are_english_and_validation_is_held_out():
    train, validation = documents_of("docstrings", "train"), documents_of("docstrings", "validation")
    assert sum(map(len, train)) > 2_000_000 and sum(map(len, validation)) > 150_000

    def eight_words(documents):
        for document in documents:
            for paragraph in document.splitlines():
                words = re.findall(r"\w+", paragraph.lower())
                yield from (tuple(words[i : i + 8]) for i in range(len(words) - 7))

    assert set(eight_words(train)).isdisjoint(eight_words(validation))
    paragraphs = [paragraph for document in train for paragraph in document.splitlines()]
    assert len(set(paragraphs)) == len(paragraphs)


def test_what_is_no_corpus(tmp_path):
    for name in ("wikitext2", "x" * 300):
        with pytest.raises(UserError, match="neither docstrings, wikitext-2, wikitext-103, hf://user/name, nor an"):
            open_corpus(name)
    (tmp_path / "wiki.train.tokens").write_text("text")
    with pytest.raises(UserError, match="no wiki.valid.tokens"):
        open_corpus(str(tmp_path))


@pytest.mark.parametrize(("content", "line"), [(b"good\n\ncaf\xe9", 3), (bytes(range(128)), 1)])
def test_what_is_not_text_is_named_with_its_line(content, line, tmp_path):
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "odd.txt").write_bytes(content)
    with pytest.raises(UserError, match=f"odd.txt, line {line} is not UTF-8 text; convert it"):
        documents_of(tmp_path)


def test_wikitext_as_the_hub_gives_it(monkeypatch, wikitext, tmp_path):
    """The hub cannot be reached from here: a local folder with the same rows, read by the real library."""
    assert corpora.WIKITEXT["wikitext-2"] == "hf://Salesforce/wikitext/wikitext-2-v1"
    monkeypatch.setitem(corpora.WIKITEXT, "wikitext-2", f"hf://{tmp_path}")
    splits = {"train": "train", "validation": "valid", "test": "test"}
    for split, name in splits.items():
        lines = (wikitext / f"wiki.{name}.tokens").read_text().splitlines(True)
        (tmp_path / f"{split}.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    for split in splits:
        assert documents_of("wikitext-2", split) == documents_of(wikitext, split)


def test_a_data_set_of_the_hub_is_streamed(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"text": f"Row {i} of a text.\nIts second line."} for i in range(200)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = open_corpus(f"hf://{folder}")
    train, validation = (list(corpus.splits[split]()) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(row["text"] for row in rows) and len(train) > len(validation) > 5
    assert list(corpus.splits["train"]()) == train
    assert open_corpus(f"hf://{folder}").fingerprint == corpus.fingerprint
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"words": "no text", "others": "no"}) for _ in range(9)))
    other = open_corpus(f"hf://{folder}")
    assert other.fingerprint != corpus.fingerprint
    with pytest.raises(UserError, match="it has no column 'text' of strings, only 'words', 'others'"):
        list(other.splits["train"]())


def test_the_hub_out_of_reach_says_what_to_do():
    for name, found in (("wikitext-2", "Salesforce/wikitext"), ("hf://user/name", "user/name")):
        with pytest.raises(UserError, match=f"cannot fetch {found} from the Hugging Face Hub .* give their folder"):
            open_corpus(name)
    with pytest.raises(UserError, match="the corpus hf://name must be hf://user/name or hf://user/name/configuration"):
        open_corpus("hf://name")


def test_a_text_or_a_file_that_is_read_at_once_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "MOST_OF_A_LINE", 20)
    monkeypatch.setattr(tables, "LONGEST", 50)
    for content, told in ("text\n" + "a " * 15, "has 30 characters: divide it"), ("text\r" * 11, "too long a file"):
        (tmp_path / "long.csv").write_text(content)
        with pytest.raises(UserError, match=told):
            [*open_corpus(str(tmp_path / "long.csv")).splits["train"]()]
