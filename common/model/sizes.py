# SPDX-License-Identifier: Apache-2.0
"""How large a model is."""

import json
from pathlib import Path

from common.errors import UserError

# Layers and width; a head has 64 columns, and the inner layer is 4 widths. Base and large: Devlin et al. 2018,
# arXiv:1810.04805; the others: Turc et al. 2019, "Well-Read Students Learn Better", arXiv:1908.08962.
SIZES = {
    "nano": (1, 64),  # ours, published nowhere: for tests
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
DIMENSIONS = ("num_layers", "num_heads", "hidden_dim", "intermediate_dim")


def dimensions(size: str) -> dict[str, int]:
    """A model's `num_layers`, `num_heads`, `hidden_dim` and `intermediate_dim`.

    Args:
        size: a name of `SIZES`, or a JSON file with these four, as KerasHub's backbones name them.

    Raises:
        UserError: when it is neither.
    """
    if size in SIZES:
        num_layers, width = SIZES[size]
        return dict(zip(DIMENSIONS, (num_layers, width // 64, width, 4 * width), strict=True))
    try:
        given = json.loads(Path(size).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--model {size} is neither {', '.join(SIZES)}, nor a JSON file ({error})") from error
    if (
        not isinstance(given, dict)
        or set(given) != set(DIMENSIONS)
        or not all(isinstance(n, int) and n > 0 for n in given.values())
    ):
        raise UserError(f"{size} must hold these as whole numbers above 0, and no more: {', '.join(DIMENSIONS)}")
    if given["hidden_dim"] % given["num_heads"]:
        raise UserError(f"{size}: hidden_dim {given['hidden_dim']} is not divided by num_heads {given['num_heads']}")
    return given
