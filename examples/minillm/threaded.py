"""All ranks of a model in one process, for tests and experiments: threads for processes, a barrier for gloo."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.cache_groups import layer_groups, rank_group
from minillm.config import BlockTables, CacheConfig, ModelConfig, ParallelConfig
from minillm.messages import NewRequest, RunningRequests, SampledToken, SequenceInput, TableChanges
from minillm.model import Stage
from minillm.paged_cache import PagedCache
from minillm.partition import rank_share
from minillm.rank_tables import RankTables, create_rank_tables
from minillm.weights import weight_source

TIMEOUT_S = 60.0


class ThreadHub:
    """What the ranks of one engine share."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self.parallel = parallel
        self.barriers = [threading.Barrier(parallel.tp_size) for _ in range(parallel.pp_size)]
        self.contributions: dict[int, Tensor] = {}
        self.hidden: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(parallel.world_size)]


class ThreadCommunicator:
    """One rank's `Communicator`."""

    def __init__(self, hub: ThreadHub, global_rank: int) -> None:
        self.hub = hub
        self.rank = global_rank
        self.stage = global_rank // hub.parallel.tp_size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        barrier, tp_size = self.hub.barriers[self.stage], self.hub.parallel.tp_size
        self.hub.contributions[self.rank] = tensor
        barrier.wait(TIMEOUT_S)
        first = self.stage * tp_size
        total = sum(self.hub.contributions[first + i] for i in range(tp_size))
        barrier.wait(TIMEOUT_S)
        return torch.as_tensor(total)

    def gather_shares(self, tensor: Tensor) -> tuple[Tensor, ...]:
        barrier, dcp_size = self.hub.barriers[self.stage], self.hub.parallel.dcp_size
        self.hub.contributions[self.rank] = tensor
        barrier.wait(TIMEOUT_S)
        first = self.rank // dcp_size * dcp_size
        shares = tuple(self.hub.contributions[first + i] for i in range(dcp_size))
        barrier.wait(TIMEOUT_S)
        return shares

    def send_forward(self, hidden_TE: Tensor) -> None:
        self.hub.hidden[self.rank + self.hub.parallel.tp_size].put(hidden_TE)

    def recv_forward(self, num_tokens: int, hidden_size: int) -> Tensor:
        hidden_TE = self.hub.hidden[self.rank].get(timeout=TIMEOUT_S)
        if hidden_TE.shape != (num_tokens, hidden_size):
            raise ValueError(f"got {tuple(hidden_TE.shape)}, not {(num_tokens, hidden_size)}")
        return hidden_TE


@dataclass(frozen=True, slots=True)
class StepSequence:
    """One sequence's share of a step. `block_ids` come behind those that its tables have, or replace them."""

    name: str
    token_ids: list[int]
    start: int
    sample: bool
    block_ids: list[list[int]]
    overwrite: bool = True


def table_changes(sequences: Sequence[StepSequence], known: Set[str]) -> TableChanges:
    """What a step of these sequences changes in tables that have rows for the `known` ones."""
    running = [each for each in sequences if each.name in known]
    return TableChanges(
        [NewRequest(each.name, each.block_ids) for each in sequences if each.name not in known],
        RunningRequests(
            [each.name for each in running],
            [each.block_ids for each in running],
            {each.name for each in running if each.overwrite},
        ),
    )


class ShardedModel:
    """All ranks of one engine; `step` runs them together and returns what the last stage sampled."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        cache: CacheConfig,
        num_tokens: int,
        *,
        block_tables: BlockTables = "host",
        device: str = "cpu",
    ) -> None:
        hub = ThreadHub(parallel)
        self.groups = layer_groups(model, cache, parallel.dcp_size)
        self.block_size = cache.block_size * parallel.dcp_size
        self.num_blocks = -(-num_tokens // self.block_size) + 3
        self._known: set[str] = set()
        self.stages, self.tables = [], []
        for rank in range(parallel.world_size):
            share = rank_share(model, parallel, rank)
            paged = PagedCache(
                share,
                self.groups,
                [rank_group(model, cache, group, share) for group in self.groups],
                num_blocks=[self.num_blocks] * len(self.groups),
                layout=cache.layout or "NHD",
                device=device,
            )
            self.tables.append(
                create_rank_tables(
                    block_tables,
                    self.groups,
                    max_rows=8,
                    max_model_len=model.max_model_len,
                    max_batched_tokens=model.max_model_len,
                    device=device,
                    context_parallel=share.context_parallel,
                )
            )
            self.stages.append(
                Stage(
                    model,
                    share,
                    cache=paged,
                    groups=ThreadCommunicator(hub, rank),
                    source=weight_source(model),
                    device=device,
                )
            )

    def step(self, sequences: Sequence[StepSequence]) -> list[SampledToken]:
        """One step on all ranks."""
        inputs = [
            SequenceInput(each.name, each.token_ids, each.start, int(each.sample))
            for each in sequences
        ]
        changes = table_changes(sequences, self._known)
        self._known |= {each.name for each in sequences}

        def run(stage: Stage, tables: RankTables) -> list[SampledToken]:
            tables.update(changes)
            return stage.run(Batch.build(inputs, self.groups, tables))

        with ThreadPoolExecutor(len(self.stages)) as pool:
            return list(pool.map(run, self.stages, self.tables))[-1]

    def sequence(
        self,
        token_ids: list[int],
        start: int,
        sample: bool,
        *,
        block_ids: list[int] | None = None,
        name: str = "r",
    ) -> StepSequence:
        """One sequence's share of a step, with its whole tables; by default of all blocks, shuffled."""
        ids = block_ids or self.block_ids
        num_tokens = len(ids) * self.block_size
        tables = [ids[: -(-num_tokens // group.block_size)] for group in self.groups]
        return StepSequence(name, token_ids, start, sample, tables)

    @property
    def block_ids(self) -> list[int]:
        """All blocks, in the shuffled order in which `generate` uses them."""
        return random.Random(0).sample(range(self.num_blocks), self.num_blocks)

    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        chunk: int = 1 << 20,
        after_prefill: Callable[[list[int]], None] | None = None,
    ) -> list[SampledToken]:
        """Greedy decoding of one prompt over shuffled blocks, prefilled in chunks of `chunk` tokens."""
        sampled: list[SampledToken] = []
        for start in range(0, len(prompt), chunk):
            tokens = prompt[start : start + chunk]
            sampled = self.step([self.sequence(tokens, start, start + chunk >= len(prompt))])
        if after_prefill:
            after_prefill(self.block_ids)
        result = list(sampled)
        while len(result) < max_tokens:
            position = len(prompt) + len(result) - 1
            result += self.step([self.sequence([result[-1].token_id], position, True)])
        return result


def token_ids(sampled: Sequence[SampledToken]) -> list[int]:
    """The tokens alone."""
    return [item.token_id for item in sampled]
