"""The demo's engines in one process, and the functions of the cache, the layouts, the topology, the aggregator and the
receive transforms that they call.

`python -m tests.unit.minillm.seed_cases FOLDER` runs all cases, and writes the names of the public functions that the
program under test calls, not the test itself, into `FOLDER/called`.
"""

import importlib
import inspect
import io
import json
import pkgutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvconnector import cache, layout, topology
from kvconnector.layout import watermark
from kvconnector.session import completion
from kvconnector.topology import conversion
from kvconnector_kernels.relayout import receive
from minillm.config import CacheConfig, EngineConfig, MixerConfig, ModelConfig
from minillm.request import Request
from tests.support.local_engines import (
    LocalEngine,
    encoder_prompt_of,
    generate,
    prompt_of,
    token_ids,
)

MAX_TOKENS = 6


def model_of(architecture):
    return ModelConfig(
        architecture=architecture,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_layers=4,
        head_dim=16,
        mixer=MixerConfig(latent_rank=24, sliding_window=21, attention_chunk=28),
        max_model_len=512,
    )


def config_of(architecture, role="mono", *, tables="host", direct="always", **cache):
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
            "connector": {"paths": {"direct": direct}},
        },
        EngineConfig,
    )


def expected(architecture, prompt):
    """Return the tokens that follow the prompt."""
    return token_ids(generate(model_of(architecture), prompt, MAX_TOKENS))


@contextmanager
def engines(folder, *configs):
    with ExitStack() as stack:
        yield [stack.enter_context(closing(LocalEngine(config, folder))) for config in configs]


def hand_over(architecture, folder, direct="always"):
    """Prefill on one engine; several answers (with an encoder, one) on another with other blocks, which finds the
    prompt again the second time.
    """
    num_answers = 1 if model_of(architecture).is_encoder_decoder else 4
    prefill = config_of(architecture, "prefill", direct=direct, block_size=16, layout="CROSS")
    decode = config_of(
        architecture,
        "decode",
        tables="device",
        direct=direct,
        block_size=8,
        layout="NHD",
        kernel_block_size=4,
        lookahead=3,
        state_interval=8,
    )
    with engines(folder, prefill, decode) as (producer, consumer):
        for turn, prompt in enumerate((prompt_of(75), [*prompt_of(75), *prompt_of(9, 1)])):
            params = offered_by(producer, architecture, f"p{turn}", prompt)
            asked = (architecture, f"d{turn}", prompt, MAX_TOKENS, params)
            request = request_of(*asked, num_answers=num_answers)
            answers = consumer_answers(producer, consumer, request)
            assert answers[0] == expected(architecture, prompt)
            assert len({answer[0] for answer in answers}) == len(answers)
            for answer in answers[1:]:
                rest = expected(architecture, [*prompt, answer[0]])
                assert answer[1:] == rest[: MAX_TOKENS - 1]
        if num_answers > 1:
            assert consumer.scheduler.blocks.copied_blocks > 0
            assert consumer.scheduler.blocks.common_reads > 0


def request_of(architecture, name, prompt, max_tokens, params=None, **more):
    """Return a request, with an encoder input for a model that has one."""
    more["encoder_prompt"] = encoder_prompt_of(model_of(architecture), prompt)
    return Request(name, prompt, max_tokens, kv_transfer_params=params, **more)


def offered_by(producer, architecture, name, prompt):
    """Return the params of a prompt that the producer has computed."""
    producer.run(request_of(architecture, name, prompt, 1, {"do_remote_decode": True}))
    return producer.params[name]


def consumer_answers(producer, consumer, request):
    """Step both engines until the consumer answers: the producer has to keep stepping while it reads."""
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            producer.step()

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        try:
            return [token_ids(answer) for answer in consumer.run(request)]
        finally:
            stop.set()
            serving.result()  # an error of the producer fails the case, too


def crowd(architecture, folder, **host):
    """Run more requests than blocks allow, prompts longer than a step, swapping, and prefix hits."""
    prompts = [prompt_of(60 + 9 * index, index % 2) for index in range(6)]
    config = config_of(architecture, block_size=8, num_blocks=26, num_host_blocks=40, **host)
    with engines(folder, config) as (engine,):
        answers = engine.run(
            *(Request(f"r{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(prompts))
        )
        assert [*map(token_ids, answers)] == [expected(architecture, prompt) for prompt in prompts]
        assert engine.scheduler.blocks.get_prefix_cache_hit_rate() > 0
        assert engine.scheduler.blocks.swapped_blocks > 0
        engine.scheduler.blocks.reset_prefix_cache()
        (answer,) = engine.run(Request("again", prompts[0], MAX_TOKENS))
        assert token_ids(answer) == expected(architecture, prompts[0])
        groups = len(engine.scheduler.blocks.groups)
        assert engine.scheduler.blocks.get_num_free_gpu_blocks() == 26 * groups
        assert engine.scheduler.blocks.get_num_free_cpu_blocks() == 26 * groups


def refused_load(architecture, folder):
    """Have a decode engine compute what a refused load did not bring. Returns the request's transfer statistics."""
    prefill = config_of(architecture, "prefill", block_size=16)
    decode = config_of(architecture, "decode", block_size=8, state_interval=8)
    with engines(folder, prefill, replace(decode, failure_policy="recompute")) as pair:
        producer, consumer = pair
        prompt = prompt_of(75)
        consumer.run(request_of(architecture, "first", prompt[:49], 1))
        params = offered_by(producer, architecture, "offer", prompt)
        refused = {**params, "transfer_secret": "0" * 32}
        load = request_of(architecture, "load", prompt, MAX_TOKENS, refused)
        (answer,) = consumer_answers(producer, consumer, load)
        assert answer == expected(architecture, prompt)
        return consumer.transfer.stats["load"]


def plan(folder):
    """Make a plan for two engines."""
    from kvconnector.cli import main

    shapes = "--prefill tp=2 --decode pp=2,block=64 --tokens 2000"
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["plan", "--model", "qwen3-8b", "--json", *shapes.split()]) == 0
    report = json.loads(printed.getvalue())["comparison"]
    assert report["ratios"] == {"tp": "1/2", "pp": "2", "block size": "4"}
    assert report["connections"] == 4
    assert (report["replicated"], report["needs_relayout"]) == ([], True)


CASES = {
    "plan": plan,
    "demo: llama crowd": lambda folder: crowd("llama", folder),
    "demo: hybrid crowd, laid out anew": lambda folder: crowd(
        "hybrid", folder, host_layout="HND", host_block_size=4
    ),
    "demo: llama handed over": lambda folder: hand_over("llama", folder),
    "demo: chunks handed over": lambda folder: hand_over("chunked-local", folder),
    "demo: encoder handed over": lambda folder: hand_over("encoder-decoder", folder),
    "demo: hybrid handed over": lambda folder: hand_over("hybrid", folder),
    "demo: mamba handed over": lambda folder: hand_over("mamba", folder),
    "demo: compressed rows handed over": lambda folder: hand_over("compressed", folder),
    "demo: a refused load": lambda folder: refused_load("llama", folder),
    "demo: mla handed over, packed": lambda folder: hand_over("mla", folder, direct="never"),
}


def public_functions():
    """Return public functions, methods, properties and calls of objects of these rooms, but no oracles, by name."""
    found = {}
    modules = [
        importlib.import_module(info.name)
        for package in (cache, layout, topology)
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        # of streams, which the session's tests cover, and of engines of two element types, which the demo has none of
        if info.name not in (watermark.__name__, conversion.__name__)
    ]
    for module in (*modules, completion, receive):
        for name, owner in vars(module).items():
            if getattr(owner, "__module__", None) == module.__name__ and not name.startswith("_"):
                found.update(_functions_of(owner, module.__name__))
    return found


def _functions_of(owner, module):
    if getattr(owner, "_is_protocol", False):
        return {}
    found = {}
    for member in (owner, *(vars(owner).values() if inspect.isclass(owner) else ())):
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        function = getattr(function, "func", getattr(function, "__wrapped__", function))
        if not inspect.isfunction(function):
            continue
        if function.__name__.startswith(("_", "naive_")) and function.__name__ != "__call__":
            continue
        if not getattr(function, "__isabstractmethod__", False):
            found[f"{module.removeprefix('kvconnector.')}.{function.__qualname__}"] = function
    return found


def main(folder):
    """Run all cases, and write the names of the public functions that they call, in any thread."""
    names = {id(function.__code__): name for name, function in public_functions().items()}
    called = set()

    def note(frame, _event, _argument):
        name = names.get(id(frame.f_code))
        caller = frame.f_back.f_globals["__name__"] if name and frame.f_back else "__main__"
        if caller != "__main__" and not caller.startswith("tests."):
            called.add(name)

    threading.settrace(note)
    sys.settrace(note)
    for number, case in enumerate(CASES.values()):
        place = Path(folder, str(number))
        place.mkdir()
        case(place)
    sys.settrace(None)
    Path(folder, "called").write_text("\n".join(called))


if __name__ == "__main__":
    main(*sys.argv[1:])
