"""Where weights come from: a seed, or a safetensors file. Names are those of Hugging Face's Llama and DeepSeek."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvconnector.errors import ConfigError
from minillm.config import ModelConfig
from minillm.partition import RankShare

WeightSource = Callable[[str, tuple[int, ...]], Tensor]
"""`source(name, shape)`: the whole tensor, float32 on the CPU. The caller slices its shard out of it."""

# Random weights of ordinary size give attention that is almost uniform and a residual stream that is almost the last
# token's embedding, so a wrong cache would hardly change greedy tokens. These gains give attention scores a standard
# deviation of about 3 and make every block's output count as much as the embedding.
QUERY_GAIN = 3.0
OUTPUT_GAIN = 4.0
EMBEDDING_GAIN = 10.0
LAYER_OUTPUTS = ("o_proj.weight", "down_proj.weight")


def random_source(seed: int) -> WeightSource:
    """Normal weights that depend on `seed` and the tensor's name alone, so every rank draws only what it holds."""

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        gain = 1.0
        if name.endswith("q_proj.weight"):
            gain = QUERY_GAIN
        elif name.endswith(LAYER_OUTPUTS):
            gain = OUTPUT_GAIN
        elif name.endswith("embed_tokens.weight"):
            gain = EMBEDDING_GAIN
        return _normal(shape, gain / shape[-1] ** 0.5, generator)

    return source


def _normal(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


def file_source(path: str) -> WeightSource:
    """Return the tensors of one safetensors file. A file without `lm_head.weight` ties it to the embedding.

    Raises:
        ConfigError: (by the source) a tensor is missing or has another shape than the model's configuration says.
    """
    from safetensors import safe_open  # an optional dependency: only this source needs it

    # the handle maps the file, and the closure keeps it open
    file: Any = safe_open(path, framework="pt")
    names = frozenset(file.keys())

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        if name == "lm_head.weight" and name not in names:
            name = "model.embed_tokens.weight"
        if name not in names:
            raise ConfigError("the weights file lacks a tensor", file=path, tensor=name)
        tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                "a tensor of the weights file has another shape than the model's configuration",
                file=path,
                tensor=name,
                file_shape=tuple(tensor.shape),
                expected_shape=shape,
            )
        return tensor.float()

    return source


class RankWeights:
    """One rank's part of a model's weights, on its device.

    Args:
        config: The model's configuration, which names the source of weights.
        share: What this rank holds.
        device: The rank's device.
    """

    def __init__(self, config: ModelConfig, share: RankShare, device: str) -> None:
        self.config, self.share, self.device = config, share, device
        self._source = file_source(config.weights) if config.weights else random_source(config.seed)

    def whole(self, name: str, *shape: int) -> Tensor:
        """Return a tensor that all ranks hold whole."""
        return self._source(name, shape).to(self.device)

    def rows(self, name: str, shape: tuple[int, int], own: range, width: int = 1) -> Tensor:
        """Return the rank's rows of a tensor: `width` for each index in `own`."""
        return _rows(self._source(name, shape), own, width).contiguous().to(self.device)

    def columns(self, name: str, shape: tuple[int, int], own: range, width: int = 1) -> Tensor:
        """Return the rank's columns of a tensor: `width` for each index in `own`."""
        return _rows(self._source(name, shape).T, own, width).T.contiguous().to(self.device)


def _rows(tensor: Tensor, own: range, width: int) -> Tensor:
    return tensor[own.start * width : own.stop * width]
