"""What the block manager decides about a group, and the settings it decides by."""

from __future__ import annotations

from enum import Enum

from kvconnector.cache.block_manager.errors import SequenceError
from kvconnector.cache.block_manager.sequence import Sequence, SequenceGroup, SequenceStatus
from kvconnector.errors import ConfigError


class AllocStatus(Enum):
    """Whether a group may take its blocks."""

    OK = "ok"
    LATER = "later"
    """Not enough blocks are free now."""
    NEVER = "never"
    """Not even an empty device would do."""


def check_settings(
    *,
    block_size: int,
    num_gpu_blocks: int,
    num_cpu_blocks: int,
    watermark: float,
    sliding_window: int | None,
    enable_caching: bool,
) -> None:
    """Raises ConfigError for a value out of range, and for caching with a sliding window."""
    at_least = {"block_size": (block_size, 1), "num_gpu_blocks": (num_gpu_blocks, 1)}
    at_least["num_cpu_blocks"] = (num_cpu_blocks, 0)
    if sliding_window is not None:
        at_least["sliding_window"] = (sliding_window, 1)
    for name, (value, minimum) in at_least.items():
        if value < minimum:
            raise ConfigError(f"{name} must be at least {minimum}", **{name: value})
    if not 0.0 <= watermark < 1.0:
        raise ConfigError("watermark must be a share in [0, 1)", watermark=watermark)
    if enable_caching and sliding_window is not None:
        # A ring overwrites blocks that the cache would still offer to others.
        raise ConfigError(
            "prefix caching and a sliding window cannot be combined",
            enable_caching=enable_caching,
            sliding_window=sliding_window,
        )


def check_encoder_decoder(
    request_id: str, sliding_window: int | None, enable_caching: bool
) -> None:
    """Raises ConfigError, naming the feature that encoder-decoder requests cannot use."""
    if enable_caching:
        # The decoder's cache depends on the encoder's input, which its tokens do not determine.
        raise ConfigError(
            "encoder-decoder requests are not supported with prefix caching", request_id=request_id
        )
    if sliding_window is not None:
        # Cross-attention sees the whole encoder input; the window applies to the decoder alone.
        raise ConfigError(
            "encoder-decoder requests are not supported with a sliding window",
            request_id=request_id,
            sliding_window=sliding_window,
        )


def waiting_seqs(group: SequenceGroup) -> list[Sequence]:
    """The waiting sequences of a group, which must all have the same prompt.

    Raises:
        SequenceError: none waits, or two differ.
    """
    waiting = group.seqs(SequenceStatus.WAITING)
    if not waiting:
        raise SequenceError("no sequence of the group waits", request_id=group.request_id)
    for seq in waiting[1:]:
        num_tokens = max(seq.num_tokens, waiting[0].num_tokens)
        if not seq.shares_prefix(waiting[0], num_tokens):
            raise SequenceError(
                "waiting sequences of one group must have the same tokens and extra keys",
                request_id=group.request_id,
                seq_ids=(waiting[0].seq_id, seq.seq_id),
            )
    return waiting
