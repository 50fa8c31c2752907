# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes doctor`: verifies on this machine that data-parallel training computes what one device would.

Every row runs a real recipe, `bert_mlm`, `text_classifier` or `causal_lm`, on a small model for 20 steps and reads its
results. The text is the project's licence, the lines of this file, or generated pairs, which are always available.
"""

import contextlib
import importlib
import importlib.metadata
import io
import itertools
import json
import multiprocessing
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from common.data.roles import role_pairs
from common.files import finite
from keras_replicas import UserError
from keras_replicas.gpus import gpu_names, gpu_shares
from recipes._compare import board_difference, differences, last_loss, relative, steps_of

ROOT = Path(__file__).parent.parent
TESTED = {"tensorflow": "2.21", "keras": "3.15", "keras-hub": "0.32"}
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
STEPS = 20
OPTIONS = {
    "corpus": str(ROOT / "LICENSE"),
    "model": "nano",
    "vocabulary_size": 305,
    "seq_length": 25,  # 20 steps of 8, the last of a single sequence
    "lr_scaling": "none",
    "optimizer": "muon",
    "learning_rate": 5e-3,
    "clip_norm": 0.0,  # clipping would hide a wrong scale of the gradient
    "epochs": 1,
    "precision": "float32",
}
CLASSIFIER = {
    "task": "own",
    "text_columns": "first,second",
    "label_column": "same",
    "model": "nano",
    "vocabulary_size": 305,
    "lr_scaling": "none",
    "learning_rate": 1e-3,
    "dropout": 0.0,
    "max_steps": STEPS,
    "precision": "float32",
}
CAUSAL = OPTIONS | {"epochs": 9, "max_steps": STEPS}
ALSO = {"text_classifier": CLASSIFIER, "causal_lm": CAUSAL}  # trained in fewer ways
PAIRS = 400  # generated, per split, for the classifier
GLOBAL_BATCH = 8
OPTIMIZERS = {"muon": 5e-3, "sgd": 0.1}
Way = tuple[str, int, dict[str, Any]]  # a configuration that must match one device: a name, replicas, options
# One line per sequence, padded within its batch: the lines of a program are of all lengths.
LINES = {"pack": "none", "corpus": __file__, "seq_length": 64, "max_steps": STEPS}
ONE_DEVICE: list[Way] = [("1 replica", 1, {}), ("1 replica, one line per sequence", 1, LINES)]
WAYS: list[Way] = [
    ("2 replicas", 2, {}),
    ("4 replicas", 4, {}),
    ("2 replicas, gradient accumulation, 7 steps per call", 2, {"accumulate": 2, "steps_per_execution": 7}),
    ("2 replicas, jit", 2, {"jit": True}),
    ("2 replicas, one line per sequence", 2, LINES),
]
# Relative differences that float32 may leave; that of a tensor, and of all weights, by the Euclidean norm.
BOUNDS = {"loss of every step": 1e-6, "weights": 1e-6, "every tensor": 1e-5, "validation": 1e-6}


def doctor(as_json: bool, workers: int) -> int:
    """Prints the machine and a row for each check, or one JSON object; returns the exit status, 1 if a check fails.

    Training on that many workers is checked too, if there are several.

    Raises:
        UserError: when the workers cannot share the batch, or there are fewer GPUs than workers.
    """
    if workers < 1 or GLOBAL_BATCH % workers:
        raise UserError(f"--workers must divide the global batch of {GLOBAL_BATCH}; got {workers}")
    gpu_shares(workers)  # each worker uses one GPU
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # the workers share GPUs with the other checks
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        gpus = gpu_names()
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload([f"recipes.{name}" for name in ("bert_mlm", *ALSO)])  # imports TensorFlow once
        # Two at once, as small models leave cores idle, but one on GPUs, which are shared badly.
        pool = ProcessPoolExecutor(1 if gpus else min(2, os.cpu_count() or 1), processes, set_up)
        with pool:
            most = pool.submit(most_replicas)
            machine = describe_machine(gpus)
            ways = [way for way in WAYS if way[1] <= most.result()]
            if left_out := [name for name, replicas, _ in WAYS if replicas > most.result()]:
                machine["left out"] = f"{', '.join(left_out)}: several GPUs are not split"
            if not as_json:
                print("\n".join(f"{name:12} {value}" for name, value in machine.items()), flush=True)
            ways += [(f"{workers} workers", workers, {"replicas": 1})] if workers > 1 else []
            jobs = make_jobs(Path(folder), ways, deterministic=bool(gpus))
            promised = {name: pool.submit(train, name, *job, workers) for name, job in jobs.items()}
            runs = {name: run.result() for name, run in promised.items()}
            off_board = pool.submit(board_difference, runs["2 replicas, muon"])
            checks = check(runs, ways, off_board.result())
    passed = all(row["passed"] for row in checks)
    seconds = round(time.perf_counter() - began, 1)
    if as_json:
        found = {"machine": machine, "checks": checks, "passed": passed, "seconds": seconds}
        print(json.dumps(finite(found), indent=2))
    else:
        print(table(checks) + f"\n{'all passed' if passed else 'FAILED'}, in {seconds:.0f} s")
    return 0 if passed else 1


def make_jobs(folder: Path, ways: list[Way], deterministic: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """The runs to be made, by name: the recipe and the options of each."""
    jobs: dict[str, dict[str, Any]] = {"resumed": {"replicas": 2, "dropout": 0.1, "checkpoint_every": 4}}
    for optimizer, learning_rate in OPTIMIZERS.items():
        for name, replicas, options in [*ONE_DEVICE, *ways]:
            split = {"replicas": replicas, "batch_size": GLOBAL_BATCH // replicas}
            jobs[f"{name}, {optimizer}"] = {"optimizer": optimizer, "learning_rate": learning_rate, **split, **options}
    jobs["not stopped"] = {"replicas": 2, "dropout": 0.1}
    for precision in ("mixed_bfloat16", "mixed_float16"):
        jobs[precision] = {"replicas": 2, "precision": precision}
    recipes = {name: ("bert_mlm", OPTIONS | own) for name, own in jobs.items()}
    (folder / "pairs").mkdir()
    for part, rows in role_pairs().items():
        lines = [json.dumps(dict(zip(("first", "second", "same"), row, strict=True))) for row in rows[:PAIRS]]
        (folder / f"pairs/{part}.jsonl").write_text("\n".join(lines))
    pairs = {"text_classifier": {"data": str(folder / "pairs")}}
    for recipe, options in ALSO.items():
        for name, replicas, way in [*ONE_DEVICE[:1], *fewer(ways)]:
            split = {"replicas": replicas, "batch_size": GLOBAL_BATCH // replicas}
            recipes[f"{recipe}, {name}"] = recipe, options | pairs.get(recipe, {}) | split | way
    common = {"batch_size": GLOBAL_BATCH // 2, "deterministic": deterministic}
    return {
        name: (recipe, common | {"workdir": str(folder / str(i))} | own)
        for i, (name, (recipe, own)) in enumerate(recipes.items())
    }


def fewer(ways: list[Way]) -> list[Way]:
    """The ways in which the recipes of `ALSO` are trained: those that differ only in their devices."""
    return [way for way in ways if way[2].keys() <= {"replicas"}]


def most_replicas() -> int:
    """The most replicas that this machine can have: the CPU and a single GPU are split, several GPUs are not."""
    import tensorflow as tf

    return 2 if len(tf.config.list_physical_devices("GPU")) in (2, 3) else 4


def set_up() -> None:
    """Initializes a process of the pool."""
    import tensorflow as tf

    from keras_replicas import make_strategy

    tf.get_logger().setLevel("ERROR")  # else it warns of the many small models that are traced
    make_strategy(most_replicas())  # so that fewer can be asked for later


def train(name: str, recipe: str, options: dict[str, Any], workers: int) -> dict[str, Any]:
    """Runs a recipe: by the launcher if named after workers; if named `resumed`, stopped by SIGTERM, and resumed."""
    if "workers" in name:
        given = {"--" + option.replace("_", "-"): value for option, value in options.items() if value is not False}
        words = [option if value is True else f"{option}={value}" for option, value in given.items()]
        command = [sys.executable, "-m", "recipes", "launch", "--workers", str(workers), recipe, *words]
        started = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if started.returncode:
            raise RuntimeError(f"{shlex.join(command)} ended with {started.returncode}: {started.stderr}")
        return json.loads(Path(options["workdir"], "results.json").read_text())

    module = importlib.import_module(f"recipes.{recipe}")
    config = module.Config(**options)
    with contextlib.redirect_stdout(io.StringIO()):
        if name == "resumed":
            threading.Thread(target=_stop_after, args=(Path(config.workdir), 6), daemon=True).start()
            with contextlib.suppress(SystemExit):
                module.train_and_evaluate(config)
        return module.train_and_evaluate(config)


def check(runs: dict[str, dict[str, Any]], ways: list[Way], off_board: float) -> list[dict[str, Any]]:
    """Rows with `check`, `measure`, `measured`, `bound` and `passed`."""
    found: list[tuple[str, str, float, float]] = []
    for optimizer in OPTIMIZERS:
        for name, _, options in ways:
            one, _, _ = ONE_DEVICE["pack" in options]
            apart = differences(runs[f"{name}, {optimizer}"], runs[f"{one}, {optimizer}"])
            found += [(f"{name}, {optimizer}", what, apart[what], bound) for what, bound in BOUNDS.items()]
    for recipe, (name, *_) in itertools.product(ALSO, fewer(ways)):
        apart = differences(runs[f"{recipe}, {name}"], runs[f"{recipe}, 1 replica"])
        found += [(f"{recipe}, {name}", what, apart[what], bound) for what, bound in BOUNDS.items()]
    plain, resumed = runs["2 replicas, muon"], runs["resumed"]
    for precision in ("bfloat16", "float16"):
        away = relative(last_loss(runs[f"mixed_{precision}"]), last_loss(plain))
        found.append((precision, "last loss against float32", away, 0.01))
    steps = steps_of(plain)
    mean = sum(step["loss"] * step["labels"] for step in steps) / sum(step["labels"] for step in steps)
    rate, warm_up = plain["learning_rate"], STEPS // 10
    peak = OPTIMIZERS["muon"]
    ends = {"first": rate["peak"] / (warm_up + 1), "peak": peak, "last": rate["peak"] / (STEPS - warm_up)}
    off_schedule = max(relative(rate[end], ends[end]) for end in ends)
    not_resumed = float((resumed["resumed_from_step"] or STEPS) >= STEPS)
    found += [
        ("loss reported", "against the mean over all labels", relative(plain["train_loss"], mean), 1e-6),
        ("learning rate", "first, peak and last by the schedule", off_schedule, 1e-6),
        ("resumed", "weights, to the bit", differences(resumed, runs["not stopped"])["weights"], 0.0),
        ("resumed", "from a step before the last", not_resumed, 0.0),
        ("TensorBoard", "its losses against steps.jsonl", off_board, 0.0),
    ]
    return [
        {"check": check, "measure": measure, "measured": measured, "bound": bound, "passed": measured <= bound}
        for check, measure, measured, bound in found
    ]


def describe_machine(gpus: list[str]) -> dict[str, str]:
    """What the figures depend on, and whether the package versions are tested ones."""
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text().split() if cpu.exists() else []
    return {
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        "CPU": f"{os.cpu_count()} cores: {' '.join(feature for feature in CPU_FEATURES if feature in flags)}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "GPUs": "; ".join(gpus) or "none",
        **{package: _version(package, tested) for package, tested in TESTED.items()},
    }


def _version(package: str, tested: str) -> str:
    version = importlib.metadata.version(package)
    return f"{version} ({'tested' if version.startswith(tested + '.') else f'NOT TESTED; tested with {tested}'})"


def table(checks: list[dict[str, Any]]) -> str:
    """The checks as a table of text."""
    names = [f"{row['check']}: {row['measure']}" for row in checks]
    width = max(map(len, names))
    rows = [f"{'check':{width}}  measured    bound"]
    for name, row in zip(names, checks, strict=True):
        verdict = "PASS" if row["passed"] else "FAIL"
        rows.append(f"{name:{width}}  {row['measured']:8.1e} {row['bound']:8.1e}  {verdict}")
    return "\n".join(rows)


def _stop_after(workdir: Path, steps: int) -> None:
    while not (workdir / "steps.jsonl").exists() or (workdir / "steps.jsonl").read_text().count("\n") < steps:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGTERM)
