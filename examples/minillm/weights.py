"""Random weights by name and seed. Names are those of Hugging Face's Llama and DeepSeek."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.partition import RankShare

# Random weights of ordinary size give attention that is almost uniform and a residual stream that is almost the last
# token's embedding, so that greedy tokens would hardly notice a wrong cache. These gains give attention scores a
# standard deviation of about 3 and make every block's output count as much as the embedding.
QUERY_GAIN = 3.0
OUTPUT_GAIN = 4.0
EMBEDDING_GAIN = 10.0
LAYER_OUTPUTS = ("o_proj.weight", "down_proj.weight")


class RankWeights:
    """One rank's part of a model's weights, on its device.

    They are normal, and depend on the model's seed and a tensor's name alone, so every rank draws only what it holds.

    Args:
        config: The model's.
        share: What the rank holds.
        device: The rank's.
    """

    def __init__(self, config: ModelConfig, share: RankShare, device: str) -> None:
        self.config, self.share, self.device = config, share, device

    def whole(self, name: str, *shape: int) -> Tensor:
        """A tensor that all ranks have."""
        return self._draw(name, shape).to(self.device)

    def rows(self, name: str, shape: tuple[int, int], own: range, width: int = 1) -> Tensor:
        """The rank's rows of a tensor: those of `own`, `width` each."""
        return _rows(self._draw(name, shape), own, width).contiguous().to(self.device)

    def columns(self, name: str, shape: tuple[int, int], own: range, width: int = 1) -> Tensor:
        """The rank's columns of a tensor: those of `own`, `width` each."""
        return _rows(self._draw(name, shape).T, own, width).T.contiguous().to(self.device)

    def _draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The whole tensor, float32 on the CPU."""
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        seed = zlib.crc32(f"{self.config.seed}:{name}".encode())
        gain = 1.0
        if name.endswith("q_proj.weight"):
            gain = QUERY_GAIN
        elif name.endswith(LAYER_OUTPUTS):
            gain = OUTPUT_GAIN
        elif name.endswith("embed_tokens.weight"):
            gain = EMBEDDING_GAIN
        generator, deviation = torch.Generator().manual_seed(seed), gain / shape[-1] ** 0.5
        return torch.empty(shape).normal_(0.0, deviation, generator=generator)


def _rows(tensor: Tensor, own: range, width: int) -> Tensor:
    return tensor[own.start * width : own.stop * width]
