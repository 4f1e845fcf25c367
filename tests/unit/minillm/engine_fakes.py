"""A connector that records calls, and ranks that keep in every slot the prefix whose last token was written there."""

import zlib

from kvconnector.cache.engine_step import yield_req_data
from minillm.cache_groups import PoolSizes, layer_groups
from minillm.config import CacheConfig, MixerConfig, ModelConfig
from minillm.messages import SampledToken, block_number
from minillm.request import Request
from minillm.request_blocks import RequestBlocks
from minillm.scheduler import Scheduler
from minillm.transfer import Params, SchedulerTransfer, TransferEvents

REMOTE: Params = {"do_remote_prefill": True}
OFFERED: Params = {"do_remote_decode": True}
NO_EVENTS = TransferEvents()
BLOCK_SIZE = 4
WINDOW = 6
CHUNK = 6


class RecordingTransfer(SchedulerTransfer):
    """Matches all but the last prompt token of requests with params; keeps blocks when asked to."""

    def __init__(self):
        super().__init__()
        self.loads = {}
        self.offers, self.ends = {}, {}
        self.aborted = []

    def matched_tokens(self, request_id, num_prompt, num_computed, params):
        external = max(0, num_prompt - 1 - num_computed) if params == REMOTE else 0
        return external, external > 0

    def after_alloc(self, request_id, target, num_external, num_encoder_tokens):
        self.loads[request_id] = (target, num_external)

    def is_offered(self, params):
        return params == OFFERED

    def finished(self, request_id, offer, num_tokens, num_encoder_tokens, params, *, end=b""):
        if offer is None:
            return False, None
        self.offers[request_id] = (offer, num_tokens)
        self.ends[request_id] = end
        return True, {"remote_request_id": request_id}

    def abort(self, request_id):
        self.aborted.append(request_id)


def make_groups(architecture="llama"):
    """Return the cache groups of a small model."""
    model = ModelConfig(
        architecture=architecture,
        num_layers=2,
        mixer=MixerConfig(sliding_window=WINDOW, attention_chunk=CHUNK),
        max_model_len=100,
    )
    return layer_groups(model, CacheConfig(block_size=BLOCK_SIZE, state_interval=BLOCK_SIZE))


def make_blocks(
    num_blocks, *, host=0, architecture="llama", prefix=True, step_tokens=64, lookahead=0
):
    """Make pools of `num_blocks` blocks, and `host` in host memory, for every group."""
    groups = make_groups(architecture)
    sizes = [PoolSizes(num_blocks=num_blocks, num_host_blocks=host) for _ in groups]
    return RequestBlocks(
        groups,
        sizes,
        watermark=0.0,
        step_tokens=step_tokens,
        prefix_caching=prefix,
        scatter_seed=1,
        lookahead=lookahead,
    )


def make(num_blocks=32, budget=64, policy="recompute", *, max_running=8, **pools):
    """Make a scheduler of a small engine; `pools` are options of `make_blocks`."""
    transfer = RecordingTransfer()
    scheduler = Scheduler(
        make_blocks(num_blocks, step_tokens=budget, **pools),
        transfer,
        max_model_len=100,
        max_batched_tokens=budget,
        max_running=max_running,
        failure_policy=policy,
    )
    return scheduler, transfer


def request(name, prompt, max_tokens=4, params=None):
    """Return a request whose prompt of `prompt` tokens is no other request's prefix."""
    tokens = [zlib.crc32(name.encode()) % 1000 + index for index in range(prompt)]
    return Request(name, tokens, max_tokens, kv_transfer_params=params)


def run_step(scheduler, events=NO_EVENTS):
    """Run one step on ranks that compute nothing."""
    inputs = scheduler.schedule().inputs
    tokens = {item.request_id: [SampledToken(0, -1.0)] for item in inputs if item.num_samples}
    return scheduler.update(inputs, tokens, events)


def next_token(tokens):
    """Return the token that the fake model samples after `tokens`."""
    return hash(tuple(tokens)) % 5


def continuation(request, answer=0):
    """Return the tokens that one answer of a request should get."""
    tokens = list(request.prompt)
    for index in range(request.max_tokens):
        tokens.append(next_token(tokens) + (0 if index else 7 * answer))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[len(request.prompt) :]


class FakeRanks:
    """Pools of `{block: {offset: prefix}}` by group, where a token's KV is the whole prefix that it closes."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.groups = scheduler.blocks.groups
        self.device = [{} for _ in self.groups]
        self.host = [{} for _ in self.groups]
        self.tables = {}

    def run(self, step):
        """Move, check that every sequence finds what it needs, write, sample."""
        for move in step.moves:
            self._move(move)
        for name in step.tables.finished_req_ids:
            del self.tables[name]
        for name, block_ids, is_whole in yield_req_data(step.tables, release=(0, 33)):
            added = block_ids or [[] for _ in self.groups]
            known = [[] for _ in self.groups] if is_whole else self.tables[name]
            self.tables[name] = [[*old, *new] for old, new in zip(known, added, strict=True)]
        assert len(self.tables) <= self.scheduler.max_running
        for index, count in enumerate(step.common_blocks):
            tables = [self.tables[item.request_id][index] for item in step.inputs]
            assert len({tuple(table[:count]) for table in tables}) == 1
            assert count * self.groups[index].block_size <= min(item.start for item in step.inputs)
        sampled = {}
        for item in step.inputs:
            stop = item.start + len(item.token_ids)
            tokens = self.scheduler.requests[item.request_id].tokens(0, stop)
            for index in range(len(self.groups)):
                ids = self.tables[item.request_id][index]
                self._check(index, ids, tokens[: item.start])
                self.write(index, ids, tokens, range(item.start, stop))
            if item.num_samples:
                sampled[item.request_id] = [
                    SampledToken(next_token(tokens) + 7 * answer, -1.0)
                    for answer in range(item.num_samples)
                ]
        return sampled

    def _move(self, move):
        source, target = self.device[move.pool], self.device[move.pool]
        source = self.host[move.pool] if move.kind == "in" else source
        target = self.host[move.pool] if move.kind == "out" else target
        for source_id, target_id in move.pairs:
            target[target_id] = dict(source.get(source_id, {}))

    def _check(self, index, ids, tokens):
        """Check that the next query finds all cached tokens that it sees."""
        group = self.groups[index]
        if group.kind == "state":
            if tokens:
                block = (len(tokens) - 1) // BLOCK_SIZE
                assert self.device[index][ids[block]][0] == tuple(tokens)
            return
        for position in group.retention.missing(0, len(tokens)):
            block, offset = divmod(position, BLOCK_SIZE)
            assert self.device[index][ids[block]][offset] == tuple(tokens[: position + 1])

    def write(self, index, ids, tokens, positions):
        """Write tokens into a request's blocks; a state block holds the state after the last one that is in it."""
        pool = self.device[index]
        for position in positions:
            block, offset = divmod(position, BLOCK_SIZE)
            slot = 0 if self.groups[index].kind == "state" else offset
            pool.setdefault(ids[block], {})[slot] = tuple(tokens[: position + 1])

    def load(self, request, target, num_valid):
        """Write each group's missing tokens into its blocks as a connector does, and wrong ones from `num_valid` on."""
        stop = request.num_computed
        tokens = request.prompt[: min(num_valid, stop)]
        tokens += [-1] * (stop - len(tokens))
        for index, group in enumerate(self.groups):
            ids = target.block_ids[index]
            missing = group.retention.missing(target.computed_tokens[index], stop)
            if group.kind == "state" and missing:
                assert len(ids) == 1
                self.device[index].setdefault(ids[0], {})[0] = tuple(tokens)
            elif missing:
                unknown = [-1] * target.first_blocks[index]
                self.write(index, unknown + ids, tokens, missing)

    def invalid_blocks(self, request, target, num_valid):
        """Return the numbers of the blocks in which such a load leaves wrong tokens."""
        found = set()
        for index, group in enumerate(self.groups):
            ids, first = target.block_ids[index], target.first_blocks[index]
            missing = group.retention.missing(target.computed_tokens[index], request.num_computed)
            if group.kind == "state" and missing and num_valid < missing.stop:
                found.add(block_number(index, ids[0], len(self.groups)))
            elif group.kind != "state":
                lost = {position // BLOCK_SIZE for position in missing if position >= num_valid}
                found |= {block_number(index, ids[i - first], len(self.groups)) for i in lost}
        return frozenset(found)

    def check_offer(self, prompt, offer, num_tokens):
        """Check that a consumer finds all tokens that it needs, without the last one, in the connector's terms."""
        stop = num_tokens - 1
        for index, group in enumerate(self.groups):
            ids, first = offer.block_ids[index], offer.first_blocks[index]
            for position in group.retention.missing(0, stop):
                block, offset = divmod(position, group.transfer_block_size)
                held = self.device[index][ids[block - first]]
                assert held[offset] == tuple(prompt[: position + 1])
