# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.published [NAME ...]`: prints what each program gives on N replicas."""

import argparse
import json

import keras
import tensorflow as tf

from benchmarks.published import BOUNDS, PROGRAMS, Comparison, compare


def main() -> None:
    """Prints what each program gives on N replicas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs, all if none is given")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2], metavar="N")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each program: comparisons by replicas")
    parser.add_argument("--floatx", choices=list(BOUNDS), default="float32")
    arguments = parser.parse_args()
    keras.config.set_floatx(arguments.floatx)
    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, devices)
    for name in arguments.names or PROGRAMS:
        if arguments.json:
            row = {replicas: compare(name, replicas)._asdict() for replicas in arguments.replicas}
            print(json.dumps({name: row}), flush=True)
            continue
        for replicas in arguments.replicas:
            print(f"{name}, {replicas} replicas ({PROGRAMS[name].expected}): ", end="", flush=True)
            try:
                print(describe(compare(name, replicas)), flush=True)
            except Exception as error:  # whatever it is, the other programs are still compared
                print(f"fails: {type(error).__name__}: {' '.join(str(error).split())}", flush=True)


def describe(comparison: Comparison) -> str:
    """The difference or the refusal, and a line for each warning."""
    lines = [f"    warned: {message}" for message in comparison.warnings]
    if comparison.difference is None:
        return "\n".join([f"refused: {comparison.refusal}", *lines])
    return "\n".join([f"{comparison.difference:.1e}", *lines])


if __name__ == "__main__":
    main()
