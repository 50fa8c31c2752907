# SPDX-License-Identifier: Apache-2.0
"""What is measured runs in a process of its own, which stays alive, and does a piece of work when it is asked.

    python -m benchmarks.workers module:function '{"argument": 1}'

calls `function(argument=1)`, which makes a model, say, and returns what does the work: a function of keyword arguments
that returns a dict. Each line of input is a JSON object of these arguments; each line of output is the answer. The
process ends with its input, and so with the process that started it.
"""

import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from benchmarks.machine import ROOT, cores
from keras_replicas import UserError

ENVIRONMENT = {  # quiet, and without a network
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TOKENIZERS_PARALLELISM": "true",
    "HF_HUB_OFFLINE": "1",
}


REFUSAL = "error"  # what the answer has of a UserError
INSTALL = "pip install -e '.[test,bench,export]'"


class Worker:
    """A process that does work when it is asked; see this module.

    Args:
        function: `module:function`, which returns what does the work.
        arguments: its keyword arguments, serializable as JSON.
        cores: numbers of the cores that it may use; by default, all.
        environment: variables on top of this process's own.
        prefix: words before the command, such as those that run it on another host.
    """

    def __init__(
        self,
        function: str,
        arguments: dict[str, Any],
        cores: Iterable[int] | None = None,
        environment: dict[str, str] | None = None,
        prefix: Iterable[str] = (),
    ):
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "benchmarks.workers", function, json.dumps(arguments)],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )

    def ask(self, **question: Any) -> None:
        """Has it begin a piece of work; `answer` waits for the end."""
        with contextlib.suppress(BrokenPipeError):  # it has failed, as its answer will say
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the end of the work, and returns the result.

        Raises:
            UserError: when that is what it failed with.
            RuntimeError: when it failed otherwise, with the end of its log.
        """
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.log.seek(0)
            raise RuntimeError(f"{self.process.args} ended with status {status}:\n{self.log.read()[-3000:]}")
        answer = json.loads(line)
        if REFUSAL in answer:
            raise UserError(answer[REFUSAL])
        return answer

    def __call__(self, **question: Any) -> dict[str, Any]:
        """Asks, and waits for the answer."""
        self.ask(**question)
        return self.answer()

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate()
        self.log.close()


@contextlib.contextmanager
def together(workers: Iterable[Worker]) -> Iterator[list[Worker]]:
    """A list of workers, all of which end after the block, or if one cannot be started."""
    started = []
    try:
        for worker in workers:
            started.append(worker)
        yield started
    finally:
        for worker in started:
            worker.close()


def once(function: str, arguments: dict[str, Any], **question: Any) -> dict[str, Any]:
    """The answer of a process that is started for one question."""
    with together([Worker(function, arguments)]) as [worker]:
        return worker(**question)


def on_a_core_each(jobs: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Answers to one question each, as they come, with the job's index; a job is a worker's function and arguments."""
    free: queue.Queue[int] = queue.Queue()
    for core in cores():
        free.put(core)

    def work(job: tuple[str, dict[str, Any]]) -> dict[str, Any]:
        core = free.get()
        try:
            with together([Worker(*job, cores=[core])]) as [worker]:
                return worker()
        finally:
            free.put(core)

    pool = ThreadPoolExecutor(len(cores()))
    try:
        futures = {pool.submit(work, job): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _serve(function: str, arguments: str) -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print goes to the log
        module, name = function.split(":")
        try:
            work = getattr(importlib.import_module(module), name)(**json.loads(arguments))
            for line in sys.stdin:
                print(json.dumps(work(**json.loads(line))), file=answers, flush=True)
        except ModuleNotFoundError as error:
            print(json.dumps({REFUSAL: f"{error}: {INSTALL}"}), file=answers, flush=True)
        except UserError as error:
            print(json.dumps({REFUSAL: str(error)}), file=answers, flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
