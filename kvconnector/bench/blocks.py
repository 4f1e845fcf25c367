"""`blocks`: slot mapping, staged writes and block allocation of one engine step, against the obvious loops."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.contract import (
    SEED,
    WARMUP,
    Benchmark,
    BenchOptions,
    CaseResult,
    Measurement,
    Progress,
)
from kvconnector.bench.limits import gpu_times, repeat
from kvconnector.cache import block_manager
from kvconnector.cache.block_manager import BlockSpaceManager, SequenceGroup
from kvconnector.cache.block_table import MultiGroupBlockTable
from kvconnector.cache.device_block_table import DeviceBlockTables
from kvconnector.cache.slot_mapping import BlockGeometry, naive_slot

NUM_REQUESTS = 256
NUM_TOKENS = 8192
NUM_GROUPS = 8
PROMPT_TOKENS = 2048
NUM_PROMPTS = 16
DEFAULT_ITERATIONS = 50
NAIVE_ITERATIONS = 3


def run(options: BenchOptions, progress: Progress) -> Sequence[CaseResult]:
    """The three cases; `--tokens` sets the tokens of the step, and `--decode` the block size."""
    block = options.decode.block if options.decode else 16
    results = []
    for name, case in (
        ("slot mapping", _slot_mapping),
        ("staged writes", _staged_writes),
        ("allocation", _allocation),
    ):
        progress(f"blocks: {name}")
        results.append(case(options, block, options.iterations or DEFAULT_ITERATIONS))
    return results


def _slot_mapping(options: BenchOptions, block: int, iterations: int) -> CaseResult:
    """Where the KV of a step's tokens goes: tokens spread evenly over the requests, each somewhere in its sequence."""
    import torch

    num_tokens = options.tokens[0] if options.tokens else NUM_TOKENS
    rng = np.random.default_rng(SEED)
    num_requests = min(NUM_REQUESTS, num_tokens)
    bounds = np.linspace(0, num_tokens, num_requests + 1).astype(np.int32)
    rows = np.repeat(np.arange(num_requests), np.diff(bounds))
    starts = rng.integers(0, PROMPT_TOKENS, num_requests)
    positions = (np.arange(num_tokens) - bounds[rows] + starts[rows]).astype(np.int64)
    per_request = -(-(int(positions.max()) + 1) // block)
    ids = rng.permutation(num_requests * per_request).reshape(num_requests, per_request).tolist()
    sizes: dict[str, Any] = {
        "block_sizes": [block] * NUM_GROUPS,
        "max_num_reqs": num_requests,
        "max_model_len": per_request * block,
        "max_num_batched_tokens": num_tokens,
    }
    host = MultiGroupBlockTable(**sizes)
    device = DeviceBlockTables(device=options.one_device, **sizes)
    for row, blocks in enumerate(ids):
        host.add_row([blocks] * NUM_GROUPS, row)
        device.append_block_ids(row, [blocks] * NUM_GROUPS, overwrite=True)
    device.apply_staged_writes()
    requests = torch.arange(num_requests, dtype=torch.int32, device=device.device)
    on_device = [torch.from_numpy(each).to(device.device) for each in (bounds, positions)]

    def device_step() -> Any:
        device.gather_block_tables(requests)
        return device.compute_slot_mappings(*on_device)

    def host_step() -> Any:
        return host.compute_slot_mapping(rows, positions)

    def naive() -> npt.NDArray[np.int64]:
        geometry = BlockGeometry(block_size=block, kernel_block_size=block)
        tokens = list(zip(rows.tolist(), positions.tolist(), strict=True))
        slots = [
            [naive_slot(ids[row], position, geometry) for row, position in tokens]
            for _ in range(NUM_GROUPS)
        ]
        return np.array(slots, dtype=np.int64)

    expected = naive()
    _refuse_difference("slots on the device", device_step().cpu().numpy(), expected)
    _refuse_difference("slots on the host", np.stack(host_step()), expected)
    if options.device == "cpu":
        samples = repeat(device_step, iterations)
    else:
        samples = gpu_times(device_step, options.one_device, iterations)
    name = "device tables, rows and slots"
    return CaseResult(
        case=f"slots of {num_tokens} tokens of {num_requests} requests in {NUM_GROUPS} groups",
        measurements=(
            Measurement(contender=name, kind="ours", samples_s=samples),
            _measured("host tables", "variant", repeat(host_step, iterations)),
            _measured("naive loop", "naive", repeat(naive, NAIVE_ITERATIONS, warmup=0)),
        ),
    )


def _staged_writes(options: BenchOptions, block: int, iterations: int) -> CaseResult:
    """Every request gets one more block in every group, as when all of them fill a block in one step."""
    import torch

    num_steps = iterations + WARMUP
    tables = DeviceBlockTables(
        device=options.one_device,
        block_sizes=[block] * NUM_GROUPS,
        max_num_reqs=NUM_REQUESTS,
        max_model_len=num_steps * block,
        max_num_batched_tokens=NUM_REQUESTS,
    )
    shape = (NUM_GROUPS, NUM_REQUESTS, NAIVE_ITERATIONS)
    plain = torch.zeros(shape, dtype=torch.int32, device=tables.device)
    staged_steps, plain_steps = count(), count()

    def settle() -> None:
        if options.device != "cpu":
            torch.cuda.synchronize(tables.device)

    def staged() -> None:
        step = next(staged_steps)
        for row in range(NUM_REQUESTS):
            ids = [[_block_id(group, row, step)] for group in range(NUM_GROUPS)]
            tables.append_block_ids(row, ids, overwrite=False)
        tables.apply_staged_writes()
        settle()

    def one_by_one() -> None:
        step = next(plain_steps)
        for row in range(NUM_REQUESTS):
            for group in range(NUM_GROUPS):
                plain[group, row, step] = _block_id(group, row, step)
        settle()

    ours = repeat(staged, iterations)
    naive = repeat(one_by_one, NAIVE_ITERATIONS, warmup=0)
    requests = torch.arange(NUM_REQUESTS, dtype=torch.int32, device=tables.device)
    rows, steps = np.arange(NUM_REQUESTS)[:, None], np.arange(num_steps)
    for group, found in enumerate(tables.gather_block_tables(requests)):
        expected = _block_id(group, rows, steps)
        _refuse_difference("staged block ids", found[:, :num_steps].cpu().numpy(), expected)
        few = expected[:, :NAIVE_ITERATIONS]
        _refuse_difference("plainly written block ids", plain[group].cpu().numpy(), few)
    return CaseResult(
        case=f"one more block for {NUM_REQUESTS} requests in {NUM_GROUPS} groups",
        measurements=(
            _measured("staged, one launch", "ours", ours),
            _measured("one write at a time", "naive", naive),
        ),
    )


def _block_id(group: int, row: Any, step: Any) -> Any:
    return (group + 1) * 100_000 + row * 257 + step


def _allocation(_options: BenchOptions, block: int, iterations: int) -> CaseResult:
    """Prompts admitted and freed again; the time of one block."""
    per_prompt = -(-PROMPT_TOKENS // block)
    num_blocks = NUM_PROMPTS * per_prompt
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(0, 32_000, PROMPT_TOKENS).tolist() for _ in range(NUM_PROMPTS)]
    free = deque(range(num_blocks))

    def naive() -> None:
        tables = [[free.popleft() for _ in range(per_prompt)] for _ in prompts]
        references = {block_id: 1 for table in tables for block_id in table}
        for table in tables:
            for block_id in reversed(table):
                references[block_id] -= 1
                if not references[block_id]:
                    del references[block_id]
                    free.append(block_id)

    measured = [
        _measured(
            f"block manager, prefix caching {'on' if caching else 'off'}",
            "variant" if caching else "ours",
            _manager_times(block, num_blocks, prompts, caching, iterations),
            num_blocks,
        )
        for caching in (False, True)
    ]
    name = "a queue of free ids and a dict of counts"
    measured.append(_measured(name, "naive", repeat(naive, iterations), num_blocks))
    return CaseResult(
        case=f"one block of {block} tokens allocated and freed, {NUM_PROMPTS} prompts at a time",
        measurements=tuple(measured),
    )


def _manager_times(
    block: int, num_blocks: int, prompts: Sequence[Sequence[int]], caching: bool, iterations: int
) -> tuple[float, ...]:
    manager = BlockSpaceManager(block, num_blocks, 0, watermark=0.0, enable_caching=caching)
    groups = [
        SequenceGroup(str(index), [block_manager.Sequence(index, prompt)])
        for index, prompt in enumerate(prompts)
    ]

    def admit() -> None:
        for group in groups:
            manager.allocate(group)

    def free() -> None:
        for group in groups:
            manager.free(group.seqs()[0])

    def admit_and_free() -> None:
        admit()
        free()

    admit()
    held = {each for group in groups for each in manager.get_block_table(group.seqs()[0])}
    if len(held) != num_blocks or manager.get_num_free_gpu_blocks():
        raise ResultMismatchError("a block was given out twice or not at all", blocks=len(held))
    free()
    samples = repeat(admit_and_free, iterations)
    if manager.get_num_free_gpu_blocks() != num_blocks:
        raise ResultMismatchError("freed blocks are missing")
    return samples


def _measured(name: str, kind: Any, samples_s: tuple[float, ...], batch: int = 1) -> Measurement:
    return Measurement(contender=name, kind=kind, samples_s=samples_s, batch=batch)


def _refuse_difference(what: str, found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    if not np.array_equal(found, expected):
        raise ResultMismatchError(f"{what} differ from the loop's")


BENCHMARK = Benchmark(
    name="blocks",
    description="slot mapping, staged writes and allocation of a step, against the obvious loops",
    run=run,
)
