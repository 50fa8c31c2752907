"""Every bad input is answered by one line that names the mend, and status 2; odd input works.

The messages are printed as a table at the end of the test run (`tests/conftest.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from keras_replicas.errors import UserError
from recipes import bert_from_scratch, bert_mlm, glue_controller, glue_custom_loop, text_classifier
from tests.conftest import MESSAGES

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Things that a user may point at by mistake."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "empty.txt").write_text("")
    (folder / "binary.txt").write_bytes(bytes(range(128)) * 100)
    (folder / "latin1.txt").write_bytes("caf\xe9 ".encode("latin-1") * 100)
    (folder / "no_text").mkdir()
    (folder / "no_mask.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    for name, positions in (("preset", 64), ("untold", 512), ("mixed_up", 512)):
        (folder / name).mkdir()
        dimensions = {"max_sequence_length": positions, "vocabulary_size": 9}
        (folder / name / "config.json").write_text(json.dumps({"config": dimensions}))
    (folder / "mixed_up/assets/tokenizer").mkdir(parents=True)
    (folder / "mixed_up/tokenizer.json").write_text("{}")
    (folder / "mixed_up/assets/tokenizer/vocabulary.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n")
    (folder / "good.csv").write_text("text,stars\nfine,1\nbad,0\n")
    (folder / "said.csv").write_text("text,said\nfine,1\nawful,bad\n")
    (folder / "reviews.csv").write_text('text,stars\nfine,1\n"bad,0\n')
    (folder / "other_run").mkdir()
    (folder / "other_run/config.json").write_text(json.dumps({"recipe": "glue", "seed": 7}))
    (folder / "cjk.txt").write_text("今日は世界\n\n" * 100)
    (folder / "ascii.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n")
    (folder / "good.txt").write_text("A line of text.\n\n" * 10)
    (folder / "loop").symlink_to(folder)
    return folder


# Options, and words of the message. TensorFlow is not needed to tell.
AT_ONCE = [
    ("--batch-sise 4", "unknown option --batch-sise. The options are: --workdir --corpus"),
    ("--batch-size many", "--batch-size: invalid literal for int()"),
    ("--lr-scaling cubic", "Expected one of ('auto', 'linear', 'sqrt', 'none')"),
    ("--batch-size 0", "--batch-size must be at least 1; got 0"),
    ("--epochs 0", "--epochs must be at least 1; got 0"),
    ("--replicas -1", "--replicas must be at least 0; got -1"),
    ("--seq-length 2", "--seq-length must be at least 3; got 2"),
    ("--checkpoint-every 0", "--checkpoint-every must be at least 1; got 0"),
    ("--workdir {files}/lr[1]", "/lr[1]"),
    ("--workdir {files}/what?", "--workdir must be a path without [ ] * ? \\, which TensorFlow reads as a"),
    ("--max-steps -5", "--max-steps must be at least 0; got -5"),
    ("--seed 4294967296", "--seed must be at most 4294967295; got 4294967296"),
    ("--max-steps 1000000000000000000000000000000", "--max-steps must be at most 2147483647; got 1"),
    ("--epochs 2147483648", "--epochs must be at most 2147483647; got 2147483648"),
    ("--batch-size 1000000000000", "--batch-size must be at most 1048576; got 1"),
    ("--batch-size 1000000000000 --accumulate 7", "--batch-size must be at most 1048576; got 1"),
    ("--seq-length 1000000000", "--seq-length must be at most 65536; got 1"),
    ("--replicas 1000000000", "--replicas must be at most 1024; got 1"),
    ("--vocabulary-size 1000000000000000000000", "--vocabulary-size must be at most 2147483647; got 1"),
    ("--learning-rate nan", "--learning-rate must be a finite number, 0 or more; got nan"),
    ("--learning-rate inf", "--learning-rate must be a finite number, 0 or more; got inf"),
    ("--mask-rate 0", "--mask-rate must be above 0; got 0"),
    ("--mask-rate 1.5", "--mask-rate must be in [0, 1); got 1.5"),
    ("--precision fp8", "Expected one of ('auto', 'float32', 'mixed_bfloat16', 'mixed_float16')"),
    (
        "--accumulate 3",
        "--accumulate 3 does not divide the batch of 16 on each replica. Choose one of 1, 2, 4, 8, 16",
    ),
    ("--optimizer adam", "Expected one of ('muon', 'adamw', 'sgd')"),
    ("--profile-steps 9-3", "--profile-steps must be a range of steps, such as 10-20; got 9-3"),
    (
        "--corpus missing.txt",
        "neither docstrings, wikitext-2, wikitext-103, hf://user/name, nor an existing file or folder",
    ),
    ("--corpus {files}/empty.txt", "there is no text in"),
    ("--corpus {files}/binary.txt", "is a binary file, not text"),
    ("--corpus {files}/latin1.txt", "is not UTF-8 text (invalid continuation byte at byte 3); convert it first"),
    ("--corpus /dev/null", "nor an existing file or folder"),
    ("--corpus {files}/no_text", "no .txt file and no wiki.train.tokens in the folder"),
    ("--vocabulary missing.txt", "cannot read the vocabulary missing.txt"),
    ("--vocabulary {files}/no_mask.txt", "lacks [MASK]; give a BERT WordPiece file"),
    ("--preset {files}/no_text", "is not a preset of a language model; give a folder made by save_to_preset"),
    ("--preset {files}/preset --seq-length 128", "--seq-length 128 is more than the 64 positions of the preset"),
    ("--workdir {files} --preset {files}/preset", "/preset is inside the work directory"),
    ("--workdir {files} --corpus {files}/loop/good.txt", "/good.txt is inside the work directory"),
    ("--corpus {files} --workdir {files}/loop/run", "a run's too. Give a --workdir outside it"),
    ("--corpus=", "--corpus is empty: name one, or leave it out"),
    ("--workdir=", "--workdir is empty: name one, or leave it out"),
    ("--workdir {files}/loop --vocabulary {files}/no_mask.txt", "Give another --workdir"),
    ("--preset bert_tiny_en_uncased --model base", "leave out --model, or --preset"),
    ("--preset bert_tiny_en_uncased --vocabulary v.txt", "leave out --vocabulary, or --preset"),
]

# The same for both recipes that fine-tune; tests/test_glue.py has what can be wrong in their files.
GLUE = [
    ("--task wnli", "Expected one of ('roles', 'cola', 'mrpc', 'qnli', 'rte', 'sst2', 'stsb', 'own')"),
    ("--task mrpc --regression", "--regression is for your own files: give --task own, or leave it out"),
    (
        "--task own --data {files}/said.csv --text-columns text --label-column said --regression",
        'said.csv, line 3: said must be a number from -1e12 to 1e12; got "bad"',
    ),
    ("--task mrpc --data missing", "there is no folder missing"),
    ("--task own --data {files}/reviews.csv", "give --text-columns and --label-column"),
    (
        "--task own --data {files}/good.csv --text-columns title --label-column stars",
        "has no column title; it has text, stars",
    ),
    ("--task own --data {files}/reviews.csv --text-columns text --label-column stars", "reviews.csv, line 3: "),
    ("--workdir {files} --task own --data {files}/good.csv", "/good.csv is inside the work directory"),
    ("--preset {files}/untold", "has no tokenizer.json, the tokenizer its model was trained with"),
    ("--preset {files}/mixed_up", "has 6 tokens, but the preset's model has a vocabulary size of 9: they do"),
    ("--preset {files}/preset --seq-length 128", "--seq-length 128 is more than the 64 positions of the preset"),
    ("--preset bert_tiny_en_uncased --model base", "leave out --model, or --preset"),
]

# The same for bert_from_scratch.
FROM_SCRATCH = [
    ("--shards -1", "--shards must be at least 0; got -1"),
    ("--shards 65537", "--shards must be at most 65536; got 65537"),
    ("--vocabulary-size 260 --architecture roberta", "must be at least 261: 256 bytes, 5 special tokens; got 260"),
    ("--model huge", "--model huge is neither nano, tiny, mini, small, medium, base, large, nor a JSON file"),
    ("--model {files}/preset/config.json", "must have exactly these keys, with positive integers: num_layers"),
    ("--workdir {files} --data {files}/shards", "/shards is inside the work directory"),
    ("--workdir {files} --data {files}/data --shards -2", "--shards must be at least 0; got -2"),
    ("--push-public", "--push-public needs --push-to hf://user/name; give"),
    ("--push-to someone/bert", "--push-to must be hf://user/name, a model on the Hugging Face Hub"),
    ("--corpus hf://name", "--corpus hf://name must be hf://user/name or hf://user/name/configuration"),
    ("--corpus hf://user/name", "cannot fetch user/name from the Hugging Face Hub"),
]

# The same, where TensorFlow or the text must have been looked at first.
LATER = [
    (
        "--preset bert_tinny_en",
        "cannot load the preset bert_tinny_en (Unknown preset identifier.). Give a KerasHub name",
    ),
    ("--preset bert_tiny_en_uncased", "Give a KerasHub name, which needs a network on first use, or a folder"),
    ("--corpus wikitext-2", "cannot fetch Salesforce/wikitext from the Hugging Face Hub"),
    ("--corpus {files}/good.txt", "too few for a global batch of 32. Give more data, or a smaller --batch-size"),
    ("--corpus {files}/cjk.txt --vocabulary {files}/ascii.txt", "the vocabulary has none of the text's words. Give"),
    ("--workdir {files}/good.txt/run", "cannot write to the folder"),
    ("--workdir {files}/good.txt --corpus {files}/good.txt", "cannot write to the folder"),
    ("--workdir {files}/other_run --overwrite", "other_run holds config.json, but no run: give another folder"),
]


# Runs the recipe's file once for each list of words, in one process; prints status, output and errors of each.
EACH_IN_TURN = """
import contextlib, io, json, runpy, sys
file = sys.argv[1]
for words in json.load(sys.stdin):
    sys.argv = [file, *words]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = runpy.run_path(file, run_name="__main__") and 0
        except SystemExit as end:
            status = end.code
    told = [stream.flush() or stream.buffer.getvalue().decode() for stream in (out, err)]
    print(json.dumps([status, *told]))
"""


def test_a_mistake_is_told_before_tensorflow_is_imported(files, tmp_path, no_tensorflow):
    given = [["--workdir", "run", *words.format(files=files).split()] for words, _ in AT_ONCE]
    done = subprocess.run(
        [sys.executable, "-c", EACH_IN_TURN, str(ROOT / "recipes/bert_mlm.py")],
        input=json.dumps(given),
        cwd=tmp_path,
        env=no_tensorflow | {"PYTHONPATH": f"{no_tensorflow['PYTHONPATH']}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for (words, message), answer in zip(AT_ONCE, done.stdout.splitlines(), strict=True):
        status, out, err = json.loads(answer)
        assert (status, out, err.count("\n")) == (2, "", 1) and message in err, (words, err)
        MESSAGES.append((words.format(files="F"), err.strip().replace(str(files), "F")))
    assert not list(tmp_path.iterdir())  # nothing half-written


READ = [
    (recipe, words, message)
    for recipe, mistakes in (
        (bert_from_scratch, FROM_SCRATCH),
        (glue_controller, GLUE),
        (glue_custom_loop, GLUE[:2]),
        (text_classifier, GLUE[:2]),
    )
    for words, message in mistakes
]


@pytest.mark.parametrize(("recipe", "words", "message"), READ, ids=[f"{r.__name__} {words}" for r, words, _ in READ])
def test_a_mistake_is_told_when_the_options_are_read(recipe, words, message, files, capsys):
    try:
        tyro.cli(recipe.Config, args=words.format(files=files).split())
    except UserError as error:
        told = str(error)
    except SystemExit:  # tyro's own word
        told = " ".join(line.strip("│ ") for line in capsys.readouterr().err.splitlines())
        assert message in told
        return
    assert message in told and "\n" not in told
    MESSAGES.append((words.format(files="F"), told.replace(str(files), "F")))


@pytest.mark.parametrize(("words", "message"), LATER, ids=[words for words, _ in LATER])
def test_a_mistake_is_told_before_training(words, message, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        bert_mlm.train_and_evaluate(bert_mlm.parse(bert_mlm.Config, "", words.format(files=files).split()))
    assert message in str(error.value) and "\n" not in str(error.value)
    MESSAGES.append((words.format(files="F"), str(error.value).replace(str(files), "F")))


def text_of(split, folder):
    return "\n".join(bert_mlm.open_corpus(str(folder))[split]())


def test_odd_files_are_read(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    paragraphs = [f"Paragraph {i} of text.\n" for i in range(200)]
    (folder / "plain.txt").write_text("\n".join(paragraphs))
    expected = {split: text_of(split, folder) for split in ("train", "validation")}

    (folder / "plain.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(p.strip() + "\r\n" for p in paragraphs).encode())
    assert {split: text_of(split, folder) for split in ("train", "validation")} == expected
    MESSAGES.append(("BOM, CRLF", "works: the same text"))

    (folder / "loop").symlink_to(folder)
    (folder / "dangling.txt").symlink_to(folder / "nowhere")
    os.rename(folder / "plain.txt", tmp_path / "elsewhere.txt")
    (folder / "plain.txt").symlink_to(tmp_path / "elsewhere.txt")
    assert {split: text_of(split, folder) for split in ("train", "validation")} == expected
    MESSAGES.append(("symbolic links, a loop, a dangling one", "works: read once, the dangling one left out"))


@pytest.mark.slow
def test_emoji_and_cjk_can_be_trained_on(tmp_path, small):
    text = "\n\n".join(f"今日は {i} 日 🙂🙃 naïve 中文 text" for i in range(3000))
    (tmp_path / "odd.txt").write_text(text)
    results = bert_mlm.train_and_evaluate(
        bert_mlm.Config(**small | {"corpus": str(tmp_path / "odd.txt"), "max_steps": 2})
    )
    assert results["steps"] == 2
    MESSAGES.append(("emoji, CJK", "works"))


def test_ten_thousand_files(tmp_path):
    for i in range(10_000):
        (tmp_path / f"{i}.txt").write_text(f"File number {i}.")
    assert len((text_of("train", tmp_path) + "\n" + text_of("validation", tmp_path)).splitlines()) == 10_000
    MESSAGES.append(("10,000 small files", "works"))


PEAK_MEMORY = """
import resource, sys
from common.data.corpora import open_corpus
from common.run.command_line import quiet_stderr
from common.data.wordpiece import train_wordpieces
with quiet_stderr():
    from common.data.packing import make_sequences

documents = open_corpus(sys.argv[1])["train"]
vocabulary = train_wordpieces(documents, 100)
tokens = make_sequences(documents, vocabulary, 128, pack=True).numpy().nbytes
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - 2 * tokens)
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Vocabulary and tokens of one line of 50 MB, and of one of 5 MB, in processes of their own."""
    words = ["it", "was", "the", "best", "of", "times", "it", "was", "the", "worst", "of", "times"]
    peaks = []
    for megabytes in (5, 50):
        file = tmp_path / f"{megabytes}.txt"
        file.write_text(" ".join(words * (megabytes * 2**20 // 51)))
        peak = subprocess.check_output([sys.executable, "-c", PEAK_MEMORY, str(file)], cwd=ROOT, text=True)
        peaks.append(int(peak) / 2**20)
    # The line itself is read whole, more than once; its tokens are not.
    MESSAGES.append(("one line of 50 MB", f"works: peak {peaks[1]:.0f} MB; {peaks[0]:.0f} MB for one of 5 MB"))
    assert peaks[1] - peaks[0] < 300
