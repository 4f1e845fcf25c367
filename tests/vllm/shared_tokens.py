"""vLLM engines whose ranks may share tokens, with its own scheduler, cache tensors, slots and aggregator of workers.

Only the model is missing: a forward pass writes a known value for each layer, token and head.
"""

from __future__ import annotations

import time
import types
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.triton_utils import dispatcher
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.block_table import ComputeSlotMappingKernel
from vllm.v1.worker.gpu import kv_connector as runner

from kvconnector.cache.slot_mapping import PAD_SLOT_ID
from kvconnector.integrations.vllm.connector import KVConnector
from kvconnector.integrations.vllm.placement import Placement
from kvconnector.topology import TpKVTopology
from tests.vllm.cache_world import one_group
from tests.vllm.scheduler_world import World, vllm_config

NUM_BLOCKS, DIM, LAYERS = 40, 8, 2
NAMES = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
DEADLINE_S = 60.0
UNWRITTEN = -1.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An engine's shape. `kv_heads` 0 is a latent. Without a kernel block size, attention uses vLLM's blocks."""

    tp_size: int = 1
    dcp_size: int = 1
    pcp_size: int = 1
    interleave_tokens: int = 1
    block_size: int = 16
    traces_endpoint: str | None = None
    kernel_block_size: int | None = None
    kv_heads: int = 0
    step_tokens: int = 1024
    layout: KVCacheLayout = KVCacheLayout.LBHNC

    @property
    def content(self):
        """Number of elements of one head of a token: K and V, or a latent."""
        return 2 * DIM if self.kv_heads else DIM

    def heads(self, tp_rank):
        """Return the KV heads of a rank, in the whole model's numbering."""
        return (
            TpKVTopology.heads_of(self.kv_heads, tp_rank=tp_rank, tp_size=self.tp_size)
            if self.kv_heads
            else range(1)
        )

    def spec(self):
        return (FullAttentionSpec if self.kv_heads else MLAAttentionSpec)(
            block_size=self.block_size,
            num_kv_heads=len(self.heads(0)),
            head_size=DIM,
            dtype=torch.float32,
        )


def written(prompt, heads, content):
    """Return the values that a forward pass over a prompt leaves in the cache: `[layer, token, head, content]`."""
    layers, dims = torch.arange(LAYERS)[:, None, None, None], torch.arange(content)
    tokens = torch.tensor(prompt)[None, :, None, None]
    places = torch.arange(len(prompt))[None, :, None, None]
    head_numbers = torch.tensor(list(heads))[None, None, :, None]
    mixed = ((layers * 997 + tokens) * 131 + places) * 8 + head_numbers
    return (mixed * content + dims).remainder(1 << 20).float()


@lru_cache
def _v1_kernel():
    """Return vLLM's kernel in the real Triton's interpreter: without a GPU, vLLM replaces Triton by a dummy."""
    here = ComputeSlotMappingKernel.kernel, None
    # vLLM may have registered another one for this platform
    name = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
    kernel, _ = dispatcher._registry.get(name, here)
    source = getattr(kernel, "fn", kernel)
    names = {**source.__globals__, "tl": tl, "triton": triton}
    function = types.FunctionType(source.__code__, names, source.__name__, source.__defaults__)
    function.__module__, function.__qualname__ = source.__module__, source.__qualname__
    return InterpretedFunction(function)


def v1_slots(block_ids, num_tokens, block_size, shared):
    """Return the slots of a request's first tokens on one rank, in vLLM's blocks; -1 where another rank has the token.
    vLLM's V1 model runner computes them, since its CPU code has no context parallelism.
    """
    table = torch.tensor([list(block_ids)], dtype=torch.int32)
    slots = torch.full((num_tokens,), PAD_SLOT_ID - 1, dtype=torch.int64)
    kernel = _v1_kernel()
    # vLLM 0.31 counts in kernel blocks, which lie in a block one after another
    whole = {"block_size": block_size, "BLOCKS_PER_KV_BLOCK": 1}
    kernel[(2,)](
        num_tokens,
        num_tokens,
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.arange(num_tokens, dtype=torch.int64),
        table,
        table.stride(0),
        slot_mapping_ptr=slots,
        **{name: value for name, value in whole.items() if name in kernel.arg_names},
        KV_CACHE_BLOCK_SIZE=block_size,
        TOTAL_CP_WORLD_SIZE=shared.world_size,
        TOTAL_CP_RANK=shared.rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=shared.interleave_tokens,
        PAD_ID=PAD_SLOT_ID,
        BLOCK_SIZE=64,
    )
    return slots


class Rank:
    """A worker's memory and connector."""

    def __init__(self, config, shape, placement):
        self.shape, self.placement = shape, placement
        self.heads = shape.heads(placement.tp_rank)
        self.cache_config, caches = one_group(
            shape.spec(), shape.layout, shape.kernel_block_size, NAMES, NUM_BLOCKS
        )
        self.layers = [caches[name] for name in NAMES]
        for layer in self.layers:
            layer.fill_(UNWRITTEN)
        with patch.object(Placement, "here", lambda parallel: placement):
            self.connector = KVConnector(config, KVConnectorRole.WORKER, self.cache_config)
        with patch.object(runner, "get_kv_transfer_group", lambda: self.connector):
            self._runner = runner.ActiveKVConnector(config, caches)

    def before_forward(self, planned):
        self._runner.pre_forward(planned)

    def after_forward(self):
        self._runner._start_load_kv()

    def end_step(self, planned):
        finished = planned.finished_req_ids
        if hasattr(self._runner, "finalize_step"):  # with a draft model, vLLM 0.33 calls it later
            output = self._runner.post_forward(finished, defer_finalize=True)
            self._runner.finalize_step()
        else:
            output = self._runner.post_forward(finished)
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)

    def own_tokens(self, num_tokens):
        shared = self.placement.context_parallel
        return {
            token
            for token in range(num_tokens)
            if token // shared.interleave_tokens % shared.world_size == shared.rank
        }

    def slots(self, block_ids, num_tokens):
        shared = self.placement.context_parallel
        return v1_slots(block_ids, num_tokens, self.shape.block_size, shared)

    def write(self, token_ids, positions, block_ids):
        slots = self.slots(block_ids, positions.stop)[positions.start :]
        values = written(token_ids, self.heads, self.shape.content)
        is_own = slots != PAD_SLOT_ID
        for layer, value in zip(self.layers, values, strict=True):
            place = self._place(slots[is_own])
            new = value[positions.start : positions.stop][is_own]
            layer[place] = new.to(layer.dtype)

    def right_tokens(self, token_ids, block_ids):
        """Return the positions whose slots on this rank hold the values that a forward pass over the tokens leaves."""
        slots = self.slots(block_ids, len(token_ids))
        values = written(token_ids, self.heads, self.shape.content)
        is_right = slots != PAD_SLOT_ID
        for layer, value in zip(self.layers, values, strict=True):
            is_right &= (layer[self._place(slots)] == value).all(dim=(1, 2))
        return set(is_right.nonzero().flatten().tolist())

    def _place(self, slots):
        tokens = self.layers[0].shape[2]
        return slots // tokens, slice(None), slots % tokens


def set_scales(layer, scale):
    """Give a layer scales, as vLLM does when it loads a checkpoint's."""
    for part in "kv":
        setattr(layer, f"_{part}_scale", torch.tensor(scale))
        setattr(layer, f"_{part}_scale_float", scale)


class SharedEngine:
    def __init__(self, model, role, shape, scales=None, **options):
        self.shape = shape
        self.may_fail = False
        config = vllm_config(
            model,
            role,
            **{"policy": "fail", **options},
            engine={
                "max_num_batched_tokens": shape.step_tokens,
                "tensor_parallel_size": shape.tp_size,
                "decode_context_parallel_size": shape.dcp_size if shape.pcp_size == 1 else 1,
                "cp_kv_cache_interleave_size": shape.interleave_tokens,
                "block_size": shape.block_size,
                "otlp_traces_endpoint": shape.traces_endpoint,
            },
        )
        self.config = config
        config.kv_transfer_config.engine_id = role
        # vLLM's CPU platform lacks the model runner that supports prefill context parallelism
        config.parallel_config.prefill_context_parallel_size = shape.pcp_size
        config.parallel_config.decode_context_parallel_size = shape.dcp_size
        backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN" if shape.kv_heads else "FLASHMLA")
        layer = SimpleNamespace(get_attn_backend=lambda: backend)
        if scales is not None:
            set_scales(layer, scales)
        config.compilation_config.static_forward_context = dict.fromkeys(NAMES, layer)
        self.ranks = [
            Rank(config, shape, self._placement(config, tp_rank, pcp_rank))
            for pcp_rank in range(shape.pcp_size)
            for tp_rank in range(shape.tp_size)
        ]
        self.world = World(config, self.ranks[0].cache_config, self.handshakes())
        self.loads = []
        self.num_computed = Counter()
        self.num_traces = 0
        self._aggregator = KVOutputAggregator(len(self.ranks))

    def _placement(self, config, tp_rank, pcp_rank):
        return Placement.of(
            config.parallel_config,
            pp_rank=0,
            tp_rank=tp_rank,
            pcp_rank=pcp_rank,
            dcp_rank=(tp_rank * self.shape.pcp_size + pcp_rank) % self.shape.dcp_size,
        )

    def handshakes(self):
        return {
            (0, rank.placement.rank.tp_rank): found
            for rank in self.ranks
            if (found := rank.connector.get_handshake_metadata()) is not None
        }

    def step(self):
        return self.end_step(self.begin_step())

    def begin_step(self):
        """Plan a step, run the forward pass, and give the workers their orders."""
        planned = self.world.scheduler.schedule()
        for rank in self.ranks:
            rank.before_forward(planned)
        self.num_computed.update(planned.num_scheduled_tokens)
        for request_id, count in planned.num_scheduled_tokens.items():
            request = self.world.scheduler.requests[request_id]
            stop = request.num_computed_tokens
            positions = range(stop - count, stop)
            for rank in self.ranks:
                rank.write(list(request.all_token_ids), positions, self.block_ids(request_id))
        for rank in self.ranks:
            rank.after_forward()
        return planned

    def end_step(self, planned):
        self.loads.extend(self.world.news(planned).loads)
        output = self._aggregator.aggregate([rank.end_step(planned) for rank in self.ranks])
        reported = output.kv_connector_output
        assert self.may_fail or not reported.failed_recving, reported.failed_recving
        if reported.kv_connector_worker_meta:
            self.num_traces += len(reported.kv_connector_worker_meta.traces)
        return self.world.complete(planned, reported)

    def block_ids(self, request_id):
        (ids,) = self.world.scheduler.kv_cache_manager.get_block_ids(request_id)
        return list(ids)

    def close(self):
        for rank in self.ranks:
            rank.connector.shutdown()
        self.world.close()


@contextmanager
def engines(model, prefill, decode, policy="fail", **options):
    with (
        closing(SharedEngine(model, "kv_producer", prefill, **options)) as producer,
        closing(SharedEngine(model, "kv_consumer", decode, policy=policy, **options)) as consumer,
    ):
        yield producer, consumer


def until(condition, *engines):
    """Step the engines until the condition holds; fail after `DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        for engine in engines:
            engine.step()
        time.sleep(0.002)


def prefilled(producer, prompt_number, num_tokens):
    request = producer.world.add(
        num_tokens, {"do_remote_decode": True}, max_tokens=1, prompt=prompt_number
    )
    prompt = list(request.prompt_token_ids)
    (output,) = producer.step()
    assert output.kv_transfer_params["dcp_size"] == producer.shape.dcp_size
    return prompt, output.kv_transfer_params


def check_read(producer, consumer, prompt_number, num_tokens):
    """Check, token by token, that a prompt which one engine prefills is where vLLM reads it on the other's ranks."""
    prompt, params = prefilled(producer, prompt_number, num_tokens)
    request = consumer.world.add(num_tokens, params, prompt=prompt_number)
    until(lambda: request.num_output_tokens > 0, consumer, producer)
    for rank in consumer.ranks:
        found = rank.right_tokens(prompt, consumer.block_ids(request.request_id))
        assert found == rank.own_tokens(num_tokens)
