"""Prefill and decode engines of several ranks in this process, called as SGLang would call their ranks."""

import threading
import time
from contextlib import ExitStack, closing

import numpy as np
import pytest

from kvconnector.control.address import HostPort, parse_address
from kvconnector.errors import BlockIdError, KVConnectorError
from kvconnector.integrations.sglang.rank import RankTransfers
from kvconnector.integrations.sglang.settings import connector_config
from kvconnector.integrations.sglang.transfers import LoadedPrompt, SentPrompt, Stage
from kvconnector.topology import ModelDescription
from tests.sglang.pure.pools import ROW_WIDTHS, Pools
from tests.sglang.pure.registry import Registry
from tests.support.ports import free_ports

DEADLINE_S = 110.0
"""Generous, since the first test compiles the kernels."""
SMALL = {"KVCONNECTOR_STAGING_CHUNK_BYTES": f"{128 << 10}"}
"""Staging of the usual size would be 32 MiB of resident memory for each rank."""


class Gathered:
    """Gathers the payloads of all ranks, each of which runs in a thread of its own."""

    def __init__(self, num_ranks):
        self._barrier = threading.Barrier(num_ranks, timeout=DEADLINE_S)
        self._given = [None] * num_ranks

    def of(self, index):
        def gather(payload):
            self._given[index] = payload
            self._barrier.wait()
            found = list(self._given)
            self._barrier.wait()  # nobody gives the next one before all have these
            return found

        return gather


class Engine:
    """All ranks of one engine: of a whole server, whose registry it has, or one data-parallel rank of `dp`, its number
    and how many there are. `method` is the server's way to share requests among these. `cp_size`: how many copies of
    the ranks of tensor parallelism there are.
    """

    def __init__(
        self,
        model,
        *,
        is_prefill,
        port,
        tp_size=1,
        pp_size=1,
        cp_size=1,
        page_size=4,
        environ=None,
        pools=Pools,
        dp=(0, 1),
        method="follow_bootstrap_room",
        **of_pools,
    ):
        copies = [
            ((pp, tp), cp)
            for pp in range(pp_size)
            for cp in range(cp_size)
            for tp in range(tp_size)
        ]
        places = [place for place, _ in copies]
        config = connector_config(
            is_prefill=is_prefill,
            host="127.0.0.1",
            bootstrap_port=port,
            unique_name=f"decode-{time.monotonic_ns()}",
            own_address="127.0.0.1",
            environ=SMALL | (environ or {}),
            dp_rank=dp[0],
            dp_size=dp[1],
        )
        self.registry = Registry(port) if is_prefill and dp == (0, 1) else None
        shape = {"tp_size": tp_size, "pp_size": pp_size, "page_size": page_size, **of_pools}
        self.pools = [
            pools(model, rank=at, is_prefill=is_prefill, **shape, **({"replica": cp} if cp else {}))
            for at, cp in copies
        ]
        self.page_size = page_size
        self.ranks = [None] * len(places)
        shapes = [each.shape for each in self.pools]
        gathered = Gathered(len(places))

        def start(index):
            self.ranks[index] = RankTransfers(
                config,
                args=self.pools[index].args,
                shape=shapes[index],
                model=ModelDescription(
                    model="m", dtype=shapes[index].dtype, num_layers=model.layers
                ),
                dp_rank=dp[0],
                gather=gathered.of(index),
            )

        threads = [threading.Thread(target=start, args=(i,)) for i in range(len(places))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert None not in self.ranks
        for rank in self.ranks:
            rank.dp_rank, rank.dp_size = dp
            rank.follows_rooms = method == "follow_bootstrap_room"
        if is_prefill:
            self._register(port, places, dp, method)

    def _register(self, port, places, dp, method):
        (directory,) = [rank.directory for rank in self.ranks if rank.directory]
        where = parse_address(directory)
        tp_size = 1 + max(tp for _, tp in places)
        for rank, (pp, tp) in zip(self.ranks, places, strict=True):
            row = {"attn_tp_size": tp_size, "attn_tp_rank": tp, "pp_size": len(places) // tp_size}
            row |= {"pp_rank": pp, "rank_ip": where.host, "rank_port": where.port}
            row |= {"attn_dp_size": dp[1], "attn_dp_rank": dp[0], "system_dp_size": 1}
            rank.register(
                HostPort("127.0.0.1", port),
                row | {"system_dp_rank": 0, "load_balance_method": method},
            )

    def close(self):
        if self.registry is not None:
            self.registry.close()
        for rank in self.ranks:
            rank.teardown()


class Pair:
    """A prefill engine and a decode engine. Each call goes to all ranks of an engine."""

    def __init__(self, model, *, prefill=None, decode=None, environ=None, port=None):
        self.model, self.port = model, port or free_ports()
        self._stack = ExitStack()
        try:
            common = {"port": self.port, "environ": environ}
            self.prefill = self._open(is_prefill=True, **common | (prefill or {}))
            self.decode = self._open(is_prefill=False, **common | (decode or {}))
        except BaseException:
            self._stack.close()
            raise

    def _open(self, **options):
        return self._stack.enter_context(closing(Engine(self.model, **options)))

    def close(self):
        self._stack.close()

    def send(self, room):
        return [SentPrompt(rank, "", room) for rank in self.prefill.ranks]

    def want(self, room):
        address = f"127.0.0.1:{self.port}"
        found = [LoadedPrompt(rank, address, room) for rank in self.decode.ranks]
        for each in found:
            each.init(0)
        return found

    def compute(self, sent, pages, start, stop, *, is_last=False, slot=2, row=1, token=7):
        """Compute and publish the tokens from `start`, where a page begins, to `stop`; with the last tokens also states
        and metadata.
        """
        for transfer, pools in zip(sent, self.prefill.pools, strict=True):
            size = pools.page_size
            taken = pages[-(-start // size) : -(-stop // size)]
            for caches, base in ((pools.kv, 0), (pools.draft, 0), (pools.window, 4)):
                pools.write_tokens(caches, taken, range(start, stop), base, start)
            states = None
            if is_last:
                pools.write_end(slot, row, token)
                states = self._states(pools, pages, stop, 0, slot)
            transfer.init(len(pages), row)
            transfer.send(taken, states, stop - start)

    def load(self, wanted, pages, num_tokens, *, prefix=0, slot=3, row=2):
        """Load into `pages`, the first of which holds the sequence's first token, once every rank may allocate them."""
        self.until_started(*wanted)
        for transfer, pools in zip(wanted, self.decode.pools, strict=True):
            transfer.num_tokens, transfer.window_tokens = num_tokens, self.model.window_tokens
            taken = pages[prefix // pools.page_size : -(-num_tokens // pools.page_size)]
            states = self._states(pools, pages, num_tokens, prefix, slot)
            transfer.send_metadata(taken, row, states, prefix)

    def _states(self, pools, pages, num_tokens, prefix, slot):
        """Return a window's pages, and a state's slot, as SGLang names them."""
        states = []
        size = pools.page_size
        if self.model.windows:
            first = max(prefix, num_tokens - self.model.window_tokens) // size
            states.append(pages[first : -(-num_tokens // size)])
        if self.model.states:
            states.append([np.array(slot)])
        return states

    def until_over(self, *transfers):
        """Poll as SGLang does until each of them is done or has failed. Returns their stages."""
        return self._until({Stage.DONE, Stage.FAILED}, transfers)

    def until_started(self, *wanted):
        """Poll as SGLang does until none of them waits for the prefill engine."""
        self._until({*Stage} - {Stage.BOOTSTRAPPING}, wanted)

    def _until(self, reached, transfers):
        until_s = time.monotonic() + DEADLINE_S
        while True:
            stages = [transfer.poll() for transfer in transfers]
            if {*stages} <= reached:
                return stages
            assert time.monotonic() < until_s, stages
            time.sleep(0.001)

    def check(self, pages, num_tokens, *, prefix=0, slot=3, row=2, token=7):
        """Check that the decode engine's ranks have all the values that they should have."""
        for pools in self.decode.pools:
            kept = num_tokens - self.model.window_tokens
            spans = [(pools.kv, 0, prefix), (pools.window, 4, kept)]
            if self.prefill.pools[0].has_draft:
                spans.append((pools.draft, 0, prefix))
            for caches, base, start in spans:
                tokens = range(max(0, prefix, start), num_tokens)
                rows = pools.rows_of(pages, 0, tokens)
                for part, layers in enumerate(caches):
                    for layer, tensor in layers.items():
                        expected = pools.expected_pages(base + part, layer, tokens)
                        assert tensor[rows].equal(expected), (pools.shape, part, layer)
            for layer, tensor in pools.conv.items():
                assert tensor[slot].equal(pools.expected_conv(layer))
            for layer, tensor in pools.temporal.items():
                assert tensor[slot].equal(pools.expected_temporal(layer))
            self._check_metadata(pools, row, token)

    def _check_metadata(self, pools, row, token):
        brings_seeds = self.prefill.pools[0].has_draft
        for number, tensor in enumerate(pools.aux):
            is_seed = len(ROW_WIDTHS) <= number < len(pools.aux) - 1
            found, width = tensor[row].tolist(), tensor.shape[1]
            if not is_seed or (pools.has_draft and brings_seeds):
                assert found == [i + token + number for i in range(width)]
            elif pools.has_draft:
                assert not any(found), "an earlier request's seeds"


def loaded(pair, room, pages, others, num_tokens):
    """Let a prompt be sent from `pages` and loaded into `others`. Returns the receivers of all ranks."""
    sent, wanted = pair.send(room), pair.want(room)
    pair.compute(sent, pages, 0, num_tokens, is_last=True)
    pair.load(wanted, others, num_tokens)
    pair.until_over(*wanted, *sent)
    return wanted


def fail_alone(receiver):
    """Let a receiver fail, and no other learn of it."""
    receiver.stage, receiver.error = Stage.FAILED, BlockIdError("no such block")


def error_of(transfer):
    """Return the error that SGLang gets for a request that has failed, here or in another rank."""
    with pytest.raises(KVConnectorError) as raised:
        transfer.failure_exception()
    return raised.value
