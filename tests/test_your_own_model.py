"""The page on a model of one's own: its program learns, and the file that it saves is Keras's."""

import re

import pytest

from tests.conftest import ROOT, python

PAGE = (ROOT / "docs/your-own-model.md").read_text()


@pytest.mark.slow
def test_the_program_learns_and_plain_keras_loads_it(tmp_path):
    program = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
    done = python("-c", f"import sys; sys.path.append({str(ROOT)!r})\n{program}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r" loss: ([\d.]+)", done.stdout)]
    assert len(losses) == 5 and losses[-1] < 0.8 * losses[0]
    load = "import keras; print(type(keras.models.load_model('brighter_half.keras')))"
    assert python("-c", load, cwd=tmp_path).stdout == "<class 'keras.src.models.sequential.Sequential'>\n"
