"""Engines without a model that compute: what a step stores for a token is a function of the tokens up to it.

So it is known what every row and every state has to be, and all that a step's attention or its recurrence would read is
compared: a stale row of a prefix cache, of a recycled block or of a load is found by the first step that would use it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.outputs import KVConnectorOutput

from tests.vllm.compressed_world import Engine


def content(what: str, tokens: Sequence[int], nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return what a layer's head stores for the last of these tokens, or its state after them."""
    text = what.encode() + np.array(tokens, np.int64).tobytes()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return np.frombuffer(digest * (nbytes // 8 + 1), np.uint8)[:nbytes]


def first_read(spec: kv.KVCacheSpec, num_tokens: int) -> int:
    """Return the first token that the token after `num_tokens` others attends to."""
    if isinstance(spec, kv.SlidingWindowSpec):
        return max(0, num_tokens - spec.sliding_window + 1)
    if isinstance(spec, kv.ChunkedLocalAttentionSpec):
        return num_tokens // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


class Computing:
    """An engine whose steps compute. Its caches have whole heads in rows, or states."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scheduler = engine.world.scheduler
        self._base = min(tensor.data_ptr() for tensor in engine.caches.values())

    def step(self) -> list[Any]:
        """Take a step. Returns the requests' outputs."""
        engine, scheduler = self.engine, self.scheduler
        planned = scheduler.schedule()
        for copy in getattr(planned, "kv_cache_block_copies", None) or ():
            self._copy(copy.src_block_id, copy.dst_block_id)
        steps = []
        for name, count in planned.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            stop = request.num_computed_tokens  # which vLLM advances when it plans
            table = scheduler.kv_cache_manager.get_block_ids(name)
            steps.append((list(request.all_token_ids), stop - count, stop, table))
        # a step's attention reads what the same step has stored for other requests, too; a recurrence does not
        for tokens, start, _, tables in steps:
            self._compare(tokens, start, tables, are_states=True)
        for tokens, start, stop, tables in steps:
            self._store(tokens, start, stop, tables)
        for tokens, start, _, tables in steps:
            self._compare(tokens, start, tables, are_states=False)
        engine.worker.start_step(planned.kv_connector_metadata)
        results, report = engine.worker.finished(), engine.worker.take_report()
        reported = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=report,
        )
        return list(engine.world.complete(planned, reported))

    def _layers(self) -> Iterator[tuple[int, str, Any, Any]]:
        for number, group in enumerate(self.engine.cache_config.kv_cache_groups):
            for layer in group.layer_names:
                spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(layer)
                yield number, layer, spec or group.kv_cache_spec, self.engine.caches[layer]

    def _at(self, tensor: Any, *index: int) -> int:
        steps = zip(index, tensor.stride(), strict=False)
        offset = sum(number * stride for number, stride in steps) * tensor.element_size()
        return int(tensor.data_ptr()) - self._base + int(offset)

    def _places(
        self, spec: Any, tensor: Any, layer: str, table: Sequence[int], token: int
    ) -> Iterator[tuple[str, Any]]:
        """Yield what a token's rows are called, and their bytes: those of each head."""
        block, row = table[token // spec.block_size], token % spec.block_size
        assert block, (layer, token, "is in no block")
        nbytes = tensor.shape[3] * tensor.element_size()
        for head in range(tensor.shape[1]):
            at = self._at(tensor, block, head, row)
            yield f"{layer} {head}", self.engine.memory[at : at + nbytes]

    def _state(self, spec: Any, tensor: Any, table: Sequence[int], num_tokens: int) -> Any:
        """Return the bytes of the state after these tokens."""
        is_aligned = spec.mamba_cache_mode == "align"
        block = table[-(-num_tokens // spec.block_size) - 1 if is_aligned else 0]
        assert block, (num_tokens, "have no state")
        at = self._at(tensor, block)
        return self.engine.memory[at : at + spec.state_content_size_bytes]

    def _compare(
        self, tokens: Sequence[int], start: int, tables: Sequence[Any], *, are_states: bool
    ) -> None:
        for group, layer, spec, tensor in self._layers():
            if isinstance(spec, kv.MambaSpec) != are_states or not start:
                continue
            if are_states:
                found = self._state(spec, tensor, tables[group], start)
                wanted = content(layer, tokens[:start], len(found))
                assert (found == wanted).all(), (layer, start, "another state")
                continue
            for token in range(first_read(spec, start), start):
                for what, row in self._places(spec, tensor, layer, tables[group], token):
                    wanted = content(what, tokens[: token + 1], len(row))
                    assert (row == wanted).all(), (layer, token, start, "another row")

    def _store(self, tokens: Sequence[int], start: int, stop: int, tables: Sequence[Any]) -> None:
        for group, layer, spec, tensor in self._layers():
            if isinstance(spec, kv.MambaSpec):
                found = self._state(spec, tensor, tables[group], stop)
                found[:] = content(layer, tokens[:stop], len(found))
                continue
            for token in range(start, stop):
                for what, row in self._places(spec, tensor, layer, tables[group], token):
                    row[:] = content(what, tokens[: token + 1], len(row))

    def _copy(self, source: int, target: int) -> None:
        for _, _, spec, tensor in self._layers():
            places = self._at(tensor, source), self._at(tensor, target)
            from_, to = (slice(at, at + spec.page_size_bytes) for at in places)
            self.engine.memory[to] = self.engine.memory[from_]
