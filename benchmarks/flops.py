# SPDX-License-Identifier: Apache-2.0
"""How much arithmetic training a BERT takes."""

from common.sizes import dimensions


def flops_per_token(size: str, vocabulary_size: int, seq_length: int, mask_rate: float) -> float:
    """Floating-point operations that training needs for one token, by the maths of this project's formulation.

    A product of a vector with an n x m matrix has 2 n m operations, and its backward pass twice as many: 6 for each
    weight (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Of a layer of width h and inner width i, these are
    4 h^2 + 2 h i. Attention adds 12 h s a layer, for the scores and the mean of s values (Chowdhery et al. 2022, PaLM,
    arXiv:2204.02311, appendix B). The head, h^2 and h for each of V pieces, is needed for masked tokens only. What is
    not a matrix product (norms, gelu, softmax, the optimizer) is left out, so a share of the peak is a lower bound.

    The same figure stands for every contender: what one computes for padding, or for the logits of tokens that are not
    masked, is waste.

    Args:
        size: of `common.sizes`.
        vocabulary_size: V, pieces.
        seq_length: s, tokens to which one attends.
        mask_rate: share of tokens that are masked.
    """
    of = dimensions(size)
    width, layers = of["hidden_dim"], of["num_layers"]
    encoder = layers * (4 * width**2 + 2 * width * of["intermediate_dim"])
    head = width**2 + width * vocabulary_size
    return 6 * encoder + 12 * layers * width * seq_length + 6 * mask_rate * head
