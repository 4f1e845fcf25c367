"""Engines with caches as vLLM states them, for SGLang's ranks to read and to be read by, without either of them."""

import dataclasses
import time

import msgspec
import torch

from kvconnector.config import ConnectorConfig
from kvconnector.control.address import parse_address
from kvconnector.ids import Rank
from kvconnector.integrations.identity import Identity, PromptEnd, digest_of
from kvconnector.integrations.sglang.transfers import LoadedPrompt, transfer_names
from kvconnector.runtime import CacheGroup, Scheduler, Worker, view_of
from kvconnector.session import KVOutputAggregator
from kvconnector.topology import GroupGeometry, ModelDescription, PartGeometry, TpKVTopology
from tests.sglang.pure.pools import HEAD_DIM, Pools

DEADLINE_S = 60.0
VOCABULARY = 150_000
DTYPE = "float32"
"""What both state; the pools' values are integers of the same size."""


class NamedPools(Pools):
    """SGLang's pools, of a type that has a name in both kinds of engine."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.shape = dataclasses.replace(self.shape, dtype=DTYPE)


class OtherEngine:
    """An engine that is not SGLang's: blocks `[block, head, token, dim]` with K and V of a token side by side, as vLLM
    has them, or one latent.
    """

    role = "producer"

    def __init__(self, model, *, tp_size=1, block=8, num_blocks=24, dtype=DTYPE):
        self.model, self.block, self.name = model, block, f"vllm-{time.monotonic_ns()}"
        config = {"engine_id": self.name, "role": self.role, "control": {"insecure": True}}
        self.config = ConnectorConfig.from_mapping(config)
        self.workers, self.caches, self.scheduler = [], [], None
        self.sent, self.received, self.failed, self.extras = set(), set(), {}, {}
        described = ModelDescription(model="m", dtype=dtype, num_layers=model.layers)
        try:
            for tp_rank in range(tp_size):
                heads = TpKVTopology.heads_of(model.heads, tp_rank=tp_rank, tp_size=tp_size)
                parts = 1 if model.latent else 2
                shape = (num_blocks, len(heads), block, parts * HEAD_DIM)
                caches = {
                    layer: torch.zeros(shape, dtype=torch.int32) for layer in range(model.layers)
                }
                worker = Worker(self.config, rank=Rank(0, tp_rank), model=described)
                self.workers.append(worker)
                self.caches.append((heads, caches))
                worker.register([_group(model, heads, caches, block)])
            self.scheduler = Scheduler(self.config, [each.handshake() for each in self.workers])
        except BaseException:
            self.close()
            raise
        self._aggregator = KVOutputAggregator(tp_size)

    def step(self):
        """Take one engine step."""
        step = self.scheduler.build_step()
        for worker in self.workers:
            worker.start_step(step)
        output = self._aggregator.aggregate([worker.poll() for worker in self.workers])
        self.scheduler.update(output)
        self.sent |= output.finished_sending
        self.received |= output.finished_recving
        self.failed.update(output.failed_recving)
        self.extras.update(output.extras)

    def close(self):
        for worker in self.workers:
            worker.close()
        if self.scheduler is not None:
            self.scheduler.close()


class PrefillEngine(OtherEngine):
    """One that SGLang's decode engines read."""

    @property
    def where(self):
        """Return what a router sends to SGLang."""
        return f"{self.name}@{self.scheduler.address.removeprefix('tcp://')}"

    def begin(self, room):
        """Take a request whose transfer a router has named."""
        name, secret = transfer_names(room)
        params = {"do_remote_decode": True, "transfer_id": name, "transfer_secret": secret}
        self.scheduler.on_new_request(f"r{room}", params)
        self.step()

    def compute(self, room, blocks, num_tokens):
        """Compute and publish the first tokens."""
        for heads, caches in self.caches:
            _write(self.model, heads, caches, blocks[: -(-num_tokens // self.block)], num_tokens)
        self.scheduler.grow(f"r{room}", blocks=[blocks], num_tokens=num_tokens)
        self.step()

    def end(self, room, blocks, prompt, token):
        """Offer the whole prompt, with the token that was sampled if there is one to use."""
        computed = Identity(len(prompt), digest_of(prompt), {})
        end = PromptEnd(token, "", len(prompt), computed)
        self.scheduler.offer(
            f"r{room}", blocks=[blocks], num_tokens=len(prompt), extra=msgspec.msgpack.encode(end)
        )
        self.step()


class DecodeEngine(OtherEngine):
    """One that reads what SGLang's prefill engines compute."""

    role = "consumer"

    def want(self, room, prefill):
        """Look for a prompt of the engine whose directory service a router names."""
        name, secret = transfer_names(room)
        where = parse_address(next(rank.directory for rank in prefill.ranks if rank.directory))
        params = {"transfer_id": name, "transfer_secret": secret}
        params |= {"remote_engine_id": prefill.ranks[0].config.engine_id, "do_remote_prefill": True}
        params |= {"remote_host": where.host, "remote_port": where.port, "remote_public_key": ""}
        self.scheduler.on_new_request(f"r{room}", params)
        self.step()

    def load(self, room, blocks, num_tokens):
        """Load all tokens but the prompt's last, as an engine does that computes this one."""
        count, is_async = self.scheduler.matched_tokens(f"r{room}", num_tokens, 0)
        assert (count, is_async) == (num_tokens - 1, True)
        self.scheduler.load(f"r{room}", blocks=[blocks], num_tokens=count)
        self.step()

    def check(self, blocks, num_tokens):
        """Check that all ranks have the first tokens."""
        for heads, caches in self.caches:
            expected = {layer: torch.zeros_like(cache) for layer, cache in caches.items()}
            _write(self.model, heads, expected, blocks, num_tokens)
            for layer, cache in caches.items():
                assert cache[blocks].equal(expected[layer][blocks]), layer


def _group(model, heads, caches, block):
    names = ["latent"] if model.latent else ["k", "v"]
    geometry = GroupGeometry(
        block_size=block,
        layers=tuple(caches),
        parts=tuple(
            PartGeometry(
                name=name,
                total_heads=model.heads,
                head_start=heads.start,
                head_stop=heads.stop,
                head_dim=HEAD_DIM,
                item_size_bytes=4,
            )
            for name in names
        ),
    )
    views = {
        layer: tuple(view_of(part) for part in cache.split(HEAD_DIM, dim=3))
        for layer, cache in caches.items()
    }
    return CacheGroup(geometry, views, "cpu")


def _write(model, heads, caches, blocks, num_tokens):
    inner = torch.tensor([*heads]).view(-1, 1) * HEAD_DIM + torch.arange(HEAD_DIM)
    for layer, cache in caches.items():
        block = cache.shape[2]
        for number, part in enumerate(cache.split(HEAD_DIM, dim=3)):
            for token in range(num_tokens):
                values = model.code(number, layer, torch.tensor(token), inner)
                part[blocks[token // block], :, token % block] = values


def want(decode, prefill, room, prompt):
    """Let all ranks of SGLang's decode engine look for a prompt."""
    found = [LoadedPrompt(rank, prefill.where, room) for rank in decode.ranks]
    for each in found:
        each.vocab_size = VOCABULARY
        each.identity = each.kv_mgr.identities.begin(prompt, {})
        each.init(0)
    return found
