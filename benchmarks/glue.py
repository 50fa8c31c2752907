# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning as the README shows it: `python -m benchmarks.glue MRPC PRESET`.

Runs `glue_custom_loop` and `glue_controller` by default, and the Controller on MRPC from a preset with five seeds.
Writes `benchmarks/results/glue.json`.

MRPC is a folder in GLUE's form; PRESET, one that `bert_from_scratch` wrote.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SEEDS = range(5)
SCORES = (
    "val_accuracy",
    "val_f1",
    "val_loss",
    "val_majority_accuracy",
    "val_length_accuracy",
    "val_bag_of_words_accuracy",
)


def main(mrpc: str, preset: str) -> None:
    """Runs everything and writes the file."""
    results = {"default": {}, "mrpc": {}}
    for recipe in ("glue_custom_loop", "glue_controller"):
        results["default"][recipe] = run(recipe)
        results["default"][recipe]["config"]["workdir"] = f"runs/{recipe}"
    options = ["--task", "mrpc", "--data", mrpc, "--preset", preset, "--learning-rate", "1e-4"]
    runs = [run("glue_controller", *options, "--seed", str(seed)) for seed in SEEDS]
    start = "a preset of `bert_from_scratch` on WikiText-2"
    results["mrpc"][start] = [{name: each[name] for name in SCORES} for each in runs]
    (ROOT / "benchmarks/results/glue.json").write_text(json.dumps(results, indent=2) + "\n")


def run(recipe: str, *options: str) -> dict:
    """The results of a recipe in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "recipes", "run", recipe, "--workdir", folder, *options]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(folder, "results.json").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
