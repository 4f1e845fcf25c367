"""What SGLang's kernel that normalises and rotates keys in one go makes of a position encoding. Pure."""

from __future__ import annotations

from typing import Any

from kvconnector.integrations.model_values import position_encodings, rope_parameters

FUSED_ROPE = "--enable-fused-qk-norm-rope"
"""SGLang's option for that kernel, which Qwen3-MoE and Mellum then use on CUDA."""


def rotates_with_norms(device: str, *, is_asked: bool, is_rocm: bool) -> bool:
    """Return True if keys may be rotated by that kernel, which has its own rule for scaled position encodings.

    Args:
        device: SGLang's `--device`.
        is_asked: The option is on.
        is_rocm: "cuda" means AMD's GPUs.
    """
    return is_asked and device == "cuda" and not is_rocm


def fused_encodings(config: Any) -> tuple[tuple[str, str], ...]:
    """Return the position encodings of a model's configuration with what that kernel makes of scaled ones.

    It takes the quotient of the model's two lengths for the factor, and reads `attention_factor`, which SGLang's
    modules do not.
    """
    given = rope_parameters(config)
    found = []
    for kind, text in position_encodings(config):
        own = given.get(kind) or next(iter(given.values()), {})
        read = f"{config.max_position_embeddings} tokens, factor {own.get('attention_factor')}"
        is_scaled = not text.startswith("default(")
        found.append((kind, f"{text} by {FUSED_ROPE} ({read})" if is_scaled else text))
    return tuple(found)
