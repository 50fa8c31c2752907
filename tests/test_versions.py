"""What the library says to versions, and to a backend, that it is not made for."""

import json
import os
import warnings

import pytest

from keras_replicas import private
from tests.conftest import python


def said(code, **environment):
    """The status of a program, and the last line of its standard error."""
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"} | environment
    done = python("-c", code, env=environment)
    return done.returncode, done.stdout + (done.stderr.splitlines() or [""])[-1]


def program(call, version=None):
    told = f"keras.__version__ = {version!r}; " if version else ""
    return f"import keras; {told}import keras_replicas as kr; {call}"


@pytest.mark.parametrize(
    ("package", "version"),
    [("keras", "2.15.0"), ("keras", "3.12.4"), ("tensorflow", "2.19.1"), ("tensorflow", "2.9.0-rc1")],
)
def test_what_is_too_old_is_refused(package, version):
    oldest = private.CHECKED_VERSIONS[package].split(", ")[0]
    told = f"keras_replicas needs {package} {oldest} or newer, not {version}: pip install -U {package}"
    with pytest.raises(ImportError, match=f"^{told}$"):
        private.check_version(package, version)


@pytest.mark.parametrize(("package", "version"), [("keras", "4.0.0.dev2031010103"), ("tensorflow", "2.100.0-dev1")])
def test_what_is_newer_than_checked_is_warned_of(package, version):
    newest = private.CHECKED_VERSIONS[package].split(", ")[-1]
    told = f"is checked against {package} {newest}, not {version}: verify it by `python -m keras_replicas doctor`"
    with pytest.warns(UserWarning, match=f"^keras_replicas {told}$"):
        private.check_version(package, version)


def test_what_is_checked_is_taken_without_a_word():
    with warnings.catch_warnings(action="error"):
        for package, checked in private.CHECKED_VERSIONS.items():
            for minor in checked.split(", "):
                private.check_version(package, f"{minor}.0")


def test_a_program_with_an_old_keras_ends_in_one_sentence():
    told = "ImportError: keras_replicas needs keras 3.13 or newer, not 3.12.4: pip install -U keras"
    assert said(program("kr.data_parallel", "3.12.4")) == (1, told)


def test_a_program_with_a_new_keras_is_warned_once():
    code = program("kr.data_parallel(keras.Model); kr.data_parallel(keras.Sequential); kr.sum_over_replicas", "3.99.0")
    done = python("-c", code)
    assert done.returncode == 0 and done.stderr.count("is checked against keras ") == 1, done.stderr


@pytest.mark.parametrize("by", ["keras.json", "a variable"])
def test_another_backend_is_refused_at_the_call(by, tmp_path):
    pytest.importorskip("jax")
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "jax"}))
    chosen = {"KERAS_BACKEND": "jax"} if by == "a variable" else {"KERAS_HOME": str(tmp_path)}
    told = "RuntimeError: keras_replicas works with Keras's TensorFlow backend, not with jax: "
    told += "set the environment variable KERAS_BACKEND=tensorflow before Keras is imported"
    status, line = said(program("print('the call'); kr.data_parallel(keras.Sequential([]))"), **chosen)
    assert (status, line) == (1, f"the call\n{told}")
