# SPDX-License-Identifier: Apache-2.0
"""Tells for whom a worker waits.

`fit`, `evaluate` and `predict` need all workers: one that calls them alone waits for the others, in a collective
operation that has no timeout. So each worker publishes which of these calls it is in, and a thread compares.
"""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from keras_replicas.cluster import num_workers, whole_number, worker_index

log = logging.getLogger("keras_replicas")
SECONDS_BETWEEN_LOOKS = 10
SECONDS_BEFORE_WORD = 30  # of waiting; with what lies between two looks, it is less than a minute
ADVICE = "All workers must make the same calls of fit, evaluate and predict, in the same order, not the chief alone"


def wait_timeout() -> int:
    """Seconds after which a worker ends that waits for another: the environment variable `WAIT_TIMEOUT`, or an hour.

    They are counted from the last step or call of those for whom it waits.

    Raises:
        UserError: when it is not a whole number of seconds.
    """
    return whole_number("WAIT_TIMEOUT", 3600)


class Status(NamedTuple):
    """What a worker does.

    Attributes:
        number: of calls that it has begun.
        call: in which it is now, such as "fit"; "" between calls.
        steps: that it has done.
    """

    number: int = 0
    call: str = ""
    steps: int = 0


class _Calls:
    """The calls of this worker; `fit` evaluates, so that one may be inside another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = self._steps = 0
        self._inside: list[str] = []

    def begin(self, call: str) -> None:
        with self._lock:
            self._number += 1
            self._inside.append(call)

    def end(self) -> None:
        with self._lock:
            self._inside.pop()

    def add_steps(self, count: int) -> None:
        with self._lock:
            self._steps += count

    def status(self) -> Status:
        with self._lock:
            return Status(self._number, self._inside[-1] if self._inside else "", self._steps)


_calls = _Calls()


@contextlib.contextmanager
def call_of_all_workers(call: str) -> Iterator[None]:
    """Context of a call that all workers must make, such as "fit"."""
    _calls.begin(call)
    try:
        yield
    finally:
        _calls.end()


def note_steps(count: int) -> None:
    """Notes that this worker has done some steps."""
    _calls.add_steps(count)


def current_call() -> str:
    """The call in which this worker is, such as "fit"; "" between calls."""
    return _calls.status().call


def watch_other_workers() -> None:
    """Starts the thread that tells for whom this worker waits."""
    threading.Thread(target=_watch, name="keras_replicas waiting", daemon=True).start()


def _watch() -> None:
    from keras_replicas.private import eager_context

    wait = Wait(wait_timeout())
    published = None
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        mine = _calls.status()
        try:
            if mine != published:
                _publish(eager_context(), mine)
                published = mine
            others = _published(eager_context()) if mine.call else {}
        except Exception:  # the cluster has ended, and so will this process
            return
        word = wait.look(mine, others, time.monotonic())
        if wait.is_over:
            print(f"error: {word}", file=sys.stderr, flush=True)
            os._exit(2)  # the main thread waits in an operation that nothing interrupts
        if word:
            log.warning("%s", word)


class Wait:
    """Finds, from statuses that are looked at again and again, for whom a worker waits, and how long.

    Args:
        timeout: seconds without a sign of those for whom it waits, after which the wait is over.

    Attributes:
        is_over: whether the worker is to end.
    """

    def __init__(self, timeout: float):
        self._timeout, self.is_over = timeout, False
        self._mine: Status | None = None
        self._since = self._last_sign = 0.0
        self._others: dict[int, Status] = {}
        self._has_told = False

    def look(self, mine: Status, others: dict[int, Status], now: float) -> str:
        """A sentence, if there is something to tell.

        Args:
            mine: this worker's status.
            others: those of the others, by rank.
            now: the time in seconds.
        """
        behind = [rank for rank, other in others.items() if other.number < mine.number]
        if mine != self._mine or not behind:
            self._mine, self._since, self._last_sign, self._has_told = mine, now, now, False
        if any(others[rank] != self._others.get(rank) for rank in behind):
            self._last_sign = now
        self._others = others
        if not behind:
            return ""
        who = f"worker {worker_index()} waits in {mine.call} for worker {', '.join(map(str, behind))}"
        if now - self._last_sign >= self._timeout:
            self.is_over = True
            return f"{who}, which made no step and no call for {self._timeout:.0f} s. {ADVICE}"
        if self._has_told or now - self._since < SECONDS_BEFORE_WORD:
            return ""
        self._has_told = True
        where = others[behind[0]].call
        return f"{who}, which is in {where or 'none of these calls'}. {ADVICE}"


def _publish(store: Any, status: Status) -> None:
    key = f"status/{worker_index()}"
    with contextlib.suppress(Exception):  # there is none at first
        store.delete_config_key_value(key)
    store.set_config_key_value(key, json.dumps(status))


def _published(store: Any) -> dict[int, Status]:
    """The others' statuses; of one that has published nothing in time, that of a worker that has begun nothing."""
    import tensorflow as tf

    found = {}
    for rank in range(num_workers()):
        if rank == worker_index():
            continue
        try:
            found[rank] = Status(*json.loads(store.get_config_key_value(f"status/{rank}", 1000)))
        except tf.errors.DeadlineExceededError:
            found[rank] = Status()
    return found
