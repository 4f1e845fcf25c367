"""The two engines of a benchmark, and the requests that move between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvconnector.bench import messages as m
from kvconnector.bench.contract import BenchOptions
from kvconnector.bench.pools import choose_blocks
from kvconnector.bench.shapes import EngineShape
from kvconnector.bench.units import format_bytes
from kvconnector.errors import ConfigError

SPARE_FACTOR = 2
"""Blocks of a pool for each block of the longest request."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request's blocks on both sides."""

    num_tokens: int
    prefill_blocks: tuple[int, ...]
    decode_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Deployment:
    """The two engines, and the sizes of the requests that their pools have room for."""

    options: BenchOptions
    prefill: EngineShape
    decode: EngineShape
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, options: BenchOptions, tokens: Sequence[int]) -> Deployment:
        """As the options cut the engines."""
        return cls(
            options,
            options.prefill or EngineShape(),
            options.decode or EngineShape(),
            tuple(tokens),
        )

    def __str__(self) -> str:
        return f"{self.prefill} to {self.decode}"

    def opens(self) -> tuple[list[m.Open], list[m.Open]]:
        """The first message of each rank of both engines."""
        prefill, decode = self.devices()
        return self._opens(self.prefill, prefill), self._opens(self.decode, decode)

    def devices(self) -> tuple[list[str], list[str]]:
        """A device for every rank of both engines, see `devices_for`."""
        return devices_for(self.options, len(self.prefill.ranks), len(self.decode.ranks))

    def transfers(self) -> list[Transfer]:
        """A request of every size; blocks by the options' seed."""
        options = self.options
        rng = np.random.default_rng(options.seed)

        def choose(shape: EngineShape, count: int) -> tuple[int, ...]:
            needed = shape.num_blocks(count)
            chosen = choose_blocks(
                needed, self._num_blocks(shape), scattered=options.scattered, rng=rng
            )
            return tuple(chosen)

        return [
            Transfer(count, choose(self.prefill, count), choose(self.decode, count))
            for count in self.tokens
        ]

    def payload_bytes(self, transfer: Transfer) -> int:
        """Bytes of a request over all layers and heads."""
        return self.options.model.token_bytes * transfer.num_tokens

    def case_name(self, transfer: Transfer) -> str:
        """What moves, from where to where."""
        options = self.options
        size = format_bytes(self.payload_bytes(transfer))
        order = "scattered" if options.scattered else "contiguous"
        return f"{options.model.name}, {transfer.num_tokens} tokens, {size} {order}, {self}"

    def _num_blocks(self, shape: EngineShape) -> int:
        return SPARE_FACTOR * shape.num_blocks(max(self.tokens))

    def _opens(self, shape: EngineShape, devices: Sequence[str]) -> list[m.Open]:
        return [
            m.Open(
                model=self.options.model,
                shape=shape,
                pp_rank=rank.pp_rank,
                tp_rank=rank.tp_rank,
                num_blocks=self._num_blocks(shape),
                device=device,
                seed=self.options.seed,
                timeout_s=self.options.timeout_s,
            )
            for rank, device in zip(shape.ranks, devices, strict=True)
        ]


def devices_for(
    options: BenchOptions, num_producers: int, num_consumers: int
) -> tuple[list[str], list[str]]:
    """A device for every rank. On GPUs an engine's ranks take turns on the GPUs that the options name for it; without
    these, consumers get the GPUs behind the producers', in a circle.

    Raises:
        ConfigError: a GPU is named that is not there.
    """
    if options.device == "cpu":
        return ["cpu"] * num_producers, ["cpu"] * num_consumers
    import torch

    count = max(1, torch.cuda.device_count())
    producers = options.gpus.prefill or range(count)
    consumers = options.gpus.decode or [(num_producers + index) % count for index in range(count)]
    if max(*producers, *consumers) >= count:
        raise ConfigError(
            "no such GPU",
            prefill=list(producers),
            decode=list(consumers),
            num_gpus=count,
        )
    return (
        [f"cuda:{producers[index % len(producers)]}" for index in range(num_producers)],
        [f"cuda:{consumers[index % len(consumers)]}" for index in range(num_consumers)],
    )
