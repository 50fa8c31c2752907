# SPDX-License-Identifier: Apache-2.0
"""The upload target of a model, checked before TensorFlow is imported."""

import re

from keras_replicas import UserError


def check_push_to(uri: str, public: bool = False) -> None:
    """Raises a ValueError unless models can be uploaded there: `hf://user/name`, with a token. Empty: no uploads."""
    if not uri and public:
        raise UserError("a public model needs a repository to be pushed to: name one, hf://user/name")
    if not uri:
        return
    from huggingface_hub import get_token, is_offline_mode, utils  # which takes a while, and most runs do without it

    if not re.fullmatch("hf://[^/]+/[^/]+", uri):
        raise UserError(f"models are pushed to hf://user/name, on the Hugging Face Hub; got {uri}")
    utils.validate_repo_id(uri.removeprefix("hf://"))  # a ValueError of one line
    if is_offline_mode():
        raise UserError(f"pushing to {uri} needs the network, and HF_HUB_OFFLINE is set: unset it")
    if not get_token():
        raise UserError(f"pushing to {uri} needs a token of the Hub: run `hf auth login`, or set HF_TOKEN")
