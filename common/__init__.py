# SPDX-License-Identifier: Apache-2.0
"""What the recipes share: small modules of plain functions, in subpackages with one-way imports."""

import importlib.util
import sys

if _missing := [name for name in ("keras_hub", "tokenizers", "tyro") if importlib.util.find_spec(name) is None]:
    print(f"error: the recipes need {', '.join(_missing)}: pip install -e '.[recipes]' in the clone", file=sys.stderr)
    raise SystemExit(2)
