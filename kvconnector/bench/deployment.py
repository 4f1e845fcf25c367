"""Two engines' cuts and pools, and the requests that fit them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from msgspec.structs import replace

from kvconnector.bench.environment import free_memory_bytes
from kvconnector.bench.options import SEED, BenchOptions
from kvconnector.bench.shapes import EngineShape, rank_geometry, with_types
from kvconnector.bench.sizes import format_bytes, format_move
from kvconnector.errors import ConfigError

SPARE_FACTOR = 2
"""BlockLists of a pool, as a multiple of those of the longest request."""
BlockLists: TypeAlias = list[list[int]]
"""Block ids by cache group."""
LENGTH_SPREAD = 16
"""Requests of a case differ from its nominal length by up to one in this many tokens, as in a service."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request's blocks on both sides, by cache group."""

    num_tokens: int
    prefill_blocks: BlockLists
    decode_blocks: BlockLists


@dataclass(frozen=True, slots=True)
class Deployment:
    """Two engines with the shapes of the options. Their pools have room for `SPARE_FACTOR` times `in_flight` of the
    longest requests.
    """

    options: BenchOptions
    in_flight: int = 1

    def __str__(self) -> str:
        return f"{self.options.prefill} to {self.options.decode}"

    @property
    def shapes(self) -> dict[str, EngineShape]:
        """Both engines, by name. Both state a type of their elements if one does."""
        options = self.options
        both = with_types(options.model, options.prefill, options.decode)
        return dict(zip(("prefill", "decode"), both, strict=True))

    def without_conversion(self) -> Deployment | None:
        """Return engines that both have the prefill engine's type and scale; None if these are alike in them."""
        shapes = self.shapes
        writer, reader = shapes["prefill"], shapes["decode"]
        if (writer.dtype, writer.scale) == (reader.dtype, reader.scale):
            return None
        plain = {name: shape.with_elements_of(writer) for name, shape in shapes.items()}
        return Deployment(replace(self.options, **plain), self.in_flight)

    @property
    def common_block_tokens(self) -> int:
        """Tokens that fill whole blocks of both engines."""
        return math.lcm(*(shape.virtual_block_tokens for shape in self.shapes.values()))

    def case_name(self, num_tokens: int) -> str:
        """Return a case's name: what moves, from which engine to which."""
        options = self.options
        size = format_move(*self.request_bytes(num_tokens))
        order = "scattered" if options.scattered else "contiguous"
        return f"{options.model.name}, {num_tokens} tokens, {size} {order}, {self}"

    def request_bytes(self, num_tokens: int) -> tuple[int, int]:
        """Return the bytes that a request has in the blocks of the prefill engine, and in those of the decode engine.
        They differ where elements are converted to others of another size.
        """
        model = self.options.model
        read, written = (
            model.request_bytes(num_tokens, shape.dtype) for shape in self.shapes.values()
        )
        return read, written

    def transfers(self, num_tokens: int, count: int) -> list[Transfer]:
        """Return `count` requests of lengths around `num_tokens`, the median; of whole blocks if there is a peer."""
        unit = self.common_block_tokens if self.options.peer else 1
        spread = num_tokens // LENGTH_SPREAD // unit
        steps = np.linspace(-spread, spread, count) if count > 1 else np.zeros(count)
        shuffled = np.random.default_rng(SEED).permutation(np.rint(steps))
        return [self.transfer(num_tokens + unit * int(step)) for step in shuffled]

    def transfer(self, num_tokens: int, index: int = 0) -> Transfer:
        """Return request number `index` of those in flight at once, which share no blocks. A shorter request with the
        same number has the first of these blocks.
        """
        options, blocks = self.options, []
        for shape in self.shapes.values():
            longest = shape.first_blocks(options.model, self._longest)
            needed = shape.first_blocks(options.model, num_tokens)
            chosen: BlockLists = []
            for (_, most), (_, count), size in zip(
                longest, needed, self.num_blocks(shape), strict=True
            ):
                rng, wanted = np.random.default_rng(SEED), most * self.in_flight
                ids = choose_blocks(wanted, size, scattered=options.scattered, rng=rng)
                chosen.append(ids[index * most :][:count])
            blocks.append(chosen)
        return Transfer(num_tokens, *blocks)

    def devices(self, side: str) -> list[str]:
        """Return the device of every rank of the engine "prefill" or "decode": ranks take turns on the GPUs of the
        options, or on all GPUs of their host, where consumers start after the producers' last.

        Raises:
            ConfigError: A GPU does not exist.
        """
        options, num_ranks = self.options, len(self.shapes[side].ranks)
        if options.device == "cpu":
            return ["cpu"] * num_ranks
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise ConfigError("torch finds no usable GPU here", engine=side)
        is_prefill = side == "prefill"
        first = 0 if is_prefill else len(options.prefill.ranks)
        gpus = options.gpus[0 if is_prefill else 1] or [(first + i) % count for i in range(count)]
        if max(gpus) >= count:
            raise ConfigError("no such GPU", engine=side, gpus=gpus, num_gpus=count)
        return [f"cuda:{gpus[index % len(gpus)]}" for index in range(num_ranks)]

    def num_blocks(self, shape: EngineShape) -> tuple[int, ...]:
        """Return the number of blocks of an engine of this shape, by cache group."""
        longest = shape.first_blocks(self.options.model, self._longest)
        return tuple(SPARE_FACTOR * self.in_flight * count for _, count in longest)

    def pool_bytes(self, side: str) -> int:
        """Return the bytes of the caches of all ranks of the engine "prefill" or "decode"."""
        shape = self.shapes[side]
        counts = self.num_blocks(shape)
        return sum(
            count * group.block_size * part.token_bytes * len(group.layers)
            for rank in shape.ranks
            for count, group in zip(
                counts, rank_geometry(self.options.model, shape, rank).groups, strict=True
            )
            for part in group.parts
        )

    def check_memory(self, sides: Iterable[str]) -> None:
        """Raise ConfigError if this host has no room for the caches of these engines on CPUs: its kernel would end
        whichever process it likes.
        """
        needed = sum(map(self.pool_bytes, sides)) if self.options.device == "cpu" else 0
        free = free_memory_bytes()
        if needed > free > 0:
            raise ConfigError(
                "this host has too little free memory for the caches: give fewer --tokens, fewer layers as in"
                f" --model {self.options.model.name},layers=4, or fewer ranks",
                needed=format_bytes(needed),
                free=format_bytes(free),
            )

    @property
    def _longest(self) -> int:
        longest = max(self.options.tokens)
        return longest + longest // LENGTH_SPREAD


def choose_blocks(
    num_needed: int, num_blocks: int, *, scattered: bool, rng: np.random.Generator
) -> list[int]:
    """Return block ids of one request: a random choice in random order, or one run at a random place."""
    if scattered:
        return [int(block) for block in rng.permutation(num_blocks)[:num_needed]]
    start = int(rng.integers(num_blocks - num_needed + 1))
    return list(range(start, start + num_needed))
