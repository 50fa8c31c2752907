# SPDX-License-Identifier: Apache-2.0
"""The upload target of a model, checked before TensorFlow is imported."""

import re

from keras_replicas import UserError


def check_push_to(uri: str, public: bool = False) -> None:
    """Raises a `UserError` unless models can be uploaded there: `hf://user/name`, with a token. Empty: no uploads."""
    if public and not uri:
        raise UserError("--push-public needs --push-to hf://user/name; give that too, or leave it out")
    if not uri:
        return
    # Not above: importing it takes a while, and most runs do without.
    from huggingface_hub import get_token, is_offline_mode
    from huggingface_hub.utils import validate_repo_id

    if not re.fullmatch("hf://[^/]+/[^/]+", uri):
        raise UserError(f"--push-to must be hf://user/name, a model on the Hugging Face Hub; got {uri}")
    try:
        validate_repo_id(uri.removeprefix("hf://"))
    except ValueError as error:
        raise UserError(f"--push-to {uri}: {error}") from error
    if is_offline_mode():
        raise UserError("--push-to needs the network, and HF_HUB_OFFLINE is set: unset it")
    if not get_token():
        raise UserError("--push-to needs a token of the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN")
