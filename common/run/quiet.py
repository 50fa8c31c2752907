# SPDX-License-Identifier: Apache-2.0
"""Keeps TensorFlow's start-up messages off the screen."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Captures standard error, including C++ output; prints it only if the block fails.

    TensorFlow 2.21's C++ logs during its import do not obey `TF_CPP_MIN_LOG_LEVEL` (tensorflow/tensorflow#100442).
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        except BaseException:
            held_back.seek(0)
            os.write(stderr, held_back.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
