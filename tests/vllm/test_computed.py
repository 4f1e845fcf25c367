"""Two engines serve prompts that share prefixes, from small pools, loaded at their end or while they are computed: each
step finds the rows and the states that it needs.
"""

import random
import time
from contextlib import ExitStack, closing
from unittest import mock

import pytest
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1 import kv_cache_interface as kv

from tests.vllm import scheduler_world as w
from tests.vllm.compressed_world import Engine
from tests.vllm.computed_world import Computing
from tests.vllm.model_world import grouped, states

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

DEADLINE_S = 200.0
PROMPTS, MOST_TOKENS = 20, 600


def attention(kind=kv.FullAttentionSpec, **options):
    return grouped(1, 16, kind, **options), "FLASH_ATTN"


def delta_net(mode, block_size=64):
    """A state and attention, in turns."""
    spec = grouped(1, 64, block_size=block_size)
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 1, 2, 16, 16, 4, 0)
    options = {"block_size": block_size, "mamba_cache_mode": "align"} if mode == "align" else {}
    found = {}
    for number in range(4):
        name = f"model.layers.{number}"
        if number % 2:
            found[f"{name}.self_attn.attn"] = spec, "FLASH_ATTN"
        else:
            found[f"{name}.linear_attn"] = states(shapes, spec.page_size_bytes, **options)
    return found


def layers(*of_kinds):
    return {f"model.layers.{n}.self_attn.attn": each for n, each in enumerate(of_kinds)}


WINDOW = attention(kv.SlidingWindowSpec, sliding_window=100)
CHUNK = attention(kv.ChunkedLocalAttentionSpec, attention_chunk_size=128)
CACHED, UNCACHED = {"enable_prefix_caching": True}, {"enable_prefix_caching": False}
INSIDE = {**CACHED, "prefix_match_unit": 16}
KINDS = {
    # layers and options of the prefill engine, and of the decode engine; blocks of both
    "full": ((layers(attention(), attention()), CACHED), None, (90, 70)),
    "windows alone": ((layers(WINDOW, WINDOW), CACHED), None, (90, 70)),
    "windows and full": (
        (layers(attention(), WINDOW, attention(), WINDOW), CACHED),
        None,
        (170, 120),
    ),
    "chunks and full": ((layers(attention(), CHUNK, attention(), CHUNK), CACHED), None, (170, 120)),
    "states without a prefix cache": ((delta_net("none"), UNCACHED), None, (60, 60)),
    "states in a prefix cache": ((delta_net("align"), CACHED), None, (80, 60)),
    "hits inside a block": ((delta_net("align"), INSIDE), None, (80, 60)),
    "a prefix cache on one side": (
        (delta_net("none"), UNCACHED),
        (delta_net("align"), CACHED),
        (60, 60),
    ),
}


@pytest.fixture
def pair(model):
    """Returns a prefill and a decode engine of a kind."""
    with ExitStack() as stack:

        def make(kind):
            prefill, decode, num_blocks = KINDS[kind]
            roles = (("kv_producer", "p", prefill), ("kv_consumer", "d", decode or prefill))
            engines = []
            for (role, name, (of_engine, options)), blocks in zip(roles, num_blocks, strict=True):
                size = max(
                    spec.block_size
                    for spec, _ in of_engine.values()
                    if not isinstance(spec, kv.MambaSpec)
                )
                made = Engine(
                    model,
                    role,
                    of_engine,
                    name=name,
                    seed=len(engines),
                    num_blocks=blocks,
                    block_size=size,
                    **options,
                )
                engines.append(Computing(stack.enter_context(closing(made))))
            return engines

        yield make


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_finds_what_it_reads(pair, kind):
    serve(*pair(kind), random.Random(kind))


def test_what_an_aborted_prompt_leaves_of_a_block_is_found_and_loaded(pair, monkeypatch):
    """vLLM has cached the beginning of a block, and offers it to connectors that store. `KVConnector` stores nothing,
    so the blocks are free at once.
    """
    prefill, decode = pair("hits inside a block")
    connector = prefill.engine.world.connector
    asked = mock.Mock(wraps=connector.register_finished_partial_tail)
    monkeypatch.setattr(connector, "register_finished_partial_tail", asked)
    tokens = list(range(150))
    begun = added(prefill, tokens, dict(w.REMOTE_DECODE), 1)
    while begun.num_computed_tokens < 144:
        prefill.step()
    # two blocks of 64 tokens, and the last of those by which vLLM names prefixes
    assert begun.num_computed_tokens == 144
    prefill.engine.world.abort(begun.request_id)
    ((_, _, tails),) = (call.args for call in asked.call_args_list)
    assert {tokens for _, _, tokens in tails} == {144}
    assert prefill.engine.world.used_blocks == 0
    again = added(prefill, tokens, dict(w.REMOTE_DECODE), 1)
    output = offered(prefill.step, again)
    assert output.prefill_stats.num_local_cached_tokens == 144
    request = added(decode, tokens, output.kv_transfer_params, 20)
    until_s = time.monotonic() + DEADLINE_S
    while not request.is_finished() and time.monotonic() < until_s:
        prefill.step()
        decode.step()
    assert len(decode.engine.worker.take_stats().transfers) == 1
    assert request.num_output_tokens == 20


def serve(prefill, decode, draw):
    """Serve prompts, a few at a time. Many begin as others did, or continue an answer, as a chat's next turn does; half
    are loaded while they are computed.
    """
    asked = prefill.engine.world.add(20, dict(w.REMOTE_DECODE), max_tokens=1)
    params = offered(prefill.step, asked).kv_transfer_params
    where = {key: params[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
    known = [[draw.randrange(900) for _ in range(300)]]
    waiting, running, begun, ended = {}, [], 0, 0
    until_s = time.monotonic() + DEADLINE_S
    while ended < PROMPTS:
        assert time.monotonic() < until_s, (begun, ended)
        if begun < PROMPTS and len(waiting) + len(running) < 3:
            begun += 1
            before = draw.choice(known[-4:])
            lengths = [0, 128, 256, len(before), len(before), draw.randrange(len(before))]
            more = draw.randrange(1, 150)
            tokens = before[: draw.choice(lengths)] + [draw.randrange(900) for _ in range(more)]
            tokens = tokens[-MOST_TOKENS:]
            name = {"transfer_id": f"t{begun}", "transfer_secret": w.SECRET}
            if draw.random() < 0.5:
                added(prefill, tokens, {**w.REMOTE_DECODE, **name}, 1)
                follow = {"do_remote_prefill": True, **name, **where}
                running.append(added(decode, tokens, follow, draw.randrange(1, 40)))
            else:
                request = added(prefill, tokens, dict(w.REMOTE_DECODE), 1)
                waiting[request.request_id] = tokens
        for output in prefill.step():
            if output.finish_reason is not None and output.request_id in waiting:
                tokens = waiting.pop(output.request_id)
                assert output.kv_transfer_params
                params = output.kv_transfer_params
                running.append(added(decode, tokens, params, draw.randrange(1, 40)))
        decode.step()
        time.sleep(0.0005)
        for request in [each for each in running if each.is_finished()]:
            running.remove(request)
            known.append(list(request.all_token_ids))
            ended += 1
    stats = decode.engine.worker.take_stats()
    assert len(stats.transfers) >= PROMPTS // 2  # of a prompt that is cached nothing is loaded
    assert not stats.failures


def added(engine, tokens, params, max_tokens):
    forms = {"prompt_token_ids": list(tokens)}
    return engine.engine.world.add_with(len(tokens), params, forms=forms, max_tokens=max_tokens)


def offered(step, request):
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        for output in step():
            if output.request_id == request.request_id and output.kv_transfer_params:
                return output
    raise AssertionError("nothing was offered")
