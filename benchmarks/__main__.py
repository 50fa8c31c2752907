# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks NAME`: measures, prints a table, and writes `benchmarks/results/NAME.json`."""

import argparse
import importlib
import subprocess

from benchmarks.workers import INSTALL
from common.command_line import fail
from keras_replicas import UserError

NAMES = {
    "all": "which results are stale; with --measure, those are measured again",
    "defaults": "the default run of each recipe, and the doctor",
    "throughput": "training speed, beside the published Keras example and transformers with Accelerate",
    "scaling": "one device against 2 replicas and 2 workers, and workers over links of several speeds",
    "input": "the input pipeline alone, and how long a step waits for it",
    "keras_tests": "Keras's own tests that train, by its trainer and by ours, on none, one and two replicas",
    "conformance": "each feature of Keras on 1, 2 and 4 replicas, against plain Keras on one device",
    "waits": "from Return to the first step, from the last to the prompt, and models' first steps",
    "compare": "the speed of the recipes now, and at another commit",
    "price": "what fit by the library costs, beside the one of Keras, for plain models",
    "gpu": "for whoever has GPUs: all that we cannot measure, in ten minutes, as one file to send us",
    "goodput": "what a kill a minute costs two workers",
    "faults": "what clusters do to jobs, done to two workers, compared to the bit",
    "schedules": "random schedules of faults to runs on two workers, compared to the bit",
    "versions": "the library's own tests with other versions of Python, TensorFlow and Keras",
    "fine_tuning": "speed of fine-tuning, beside transformers with Accelerate",
    "fine_tuning_scores": "scores of fine-tuning, beside transformers with Accelerate",
    "same_steps": "fine-tuning on the same batches from the same weights and head, beside transformers",
    "export": "from a CSV to a service: the commands' seconds, and each format's size and speed",
    "causal": "speed and memory of causal_lm and LoRA, beside transformers with Accelerate",
    "quality": "validation loss by time, beside the published Keras example",
    "wikitext": "what a run of bert_from_scratch on WikiText-2 learned",
}


def main() -> None:
    """Reads the command line, and measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="NAME")
    for name, text in NAMES.items():
        module = importlib.import_module(f"benchmarks.{name}")
        command = commands.add_parser(name, help=text, description=module.__doc__)
        getattr(module, "add_arguments", lambda _: None)(command)
        if name not in ("all", "wikitext"):
            command.add_argument(
                "--quick", action="store_true", help="to try it: few steps, smallest size, nothing kept"
            )
        command.set_defaults(main=module.main)
    arguments = parser.parse_args()
    try:
        arguments.main(arguments)
    except ModuleNotFoundError as error:
        fail(f"{error}: {INSTALL}")
    except (UserError, subprocess.CalledProcessError) as error:
        fail(error)


if __name__ == "__main__":
    main()
