"""The arithmetic of the benchmarks, and that they run; their figures are measured by hand, on a quiet machine."""

import argparse
import importlib
import json
import os
import subprocess
import sys

import pytest

import benchmarks.input
from benchmarks import (
    causal,
    compare,
    fine_tuning,
    peers,
    quality,
    scaling,
    techniques,
    throughput,
    trainer_tests,
)
from benchmarks import machine as machine_module
from benchmarks.hosts import ADDRESSES, on, shape, two_hosts
from benchmarks.machine import machine
from benchmarks.readme import MEASURED
from benchmarks.workers import Worker, together
from common.data.roles import role_pairs
from common.data.wordpiece import train_wordpieces
from common.model.export import export_bert
from common.model.masked_lm import masked_lm_from_size
from common.model.saving import save_preset
from common.run.speed import flops_per_token
from keras_replicas.errors import UserError
from tests.conftest import ROOT


def matmul_flops(*shapes):
    return sum(2 * rows * inner * columns for rows, inner, columns in shapes)


def test_flops_are_those_of_every_matrix_product_of_a_small_bert():
    length, width, inner, vocabulary_size, masked = 20, 64, 256, 500, 3  # nano: one layer, one head of 64
    forward = matmul_flops(
        *[(length, width, width)] * 4,  # query, key, value, output
        (length, width, length),  # scores
        (length, length, width),  # mean of the values
        (length, width, inner),
        (length, inner, width),
        (masked, width, width),  # the head
        (masked, width, vocabulary_size),
    )
    assert flops_per_token(64, 256, 1, vocabulary_size, length, masked / length) * length == pytest.approx(3 * forward)


def test_flops_of_tiny_are_those_known():
    # 55 GFLOP for 70 sequences of 128, counted by another hand.
    assert flops_per_token(128, 512, 2, 30_522, 128, 0.15) * 70 * 128 == pytest.approx(56e9, rel=0.01)


def sample_scaling():
    way = {"tokens_per_second": [1e4, 2e4, 3e4], "step_ms": [1.0]}
    seconds = {"computation": [0.3, 0.2], "reduction": [0.5], "before": [0.8], "step": [0.6]}
    row = {"bytes": 17_600_000, "sent": 18e6} | seconds
    return {
        "before": "abc",
        "ways": {"float32": dict.fromkeys(("one device", "2 replicas", "2 workers"), way)},
        "links": [row | {"megabits": megabits} for megabits in (None, 400)],
    }


NAMES = [name for name, *_ in fine_tuning.CONTENDERS]


def sample_results():
    row = {"precision": "float32", "batch": 32, "step_ms": [1.0], "mfu": 0.5}
    names = [name for name, *_ in throughput.CONTENDERS]
    contenders = {name: row | {"tokens_per_second": [1e3 * i, 2e3 * i]} for i, name in enumerate(names, 1)}
    peaks = {"float32": 1e11, "bfloat16": 2e11}
    answer = {"steps": 10, "seconds": 1.0, "waited": 0.01, "seconds_on_one_batch": 0.9}
    curves = {quality.PUBLISHED: [(0.0, 9.0), (600.0, 7.0), (1200.0, 6.5)], quality.OURS: [(0.0, 9.0), (120.0, 6.4)]}
    options = {"rate": 1e-3, "dropout": 0.0, "own": {}, "steps": 9}
    ours = {"accuracy": 0.8, "f1": 0.9, "seconds": 90.0}
    baselines = {f"{name}_{score}": 0.5 for name in ("bag_of_words", "majority") for score in ("accuracy", "f1")}
    speed = {name: {"examples_per_second": [10.0 * i, 12.0 * i], "padding": 0.05} for i, name in enumerate(NAMES, 1)}
    results = {
        "fine_tuning": {
            "weights_sha256": "abc",
            "speed": {"mrpc": speed},
            "scores": {"mrpc": {"transformers": [ours], "ours": [ours | baselines, ours | baselines | {"f1": 0.8}]}},
        },
        "pretraining": {
            "pretraining": json.loads((ROOT / "benchmarks/results/wikitext-2.json").read_text())["results"],
            "scores": {
                "sst2": {"from random weights": [ours | baselines], "from the preset": [ours | baselines] * 2},
            },
        },
        "causal": {
            "sizes": {
                "tiny": {
                    name: {"tokens_per_second": [1e3 * i, 2e3 * i], "peak_memory_mb": 1000 * i}
                    for i, (name, *_) in enumerate(causal.CONTENDERS, 1)
                }
            }
        },
        "throughput": {
            "sizes": {
                "tiny": {
                    "machine": machine(),
                    "pieces": 9,
                    "flops_per_token": 6e6,
                    "peak_flops": peaks,
                    "contenders": contenders,
                }
            }
        },
        "scaling": sample_scaling(),
        "peers": {
            "recipes": {
                "causal_lm": {
                    "unit": "tokens/s",
                    "speeds": {"fit": [30, 40, 60], "fit, jit": [9], "transformers": [10], "transformers, x": [20] * 3},
                }
            }
        },
        "input": {
            "pipeline": {"sequences_per_second": [1000], "tokens_per_second": [128_000]},
            "waiting": {name: [answer] for name, _ in benchmarks.input.WAYS},
        },
        "quality": {
            "model": "tiny",
            "corpus": "x",
            "runs": [options | {"side": s, "curve": c} for s, c in curves.items()],
        },
        "techniques": {"runs": [sample_run(techniques.DEFAULT.name, 0, 2.0), sample_run("AdamW", 0, 2.5)]},
        "same_steps": {
            "tasks": {
                "rte": {
                    "epochs": 4,
                    "steps": 9,
                    "loss": 1e-7,
                    "output": 2e-7,
                    "predictions": 5,
                    "equal_predictions": 4,
                }
            }
        },
        "conformance": {"rows": {"LoRA": {"1": 0.0, "2": 1e-7, "4": "leave out LoRA"}}},
    }
    return {name: result | {"machine": machine()} for name, result in results.items()}


def sample_run(technique, seed, bits):
    """A run of a technique."""
    values = {"below": 4 - bits, "processor_seconds": 10 * bits, "peak_memory_mb": 100, "curve": [9.0, 2 * bits]}
    return {"technique": technique, "seed": seed, "bits_per_character": bits} | values


@pytest.mark.parametrize("name", MEASURED)
def test_the_readme_says_what_was_measured(name):
    table = MEASURED[name](sample_results()[name])
    expected = {
        "throughput": ["| transformers, Accelerate, bfloat16 | 4,500 | 3,000 to 6,000 | 1.00 x | 3.0 x | 50.0% |"],
        "scaling": [
            "| float32 | 20,000 tokens/s | 20,000 | 100% | 20,000 | 100% |",
            "| 400 Mbit/s | 250 ms | 500 ms | 800 ms | 600 ms | 1.20 | 18.0 MB |",
        ],
        "peers": ["| `causal_lm` | 40 tokens/s: fit | 20 tokens/s: transformers, x | 2.00 x | 1.50 to 3.00 |"],
        "input": ["1,000 sequences/s", "| one device | 100.0 ms | 1.00 ms | 1.0% | +10.0% |"],
        "quality": ["ours reaches it after 120 s, 10.0 times faster"],
        "fine_tuning": [
            "| fit, one device, bfloat16 | 66.0 | 60.0 to 72.0 | 1.50 x | 5.0% |",
            "| mrpc | 1 | transformers | 0.800 | 0.900 | 1.5 |",
            "| mrpc | 2 | ours | 0.800 ± 0.000 | 0.850 ± 0.050 | 1.5 |",
            "| mrpc | | bag of words | 0.500 | 0.500 | |",
            "SHA-256: abc",
        ],
        "same_steps": ["| rte | 4 | 9 | 1.0e-07 | 2.0e-07 | 4 of 5 |"],
        "causal": ["| fit, one device | 4,500 | 3,000 to 6,000 | 1.50 x | 3,000 MiB |"],
        "pretraining": [
            "steps                13304",
            "| sst2 | 2 | from the preset | 0.800 ± 0.000 | 0.900 ± 0.000 | 1.5 |",
        ],
        "techniques": ["| AdamW | 1 | 1.500 | 2.500 | 1.25 | 1.00 |"],
        "conformance": [
            "| feature | 1 replica | 2 replicas |",
            "| LoRA | 0.0e+00 | 1.0e-07 | refused: leave out LoRA |",
        ],
    }
    assert all(words in table for words in [*expected[name], machine()["hardware"]["cpu"]]), table


def test_sizes_measured_before_with_the_same_options_are_kept():
    before = json.loads((ROOT / "benchmarks/results/throughput.json").read_text())
    new = {"dropout": before["dropout"], "corpus": before["corpus"], "sizes": {"tiny": "new"}}
    assert throughput.with_sizes_before(new)["sizes"] == before["sizes"] | {"tiny": "new"}
    assert throughput.with_sizes_before(new | {"dropout": 0.5})["sizes"] == {"tiny": "new"}


def test_two_commits_are_compared_round_by_round():
    table = compare.table({"bert_mlm": [[20.0, 30.0, 10.0], [10.0, 30.0, 20.0]]})
    assert "| bert_mlm | 20 | 20 | 1.000 | 0.500 to 2.000 |" in table


def test_a_commit_is_checked_out_and_gone_again():
    with machine_module.checkout("HEAD") as root:
        assert (root / "benchmarks/machine.py").is_file()
    assert not root.exists()
    with pytest.raises(UserError, match="no checkout of nowhere"), machine_module.checkout("nowhere"):
        pass


def test_the_readme_says_how_many_of_keras_own_tests_pass():
    results = {way: {"passed": passed} for way, passed in zip(trainer_tests.WAYS, (9, 5, 8), strict=True)}
    assert "9 pass without a strategy; 5 of them with two replicas, 8 with ours." in trainer_tests.line(results)


def test_the_best_run_of_each_side_is_the_one_that_ends_lowest():
    def run(side, *curve):
        return {"side": side, "curve": curve}

    published = [run(quality.PUBLISHED, (300.0, 7.5)), run(quality.PUBLISHED, (290.0, 7.1), (300.0, 7.0))]
    ours = [run(quality.OURS, (30.0, 7.4), (60.0, 6.5)), run(quality.OURS, (10.0, 8.0), (20.0, 6.9))]
    found = quality.compare({"runs": published + ours})
    assert found["the same learning rate"] == {"loss": 7.5, "published": 300.0, "ours": 30.0, "ratio": 10.0}
    assert found["each at its best"] == {"loss": 7.0, "published": 300.0, "ours": 60.0, "ratio": 5.0}
    never = quality.compare({"runs": [*published, run(quality.OURS, (10.0, 9.0))]})
    assert not any(one["ratio"] for one in never.values())


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    results = sample_results()
    quality.draw(results["quality"], tmp_path / "quality.png")
    techniques.draw(results["techniques"], tmp_path / "techniques.png")
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())


@pytest.mark.slow
def test_a_worker_answers_and_tells_why_it_failed():
    with together([Worker("tests.test_benchmarks:adder", {"first": 1})]) as [worker]:
        assert worker(second=2) == {"sum": 3}
        assert worker(second=3) == {"sum": 4}
        with pytest.raises(RuntimeError, match="unsupported operand"):
            worker(second="x")
    assert worker.process.returncode is not None


def adder(first):
    return lambda second: {"sum": first + second}


def test_a_link_is_as_slow_as_it_is_told():
    receive = "import socket,sys; s=socket.create_server(('', 9000)); print('up', flush=True); c=s.accept()[0]\n"
    receive += "while c.recv(2**16): pass\nc.send(b'!')"
    send = "import socket,time; s=socket.create_connection(('%s', 9000)); b=time.perf_counter(); s.sendall(bytes(%d));"
    send += "s.shutdown(1); s.recv(1); print(time.perf_counter() - b)"
    try:
        with two_hosts() as hosts:
            shape(hosts, 80)
            command = on(hosts[0], sys.executable, "-c", receive)
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
                receiver.stdout.readline()
                code = send % (ADDRESSES[0], 10**7)
                answer = subprocess.check_output(on(hosts[1], sys.executable, "-c", code), text=True, timeout=60)
    except PermissionError as error:
        pytest.skip(str(error))
    assert 0.95 < float(answer) < 2.0  # a second, headers, and what a busy machine adds


@pytest.mark.long
@pytest.mark.parametrize("words", ["input --corpus {}", "memory --corpus {}", "peers --only device", "compare HEAD"])
def test_a_benchmark_runs(wikitext, words):
    command = [sys.executable, "-m", "benchmarks", *words.format(wikitext).split(), "--quick"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| --- " in done.stdout


@pytest.mark.slow
def test_techniques_are_runs_of_the_recipe_with_one_thing_in_another_way():
    command = [sys.executable, "-m", "benchmarks", "techniques", "--quick", "--only", "first half"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("**the defaults**", "half the batch in the first half", "sequences of 32 in the first half"):
        assert f"| {name} | 1 | " in done.stdout


@pytest.mark.slow
def test_fine_tuning_is_timed_and_scored_beside_transformers(tmp_path):
    pytest.importorskip("accelerate")
    pairs = role_pairs()
    vocabulary = train_wordpieces(lambda: (text for pair in pairs["train"] for text in pair[:2]), 300)
    save_preset(masked_lm_from_size("nano", vocabulary, 0.0, 128), vocabulary, 128, tmp_path / "preset")
    export_bert(str(tmp_path / "preset"), tmp_path / "exported")
    for name, split in ("train", "train"), ("dev", "validation"):
        rows = [("Quality", "#1 String", "#2 String"), *((row[2], *row[:2]) for row in pairs[split][:48])]
        (tmp_path / f"{name}.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))

    def measure(name, *options):
        command = [sys.executable, "-m", "benchmarks", name, "--quick", "--preset", str(tmp_path / "exported")]
        command += ["--mrpc", str(tmp_path), *options]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    measured = measure("fine_tuning", "--only", "2 replicas, bfloat16")
    for row in ("| fit, 2 replicas, bfloat16 | ", "| mrpc | 1 | transformers | 0.", "| mrpc | 1 | ours | 0."):
        assert row in measured
    row = measure("same_steps").splitlines()[-1].split(" | ")
    assert row[0] == "| mrpc" and row[2] == "3" and float(row[3]) < 1e-6 and float(row[4]) < 1e-5


@pytest.mark.slow
def test_causal_models_are_timed_beside_transformers(wikitext):
    pytest.importorskip("accelerate")
    for only in ("transformers, Accelerate, bfloat16", "one device, LoRA"):
        command = [sys.executable, "-m", "benchmarks", "causal", "--quick", "--corpus", str(wikitext), "--only", only]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"{only} | " in done.stdout


@pytest.mark.slow
def test_a_preset_is_fine_tuned_beside_random_weights_of_its_size(tmp_path):
    pairs = role_pairs()
    vocabulary = train_wordpieces(lambda: (text for pair in pairs["train"] for text in pair[:2]), 300)
    save_preset(masked_lm_from_size("nano", vocabulary, 0.0, 128), vocabulary, 128, tmp_path / "preset")
    results = json.loads((ROOT / "benchmarks/results/wikitext-2.json").read_text())["results"]
    results["config"]["model"] = "nano"
    (tmp_path / "results.json").write_text(json.dumps(results))
    for name, split in ("train", "train"), ("dev", "validation"):
        rows = [("sentence", "label"), *((row[0], row[2]) for row in pairs[split][:48])]
        (tmp_path / f"{name}.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    command = [sys.executable, "-m", "benchmarks", "pretraining", "--quick", "--pretrained", str(tmp_path)]
    command += ["--sst2", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for row in (
        "| sst2 | 1 | from random weights | 0.",
        "| sst2 | 1 | from the preset | 0.",
        "| sst2 | | bag of words | ",
    ):
        assert row in done.stdout


def test_techniques_are_ranked_by_their_means_with_the_spread_over_seeds():
    base = techniques.DEFAULT.name
    runs = ((base, 0, 2.0), (base, 1, 2.2), ("worse", 0, 2.1), ("worse", 1, 2.3), ("better", 0, 1.05))
    rows = [sample_run(*run) for run in runs]
    assert techniques.table({"runs": rows}).splitlines()[2:] == [
        "| better | 1 | 2.950 | 1.050 | 0.50 | 1.00 |",
        f"| **{base}** | 2 | 1.900 ± 0.141 | 2.100 ± 0.141 | 1.00 | 1.00 |",
        "| worse | 2 | 1.800 ± 0.141 | 2.200 ± 0.141 | 1.05 | 1.00 |",
    ]


def test_every_benchmark_has_its_options():
    for module in (throughput, scaling, benchmarks.input, quality, peers):
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        assert parser.parse_args([]).corpus == "docstrings"


@pytest.mark.parametrize(
    ("program", "words", "told"),
    [
        ("benchmarks", "fine_tuning --preset nowhere", "no file or folder nowhere"),
        ("benchmarks", "fine_tuning --preset .", "give a task's folder"),
        ("benchmarks", "causal --rounds 0", "--rounds is too small: 0"),
        ("benchmarks", "compare nowhere", "no checkout of nowhere"),
        ("benchmarks.faults", "--nonsense", "unrecognized arguments: --nonsense"),
        ("notebooks.generate", "nowhere", "no narrative nowhere"),
    ],
)
def test_a_wrong_word_is_told_without_a_traceback(program, words, told, monkeypatch, capsys):
    main = importlib.import_module(f"{program}.__main__" if program == "benchmarks" else program).main
    monkeypatch.setattr(sys, "argv", [program, *words.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and told in capsys.readouterr().err
