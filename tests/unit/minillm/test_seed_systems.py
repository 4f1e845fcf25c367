"""Every public function of the cache's systems is on the path of a request that some engine here serves.

The cases are whole engines of one rank: scheduler, rank, block tables, connector. They record which functions they
call, and compare tokens with a model that computes everything at once: a function that raised would be noticed.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType

import msgspec
import pytest

from kvconnector.cache import block_manager, block_table, device_block_table, engine_step, specs
from kvconnector.cache.host_copy import KVPool, copy_kv_blocks
from kvconnector.session import KVOutputAggregator
from kvconnector.topology import backend
from minillm.config import (
    Architecture,
    CacheConfig,
    EngineConfig,
    MixerConfig,
    ModelConfig,
    ParallelConfig,
)
from minillm.request import Request
from minillm.threaded import ShardedModel, token_ids
from tests.unit.minillm.local_engines import LocalEngine, prompt_of

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(170)]

MAX_TOKENS = 6


def model_of(architecture: Architecture) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_layers=4,
        head_dim=16,
        mixer=MixerConfig(latent_rank=24, sliding_window=21),
        max_model_len=512,
    )


def config_of(
    architecture: Architecture, role: str = "mono", *, tables: str = "host", **cache: object
) -> EngineConfig:
    return msgspec.convert(
        {
            "role": role,
            "engine_id": f"{architecture}-{role}",
            "model": model_of(architecture),
            "cache": msgspec.convert(cache, CacheConfig),
            "block_tables": tables,
            "max_batched_tokens": 48,
            "max_running": 8,
            "failure_policy": "fail",
        },
        EngineConfig,
    )


def expected(architecture: Architecture, prompt: list[int]) -> list[int]:
    """What follows the prompt."""
    model = ShardedModel(model_of(architecture), ParallelConfig(), CacheConfig(), 200)
    return token_ids(model.generate(prompt, MAX_TOKENS))


@contextmanager
def engines(folder: Path, *configs: EngineConfig) -> Iterator[list[LocalEngine]]:
    with ExitStack() as stack:
        running = [LocalEngine(config, folder) for config in configs]
        for engine in running:
            stack.callback(engine.close)
        yield running


def hand_over(architecture: Architecture, folder: Path) -> None:
    """Prefill on one engine; four answers on another of other blocks, which finds the prompt again the second time."""
    prefill = config_of(architecture, "prefill", block_size=16)
    decode = config_of(
        architecture,
        "decode",
        tables="device",
        block_size=8,
        layout="NHD",
        kernel_block_size=4,
        lookahead=3,
        state_interval=8,
    )
    with engines(folder, prefill, decode) as (producer, consumer):
        for turn, prompt in enumerate((prompt_of(75), [*prompt_of(75), *prompt_of(9, 1)])):
            offer = Request(f"p{turn}", prompt, 1, kv_transfer_params={"do_remote_decode": True})
            producer.run(offer)
            params = producer.params[offer.request_id]
            answers = consumer_answers(producer, consumer, turn, prompt, params)
            assert answers[0] == expected(architecture, prompt)
            assert len({answer[0] for answer in answers}) == len(answers)
            for answer in answers[1:]:
                rest = expected(architecture, [*prompt, answer[0]])
                assert answer[1:] == rest[: MAX_TOKENS - 1]
        assert consumer.scheduler.blocks.copied_blocks > 0


def consumer_answers(
    producer: LocalEngine,
    consumer: LocalEngine,
    turn: int,
    prompt: list[int],
    params: dict[str, object] | None,
) -> list[list[int]]:
    """The producer has to go on stepping while the consumer reads."""
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            producer.step()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        request = Request(f"d{turn}", prompt, MAX_TOKENS, kv_transfer_params=params, num_answers=4)
        return consumer.run(request)
    finally:
        stop.set()
        thread.join()


def crowd(architecture: Architecture, folder: Path) -> None:
    """More requests than blocks, prompts longer than a step, swapping, prefix hits."""
    prompts = [prompt_of(60 + 9 * index, index % 2) for index in range(6)]
    config = config_of(architecture, block_size=8, num_blocks=26, num_host_blocks=40)
    with engines(folder, config) as (engine,):
        answers = engine.run(
            *(Request(f"r{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(prompts))
        )
        assert answers == [expected(architecture, prompt) for prompt in prompts]
        assert engine.scheduler.blocks.get_prefix_cache_hit_rate() > 0
        assert engine.scheduler.blocks.swapped_blocks > 0
        groups = len(engine.scheduler.blocks.groups)
        assert engine.scheduler.blocks.get_num_free_gpu_blocks() == 26 * groups
        assert engine.scheduler.blocks.get_num_free_cpu_blocks() == 26 * groups


CASES: dict[str, Callable[[Path], None]] = {
    "llama handed over": lambda folder: hand_over("llama", folder),
    "hybrid handed over": lambda folder: hand_over("hybrid", folder),
    "mamba handed over": lambda folder: hand_over("mamba", folder),
    "mla handed over": lambda folder: hand_over("mla", folder),
    "llama crowd": lambda folder: crowd("llama", folder),
    "hybrid crowd": lambda folder: crowd("hybrid", folder),
}


NOT_HERE = {
    "encoder-decoder models, which minillm has none of": (
        "BlockBooks.get_cross_block_table",
        "BlockSpaceManager.free_cross",
        "CrossAttentionSpec.max_memory_usage_bytes",
        "EncoderOnlyAttentionSpec.max_memory_usage_bytes",
    ),
    "local attention in chunks, likewise": (
        "ChunkedLocalAttentionSpec.max_memory_usage_bytes",
        "ChunkedLocalAttentionSpec.uniform_kind",
    ),
    "kernels that read a shared prefix once": ("BlockBooks.get_common_computed_block_ids",),
    "engines with one cache group": ("BlockTable.add_row", "BlockTable.append_row"),
    "reading tables and sequences back": (
        "BlockTable.host_tensor",
        "BlockTable.numpy",
        "DeviceBlockTables.slot_mappings",
        "Sequence.extra_keys",
        "Sequence.token_ids",
    ),
    "groups of groups": ("UniformTypeKVCacheSpecs.uniform_kind",),
}
"""What no case here calls, by what an engine would call it for."""


def public_functions() -> dict[CodeType, str]:
    """Functions, methods and properties of the systems, with their names."""
    owners = [
        *(getattr(package, name) for package in PACKAGES for name in package.__all__),
        *CLASSES,
    ]
    found: dict[CodeType, str] = {}
    for owner in owners:
        members = [owner, *(vars(owner).values() if inspect.isclass(owner) else ())]
        for member in members:
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            function = getattr(function, "func", function)
            if getattr(function, "__isabstractmethod__", False):
                continue
            if inspect.isfunction(function) and not function.__name__.startswith("_"):
                found[function.__code__] = function.__qualname__
    return found


PACKAGES = (specs, block_table, device_block_table, block_manager)
CLASSES = (
    block_manager.BlockSpaceManager.__base__,
    KVPool,
    copy_kv_blocks,
    KVOutputAggregator.aggregate,
    engine_step.yield_req_data,
    backend.CacheLayout.views,
    backend.probe_layout,
    backend.current_attention_backend,
    backend.required_cache_layout,
)


@contextmanager
def recorded(called: set[CodeType]) -> Iterator[None]:
    """Which functions this thread calls, and those that it starts."""

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.slow
def test_an_engine_runs_every_public_function_of_the_cache(tmp_path: Path) -> None:
    called: set[CodeType] = set()
    with recorded(called):
        for case in CASES.values():
            case(tmp_path)
    unused = {name for code, name in public_functions().items() if code not in called}
    assert unused == {name for names in NOT_HERE.values() for name in names}
