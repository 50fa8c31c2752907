# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README.md and docs/ from the files in `benchmarks/results/`: `python -m benchmarks.readme`."""

import json
import statistics
from collections.abc import Callable

import benchmarks.input
from benchmarks import (
    causal,
    conformance,
    export,
    fine_tuning,
    fine_tuning_scores,
    first_steps,
    goodput,
    keras_tests,
    price,
    quality,
    same_steps,
    scaling,
    schedules,
    throughput,
    versions,
    waits,
    wikitext,
)
from benchmarks.machine import RESULTS, ROOT, code_of
from benchmarks.rounds import PEER
from common.language_model import told_of
from common.log import report

Beside = dict[tuple[str, str], tuple[str, dict[str, list[float]]]]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What each recipe of the README's table is, and the options of the run that its row shows.
RECIPES = {
    "bert_mlm": ("BERT, a masked language model, by Keras `fit`", ""),
    "bert_from_scratch": (
        "from raw text: tokenizer, TFRecord shards, BERT or RoBERTa, publishing",
        f"--corpus wikitext-2 {wikitext.OPTIONS}",
    ),
    "causal_lm": ("GPT-2 from scratch, or any causal preset, whole or by LoRA", ""),
    "text_classifier": ("fine-tuning by `fit`, any family of encoders, LoRA", ""),
    "glue_controller": ("the same by a Controller, as in Orbit", ""),
    "glue_custom_loop": ("the same as one explicit loop", ""),
}


def parity_table(doctor: dict) -> str:
    """What `python -m recipes doctor --json` found, one line per check."""
    lines = ["| check | found |", "| --- " * 2 + "|"]
    lines += [f"| {row['check']} | {row['found']} |" for row in doctor["checks"]]
    return "\n".join([*lines, "", f"Code of {doctor['machine']['commit']}."])


def faults_table(rows: list[dict]) -> str:
    """What `python -m benchmarks faults` measured, one line per fault."""
    lines = [
        "| fault | runs | same to the bit | steps done again | all ended after | left behind |",
        "| --- " * 6 + "|",
    ]
    for fault in dict.fromkeys(row["fault"] for row in rows):
        runs = [row for row in rows if row["fault"] == fault]
        again = [row["at_step"] - row["went_on_from"] for row in runs]
        steps = " to ".join(dict.fromkeys(str(ends) for ends in (min(again), max(again))))
        seconds = [row["noticed"] for row in runs]
        same = sum(row["identical"] for row in runs)
        left = sum(len(row["left"]) for row in runs) or "nothing"
        lines.append(
            f"| {fault} | {len(runs)} | {same} | {steps} "
            f"| {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s | {left} |"
        )
    return "\n".join([*lines, "", code_of(rows)])


def claims(doctor: dict, faults: list[dict], beside: Beside, scores: dict) -> str:
    """What the README says of the results, one line for each page that has them all."""
    beside_one = [row for row in doctor["checks"] if "replicas" in row["check"]]
    passed = [row["largest_difference"] for row in beside_one if row["passed"]]
    same = sum(row["identical"] for row in faults)
    ratios: dict[str, list[str]] = {}
    for (recipe, _), (_, speeds) in beside.items():
        ours, theirs = (statistics.median(speeds[name]) for name in fastest(speeds))
        ratios.setdefault(f"`{recipe}`", []).append(f"{ours / theirs:.1f}")
    shown = ", ".join(f"{recipe} {' and '.join(each)}" for recipe, each in ratios.items())
    mrpc = {side: [run["accuracy"] for run in runs] for side, runs in scores["mrpc"].items()}
    ours, theirs = (fine_tuning_scores.mean_of(mrpc[side]) for side in ("ours", "transformers"))
    return f"""\
| | measured | against | more |
| --- | --- | --- | --- |
| exact | {len(passed)} of {len(beside_one)} small runs on replicas the same to {rounded_up(max(passed))}, in float64 \
| one device | [exactness](docs/exactness.md) |
| survives | {same} of {len(faults)} runs on two workers, killed, stopped or cut off: the same bits \
| undisturbed runs | [fault tolerance](docs/fault-tolerance.md) |
| speed | {shown} times the peer's on two cores, two models or tasks each \
| transformers, tuned, each at its best | [performance](docs/speed.md#every-recipe-beside-its-peer) |
| as good | MRPC accuracy {ours}, {len(mrpc["ours"])} seeds \
| transformers, same weights: {theirs} | [fine-tuning](docs/fine-tuning.md#measured-on-real-weights) |"""


def rounded_up(bound: float) -> str:
    """One digit of a bound, which the number does not exceed."""
    digit = f"{bound:.0e}"
    return digit if float(digit) >= bound else f"{float(digit) + float(f'1{digit[1:]}'):.0e}"


def beside(throughput: dict, causal: dict, fine_tuning: dict) -> Beside:
    """What is measured beside transformers: by recipe and model or task, the unit, and all contenders' speeds."""
    tokens = {("bert_mlm", size): one["contenders"] for size, one in throughput["sizes"].items()}
    tokens |= {("causal_lm", size): rows for size, rows in causal["sizes"].items()}
    examples = {("text_classifier", task): rows for task, rows in fine_tuning["speed"].items()}
    return {
        what: (f"{unit}/s", {name: row[f"{unit}_per_second"] for name, row in rows.items()})
        for unit, group in (("tokens", tokens), ("examples", examples))
        for what, rows in group.items()
    }


def beside_table(measured: Beside) -> str:
    """The fastest contender of each side by its median, and the range of the rounds' ratios."""
    lines = [
        "| recipe, model or task | ours, at its best | transformers, at its best | ratio | range |",
        "| --- " * 5 + "|",
    ]
    for (recipe, what), (unit, speeds) in measured.items():
        sides = {name: speeds[name] for name in fastest(speeds)}
        medians = [statistics.median(rounds) for rounds in sides.values()]
        ratios = [a / b for a, b in zip(*sides.values(), strict=True)]
        cells = [f"{median:,.0f} {unit}: {name}" for name, median in zip(sides, medians, strict=True)]
        ratio, low, high = medians[0] / medians[1], min(ratios), max(ratios)
        lines.append(f"| `{recipe}`, {what} | {' | '.join(cells)} | {ratio:.2f} x | {low:.2f} to {high:.2f} |")
    return "\n".join(lines)


def fastest(speeds: dict[str, list[float]]) -> list[str]:
    """The names of our fastest contender and of transformers', by the medians of their rounds; LoRA trains less."""
    whole = [name for name in speeds if "LoRA" not in name]
    sides = [[n for n in whole if n.startswith("fit")], [n for n in whole if n.startswith(PEER)]]
    return [max(names, key=lambda name: statistics.median(speeds[name])) for names in sides]


def wikitext_table(summary: dict) -> str:
    """What `python -m benchmarks wikitext` read of a run: its report, and the sentences it fills."""
    guesses = [
        f"| {sentence} | " + ", ".join(f"{guess['token_str']} {guess['score']:.2f}" for guess in found) + " |"
        for sentence, found in summary["filled"].items()
    ]
    return "\n".join(
        [
            report_table(summary["results"]),
            "",
            "| sentence | guesses, with their probabilities |",
            "| --- | --- |",
            *guesses,
        ]
    )


def throughput_table(results: dict) -> str:
    """What `python -m benchmarks throughput` measured, a table for each size."""
    parts = []
    for size, one in results["sizes"].items():
        parts += [f"BERT-{size}, vocabulary size {one['pieces']:,}:", throughput.table(one), hardware_line(one)]
    return "\n\n".join(parts)


def with_machine(table: Callable[[dict], str]) -> Callable[[dict], str]:
    """A benchmark's own table, followed by what it was measured on."""
    return lambda results: f"{table(results)}\n\n{hardware_line(results)}"


def hardware_line(results: dict) -> str:
    """What a benchmark's figures were measured on."""
    hardware, versions = results["machine"]["hardware"], results["machine"]["versions"]
    features = ", ".join(hardware["features"][-2:])
    packages = ", ".join(f"{name} {versions[name]}" for name in ("tensorflow", "keras", "torch") if name in versions)
    speeds = [f"{speed} TFLOP/s in {kind}" for kind, speed in results["machine"].get("tflops", {}).items()]
    peak = f", products at {' and '.join(speeds)}" if speeds else ""
    machine = f"{hardware['cpu']}, {hardware['cores']} cores ({features}), {hardware['memory_gb']} GiB{peak}"
    return f"{machine}; {packages}; code of {results['machine']['commit']}."


def first_steps_table(results: dict | None) -> str:
    """Returns the table of `benchmarks waits --table first_steps`, where that was measured."""
    if results is None:
        return "Not measured yet."
    return with_machine(first_steps.table)(results)


def recipes_table(results: dict[str, dict]) -> str:
    """What each recipe is, how long the run of its command trained, and its result.

    Args:
        results: a `results.json` for each of `RECIPES`.
    """
    lines = ["| recipe | what | command | training on 2 cores | result |", "| --- " * 5 + "|"]
    for name, (what, options) in RECIPES.items():
        found = results[name]
        command = f"python -m recipes run {name} {options}".rstrip()
        seconds = found["seconds"]
        time = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        if "val_unigram_loss" in found:
            better = found["val_unigram_loss"] - found["val_loss"]
            result = f"loss {found['val_loss']:.3f}, {better:.3f} nats below the unigram baseline"
        else:
            bag, majority = found["val_bag_of_words_accuracy"], found["val_majority_accuracy"]
            result = f"accuracy {found['val_accuracy']:.3f}; bag of words {bag:.3f}, majority class {majority:.3f}"
        lines.append(f"| `{name}` | {what} | `{command}` | {time} | {result} |")
    return "\n".join(lines)


def report_table(results: dict) -> str:
    """The report of a run."""
    return f"```text\n{report(results, told_of)}\n```"


# What is made of a file of results, by its name.
MEASURED = {
    "bert_mlm": with_machine(report_table),
    "causal_lm": with_machine(report_table),
    "wikitext-2": with_machine(wikitext_table),
    "doctor": parity_table,
    "keras_tests": keras_tests.line,
    "throughput": throughput_table,
    "scaling": with_machine(scaling.tables),
    "input": with_machine(benchmarks.input.table),
    "quality": with_machine(quality.table),
    "fine_tuning": with_machine(fine_tuning.tables),
    "fine_tuning_scores": with_machine(lambda results: fine_tuning_scores.score_table(results["scores"])),
    "same_steps": with_machine(same_steps.table),
    "causal": with_machine(causal.tables),
    "export": with_machine(export.table),
    "conformance": with_machine(conformance.table),
    "check": with_machine(conformance.check_summary),
    "goodput": with_machine(goodput.tables),
    "waits": with_machine(waits.table),
    "price": with_machine(price.table),
    "versions": versions.table,
}


def tables() -> dict[str, Callable[[], str]]:
    """The functions that make the tables, by name."""
    return {
        "recipes": lambda: recipes_table(
            {name: _results(name) for name in RECIPES if name != "bert_from_scratch"}
            | {"bert_from_scratch": _results("wikitext-2")["results"]}
        ),
        "claims": lambda: claims(
            *(_results("doctor"), _rows("faults"), _beside(), _results("fine_tuning_scores")["scores"]),
        ),
        "beside": lambda: beside_table(_beside()),
        "faults": lambda: faults_table(_rows("faults")),
        "schedules": lambda: schedules.table(_rows("schedules")),
        "published": lambda: with_machine(conformance.published_table)(_results("conformance")),
        "tried": lambda: conformance.published_summary(_results("conformance")),
        "first_steps": lambda: first_steps_table(_results("waits").get("first_steps")),
        **{name: lambda name=name: MEASURED[name](_results(name)) for name in MEASURED},
    }


def with_tables(page: str) -> str:
    """A page with its tables as the results have them, each between `<!-- name -->` and `<!-- end -->`."""
    for name, table in tables().items():
        before, marker, after = page.partition(f"<!-- {name} -->\n")
        if marker:
            page = f"{before}{marker}{table()}\n{after[after.index('<!-- end -->') :]}"
    return page


def _beside() -> Beside:
    return beside(*map(_results, ("throughput", "causal", "fine_tuning")))


def _rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def _results(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
