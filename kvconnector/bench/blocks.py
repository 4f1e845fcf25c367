"""`blocks`: slot mapping, staged writes and block allocation of one engine step, against the obvious loops."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconnector.bench import limits
from kvconnector.bench.contract import (
    Benchmark,
    BenchOptions,
    CaseResult,
    Measurement,
    Part,
    Progress,
    ResultMismatchError,
)
from kvconnector.cache import block_manager
from kvconnector.cache.block_manager import BlockSpaceManager, Device, SequenceGroup
from kvconnector.cache.block_table import MultiGroupBlockTable
from kvconnector.cache.slot_mapping import BlockGeometry, naive_slot
from kvconnector.errors import ConfigError

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
    num_tokens = options.tokens[0] if options.tokens else NUM_TOKENS
    cases: list[tuple[str, Callable[[], CaseResult]]] = [
        ("slot mapping", lambda: _slot_mapping(options, block, num_tokens)),
        ("staged writes", lambda: _staged_writes(options, block)),
        ("allocation", lambda: _allocation(options, block)),
    ]
    results = []
    for name, case in cases:
        progress(f"blocks: {name}")
        results.append(case())
    return results


def _counts(options: BenchOptions) -> dict[str, int]:
    return {"iterations": options.iterations or DEFAULT_ITERATIONS, "warmup": options.warmup}


@dataclass(frozen=True, slots=True)
class _Batch:
    """A step's tokens. `bounds`: where each request starts, `ids` are its blocks, alike in all groups."""

    block: int
    ids: list[list[int]]
    bounds: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]

    @property
    def max_model_len(self) -> int:
        return len(self.ids[0]) * self.block

    def slots(self) -> npt.NDArray[np.int64]:
        """Token by token, group by group, `[groups, tokens]`."""
        geometry = BlockGeometry(block_size=self.block, kernel_block_size=self.block)
        tokens = list(zip(self.rows.tolist(), self.positions.tolist(), strict=True))
        return np.array(
            [
                [naive_slot(self.ids[row], position, geometry) for row, position in tokens]
                for _ in range(NUM_GROUPS)
            ],
            dtype=np.int64,
        )


def _batch(seed: int, block: int, num_tokens: int) -> _Batch:
    """Tokens spread evenly over the requests, each request somewhere in its sequence."""
    rng = np.random.default_rng(seed)
    num_requests = min(NUM_REQUESTS, num_tokens)
    bounds = np.linspace(0, num_tokens, num_requests + 1).astype(np.int32)
    rows = np.repeat(np.arange(num_requests), np.diff(bounds))
    starts = rng.integers(0, PROMPT_TOKENS, num_requests)
    positions = (np.arange(num_tokens) - bounds[rows] + starts[rows]).astype(np.int64)
    blocks_per_request = -(-(int(positions.max()) + 1) // block)
    pool = rng.permutation(num_requests * blocks_per_request)
    ids = pool.reshape(num_requests, blocks_per_request).tolist()
    return _Batch(block, ids, bounds, rows, positions)


def _slot_mapping(options: BenchOptions, block: int, num_tokens: int) -> CaseResult:
    """Where the KV of a step's tokens goes."""
    batch = _batch(options.seed, block, num_tokens)
    expected = batch.slots()
    naive = limits.repeat(batch.slots, iterations=NAIVE_ITERATIONS, warmup=0)
    on_device = _slots_on_device(options, batch, expected)
    on_host = _slots_on_host(options, batch, expected, "variant" if on_device else "ours")
    return CaseResult(
        case=f"slots of {num_tokens} tokens of {len(batch.ids)} requests in {NUM_GROUPS} groups",
        measurements=(
            *on_device,
            on_host,
            Measurement(contender="naive loop", part="naive", samples_s=naive),
        ),
    )


def _slots_on_host(
    options: BenchOptions, batch: _Batch, expected: npt.NDArray[np.int64], part: Part
) -> Measurement:
    table = MultiGroupBlockTable(
        block_sizes=[batch.block] * NUM_GROUPS,
        max_num_reqs=len(batch.ids),
        max_model_len=batch.max_model_len,
        max_num_batched_tokens=len(batch.positions),
    )
    for row, ids in enumerate(batch.ids):
        table.add_row([ids] * NUM_GROUPS, row)
    found = np.stack(table.compute_slot_mapping(batch.rows, batch.positions))
    _refuse_difference("slots on the host", found, expected)
    samples = limits.repeat(
        lambda: table.compute_slot_mapping(batch.rows, batch.positions), **_counts(options)
    )
    return Measurement(contender="host tables", part=part, samples_s=samples)


def _tables(options: BenchOptions, **sizes: Any) -> Any:
    """Device block tables where the benchmark runs; None without torch."""
    try:
        from kvconnector.cache.device_block_table import DeviceBlockTables
    except ImportError:
        return None
    device = "cpu" if options.device == "cpu" else "cuda:0"
    return DeviceBlockTables(max_num_reqs=NUM_REQUESTS, device=device, **sizes)


def _slots_on_device(
    options: BenchOptions, batch: _Batch, expected: npt.NDArray[np.int64]
) -> list[Measurement]:
    """The batch's rows gathered and its slots computed, as each step does."""
    tables = _tables(
        options,
        block_sizes=[batch.block] * NUM_GROUPS,
        max_model_len=batch.max_model_len,
        max_num_batched_tokens=len(batch.positions),
    )
    if tables is None:
        return []
    import torch

    for row, ids in enumerate(batch.ids):
        tables.append_block_ids(row, [ids] * NUM_GROUPS, overwrite=True)
    tables.apply_staged_writes()
    requests = torch.arange(len(batch.ids), dtype=torch.int32, device=tables.device)
    starts = torch.from_numpy(batch.bounds).to(tables.device)
    places = torch.from_numpy(batch.positions).to(tables.device)

    def step() -> Any:
        tables.gather_block_tables(requests)
        return tables.compute_slot_mappings(starts, places)

    _refuse_difference("slots on the device", step().cpu().numpy(), expected)
    if options.device == "cpu":
        samples = limits.repeat(step, **_counts(options))
    else:
        samples = limits.gpu_times(step, device=str(tables.device), **_counts(options))
    return [Measurement(contender="device tables, rows and slots", part="ours", samples_s=samples)]


def _staged_writes(options: BenchOptions, block: int) -> CaseResult:
    """Every request gets one more block in every group, as when all of them fill a block in one step."""
    counts = _counts(options)
    num_steps = counts["iterations"] + counts["warmup"]
    tables = _tables(
        options,
        block_sizes=[block] * NUM_GROUPS,
        max_model_len=num_steps * block,
        max_num_batched_tokens=NUM_REQUESTS,
    )
    if tables is None:
        raise ConfigError("the benchmark of staged writes needs torch")
    import torch

    plain = torch.zeros(
        (NUM_GROUPS, NUM_REQUESTS, NAIVE_ITERATIONS), dtype=torch.int32, device=tables.device
    )
    staged_steps, plain_steps = count(), count()

    def staged() -> None:
        step = next(staged_steps)
        for row in range(NUM_REQUESTS):
            ids = [[_block_id(group, row, step)] for group in range(NUM_GROUPS)]
            tables.append_block_ids(row, ids, overwrite=False)
        tables.apply_staged_writes()
        _settle(tables.device)

    def one_by_one() -> None:
        step = next(plain_steps)
        for row in range(NUM_REQUESTS):
            for group in range(NUM_GROUPS):
                plain[group, row, step] = _block_id(group, row, step)
        _settle(tables.device)

    ours = limits.repeat(staged, **counts)
    naive = limits.repeat(one_by_one, iterations=NAIVE_ITERATIONS, warmup=0)
    requests = torch.arange(NUM_REQUESTS, dtype=torch.int32, device=tables.device)
    rows = np.arange(NUM_REQUESTS)[:, None]
    for group, found in enumerate(tables.gather_block_tables(requests)):
        for what, ids, steps in (
            ("staged", found, num_steps),
            ("plainly written", plain[group], NAIVE_ITERATIONS),
        ):
            expected = _block_id(group, rows, np.arange(steps))
            _refuse_difference(f"{what} block ids", ids[:, :steps].cpu().numpy(), expected)
    return CaseResult(
        case=f"one more block for {NUM_REQUESTS} requests in {NUM_GROUPS} groups",
        measurements=(
            Measurement(contender="staged, one launch", part="ours", samples_s=ours),
            Measurement(contender="one write at a time", part="naive", samples_s=naive),
        ),
    )


def _settle(device: Any) -> None:
    """Wait for the GPU, if it is one."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _block_id(group: int, row: Any, step: Any) -> Any:
    return (group + 1) * 100_000 + row * 257 + step


def _allocation(options: BenchOptions, block: int) -> CaseResult:
    """Prompts admitted and freed again; the time of one block."""
    blocks_per_prompt = -(-PROMPT_TOKENS // block)
    num_blocks = NUM_PROMPTS * blocks_per_prompt
    rng = np.random.default_rng(options.seed)
    prompts = [rng.integers(0, 32_000, PROMPT_TOKENS).tolist() for _ in range(NUM_PROMPTS)]
    measurements = [
        _manager_times(options, block, num_blocks, prompts, enable_caching)
        for enable_caching in (False, True)
    ]
    free = deque(range(num_blocks))

    def naive() -> None:
        references: dict[int, int] = {}
        tables = []
        for _ in prompts:
            table = [free.popleft() for _ in range(blocks_per_prompt)]
            for block_id in table:
                references[block_id] = 1
            tables.append(table)
        for table in tables:
            for block_id in reversed(table):
                references[block_id] -= 1
                if not references[block_id]:
                    del references[block_id]
                    free.append(block_id)

    counts = _counts(options)
    measurements.append(
        Measurement(
            contender="a queue of free ids and a dict of counts",
            part="naive",
            samples_s=limits.repeat(naive, **counts),
            batch=num_blocks,
        )
    )
    return CaseResult(
        case=f"one block of {block} tokens allocated and freed, {NUM_PROMPTS} prompts at a time",
        measurements=tuple(measurements),
    )


def _manager_times(
    options: BenchOptions,
    block: int,
    num_blocks: int,
    prompts: Sequence[Sequence[int]],
    enable_caching: bool,
) -> Measurement:
    manager = BlockSpaceManager(block, num_blocks, 0, watermark=0.0, enable_caching=enable_caching)
    groups = [
        SequenceGroup(str(index), [block_manager.Sequence(index, prompt)])
        for index, prompt in enumerate(prompts)
    ]

    def admit_and_free() -> None:
        for group in groups:
            manager.allocate(group)
        for group in groups:
            for seq in group.seqs():
                manager.free(seq)

    for group in groups:
        manager.allocate(group)
    held = [block_id for group in groups for block_id in manager.get_block_table(group.seqs()[0])]
    if len(set(held)) != num_blocks or manager.get_num_free_gpu_blocks():
        raise ResultMismatchError("a block was given out twice or not at all", blocks=len(held))
    for group in groups:
        manager.free(group.seqs()[0])
    samples = limits.repeat(admit_and_free, **_counts(options))
    if manager.get_num_free_gpu_blocks() != num_blocks:
        raise ResultMismatchError("freed blocks are missing", device=Device.GPU.value)
    return Measurement(
        contender=f"block manager, prefix caching {'on' if enable_caching else 'off'}",
        part="variant" if enable_caching else "ours",
        samples_s=samples,
        batch=num_blocks,
    )


def _refuse_difference(what: str, found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    if not np.array_equal(found, expected):
        raise ResultMismatchError(f"{what} differ from the loop's")


BENCHMARK = Benchmark(
    name="blocks",
    description="slot mapping, staged writes and allocation of a step, against the obvious loops",
    run=run,
)
