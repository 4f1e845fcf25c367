"""Engines whose caches have other types or scales: the bytes are those that the consumer would have stored itself."""

import dataclasses
import importlib
import json
import math
import mmap

import pytest
import torch
from msgspec.structs import replace

import kvconnector as kvc
from kvconnector.cli import main
from kvconnector.datapath.pump.copies_cpu import CpuCopies
from kvconnector.datapath.pump.launches import Launches
from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.planning import plan_transfer
from kvconnector.runtime.engine import joined_geometry
from kvconnector.runtime.tensors import cache_group
from kvconnector.topology import TpKVTopology, geometry
from kvconnector.topology.geometry import UNKNOWN_ROUNDING
from kvconnector_kernels.relayout import Conversion, relayout_naive
from kvconnector_kernels.relayout import convert as kernels
from tests.integration.runtime_pair import SETTINGS
from tests.support.waiting import until

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
LAYERS, HEADS, DIM, BLOCKS, TOKENS = 3, 4, 16, 12, 61


def mapped(axes, dtype, device):
    """Return zeros in memory that consumers can map, on the CPU in pages of their own."""
    if device != "cpu":
        return torch.zeros(axes, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(axes) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(axes)


def unknown_rule(group):
    """Return a group as an engine states it whose kernel stores fp8 by a rule of its own."""
    parts = tuple(replace(part, rounding=UNKNOWN_ROUNDING) for part in group.geometry.parts)
    return dataclasses.replace(group, geometry=replace(group.geometry, parts=parts))


class Engine:
    """An engine of one or two ranks that split the heads, with K and V of tensors' own types."""

    def __init__(
        self,
        name,
        role,
        dtype,
        *,
        block,
        nhd,
        scale=None,
        tp_size=1,
        rounding="nearest",
        unknown=False,
        device="cpu",
        **settings,
    ):
        self.rounding, self.device = rounding, device
        self.dtype, self.block, self.workers, self.caches = dtype, block, [], []
        config = kvc.Config.from_mapping({**SETTINGS, "engine_id": name, "role": role, **settings})
        share = HEADS // tp_size
        for rank in range(tp_size):
            tensors = {}
            for layer in range(LAYERS):
                axes = (BLOCKS, block, share, DIM) if nhd else (BLOCKS, share, block, DIM)
                pair = [mapped(axes, dtype, device) for _ in "kv"]
                tensors[layer] = tuple(each.transpose(1, 2) if nhd else each for each in pair)
            self.caches.append(tensors)
            scales = scale and {
                layer: [
                    scale(layer, part, range(rank * share, (rank + 1) * share)) for part in "kv"
                ]
                for layer in range(LAYERS)
            }
            group = cache_group(
                tensors,
                total_heads=HEADS,
                head_start=rank * share,
                scales=scales or None,
                rounding=rounding,
            )
            if unknown:
                group = unknown_rule(group)
            self.workers.append(kvc.Worker(config, rank=(0, rank), model="m@1"))
            self.workers[-1].register([group])
        self.scale = scale
        metadata = [worker.handshake() for worker in self.workers]
        self.geometry = joined_geometry(config, metadata)
        self.scheduler = kvc.Scheduler(config, metadata)
        self.aggregator = kvc.KVOutputAggregator(tp_size) if tp_size > 1 else None
        self.received, self.sent, self.failed, self.paths = set(), set(), {}, set()

    def step(self):
        step = self.scheduler.build_step()
        for worker in self.workers:
            worker.start_step(step)
        outputs = [worker.poll() for worker in self.workers]
        output = self.aggregator.aggregate(outputs) if self.aggregator else outputs[0]
        self.scheduler.update(output)
        self.received |= output.finished_recving
        self.sent |= output.finished_sending
        self.failed.update(output.failed_recving)
        self.paths |= {each.path for each in output.stats.transfers}

    def factors(self, layer, part):
        """The scales of all heads, `[head, 1]`."""
        found = [1.0] * HEADS
        if self.scale:
            found = list(self.scale(layer, part, range(HEADS)))
        found = found * HEADS if len(found) == 1 else found
        return torch.tensor(found, dtype=torch.float32).view(HEADS, 1)

    def bits(self, layer, part, blocks, num_tokens):
        """The numbers of a request's tokens, `[head, token, dim]`."""
        heads = [tensors[layer]["kv".index(part)] for tensors in self.caches]
        whole = torch.cat(
            [each.view(torch.uint8 if each.element_size() == 1 else torch.int16) for each in heads],
            1,
        )
        rows = whole[blocks].permute(1, 0, 2, 3).reshape(HEADS, -1, DIM)
        return rows[:, :num_tokens].contiguous().cpu()

    def close(self):
        for worker in self.workers:
            worker.close()
        self.scheduler.close()


def fill(engine):
    """Fill caches with any bits: infinities, NaN, denormals and -0 are among them."""
    generator = torch.Generator().manual_seed(7)
    for tensors in engine.caches:
        for pair in tensors.values():
            for tensor in pair:
                raw = tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16)
                raw.copy_(torch.randint(-(1 << 15), 1 << 15, raw.shape, generator=generator))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def stored(numbers, factors, scale, d):
    """What an engine has of another one's numbers `[head, token, dim]`, by the kernels' oracle."""
    elements = [str(each).removeprefix("torch.") for each in (numbers.dtype, d.dtype)]
    pairs = torch.cat([factors, scale], 1).view(1, HEADS, 2)
    conversion = Conversion(*elements, pairs.numpy(), "cpu", rounding=d.rounding)
    bits = {1: torch.uint8, 2: torch.int16}
    src = numbers.view(bits[numbers.element_size()]).unsqueeze(0)
    found = torch.zeros(src.shape, dtype=bits[d.dtype.itemsize])
    counts = {"num_heads": HEADS, "num_tokens": src.shape[2]}
    relayout_naive([src], [found], [0], [0], **counts, conversion=conversion)
    return found[0]


def check(p, d, source, target):
    for layer in range(LAYERS):
        for part in "kv":
            numbers = p.bits(layer, part, source, TOKENS).view(p.dtype)
            factors = p.factors(layer, part), d.factors(layer, part)
            found, want = d.bits(layer, part, target, TOKENS), stored(numbers, *factors, d)
            if d.rounding == "cast" and d.device != "cpu":
                want[want == 0xFF] = 0x7F  # a GPU's instructions know one NaN
            assert torch.equal(found, want)


def per_tensor(layer, part, heads):
    return (0.25 * (1 + layer) + 0.3 * (part == "v"),)


def per_head(layer, part, heads):
    return tuple(0.01 * (1 + head + layer) + (part == "v") for head in heads)


@pytest.fixture
def start():
    engines = []

    def make(*args, **more):
        engines.append(Engine(*args, **more))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def load(p, d, source, target):
    params = p.scheduler.offer("r", blocks=[source], num_tokens=TOKENS)
    d.scheduler.on_new_request("r", params)
    count, _ = d.scheduler.matched_tokens("r", TOKENS + 1, 0)
    d.scheduler.load("r", blocks=[target], num_tokens=count)

    def step():
        for engine in (p, d):
            engine.step()
            engine.workers[0].wait(0.002)

    until(lambda: "r" in d.received or d.failed, step)


@pytest.mark.parametrize("direct", ["always", "never"])
@pytest.mark.parametrize(
    "ours, theirs, sizes",
    [
        ((BF16, None), (E4M3, per_tensor), (1, 2)),
        ((FP16, None), (E5M2, per_head), (2, 1)),
        ((E4M3, per_head), (E4M3, per_tensor), (1, 1)),
        ((E5M2, per_tensor), (E4M3, per_head), (2, 1)),
        ((E4M3, per_head), (BF16, None), (1, 2)),
    ],
)
def test_a_consumer_gets_what_it_would_have_stored(start, direct, ours, theirs, sizes):
    paths = {"paths": {"direct": direct}, "staging": {"chunk_bytes": 4096}}
    p = start("p", "producer", ours[0], scale=ours[1], block=8, nhd=True, tp_size=sizes[0], **paths)
    fill(p)
    d = start(
        "d", "consumer", theirs[0], scale=theirs[1], block=16, nhd=False, tp_size=sizes[1], **paths
    )
    source, target = [9, 2, 11, 0, 5, 7, 1, 3], [3, 11, 0, 8]
    load(p, d, source, target)
    assert not d.failed
    check(p, d, source, target)
    assert d.paths == {"direct" if direct == "always" else "packed"}


@pytest.mark.parametrize("direct", ["always", "never"])
@pytest.mark.parametrize("rounding", ["truncated", "cast"])
def test_a_consumer_states_how_its_own_kernel_rounds(start, direct, rounding):
    paths = {"paths": {"direct": direct}}
    p = start("p", "producer", BF16, block=8, nhd=True, **paths)
    fill(p)
    d = start("d", "consumer", E5M2, scale=per_head, block=8, nhd=False, rounding=rounding, **paths)
    blocks = list(range(8))
    load(p, d, blocks, blocks)
    assert not d.failed
    check(p, d, blocks, blocks)


def test_a_packed_read_of_a_wider_cache_has_the_bytes_of_the_narrower_one(start):
    """In both directions, and planned alike by both ends."""
    engines = [
        start("wide", "producer", BF16, block=8, nhd=True).geometry,
        start("narrow", "producer", E4M3, block=8, nhd=True, scale=per_head).geometry,
    ]
    wide = engines[0]
    for producer, consumer in (engines, engines[::-1]):
        topology = TpKVTopology(consumer, Rank(0, 0))
        (read,) = plan_transfer(topology, producer, [range(TOKENS)], chunk_bytes=1 << 20)
        assert read.total_bytes == TOKENS * LAYERS * 2 * HEADS * DIM
    (read,) = plan_transfer(
        TpKVTopology(wide, Rank(0, 0)), wide, [range(TOKENS)], chunk_bytes=1 << 20
    )
    assert read.total_bytes == 2 * TOKENS * LAYERS * 2 * HEADS * DIM


@pytest.mark.parametrize("direct", ["always", "never"])
def test_both_ends_learn_in_the_greeting_what_they_will_convert(start, direct, monkeypatch):
    """On a GPU they compile their kernels then, and no read waits for that."""
    prepared = []
    monkeypatch.setattr(
        CpuCopies,
        "prepare",
        lambda self, remote, routes=(): prepared.extend(
            "direct" for each in routes if each.conversions
        ),
    )
    monkeypatch.setattr(
        CpuCopies,
        "prepare_chunks",
        lambda self, route, packing: prepared.append("pack" if packing else "unpack"),
    )
    paths = {"paths": {"direct": direct}}
    p = start("p", "producer", BF16, block=8, nhd=True, **paths)
    d = start("d", "consumer", E4M3, scale=per_tensor, block=8, nhd=True, **paths)
    load(p, d, list(range(8)), list(range(8)))
    assert sorted(prepared) == (["direct", "pack"] if direct == "always" else ["pack", "unpack"])


@pytest.mark.gpu
@pytest.mark.parametrize("direct", ["always", "never"])
@pytest.mark.parametrize(
    "ours, theirs, rounding",
    [
        ((BF16, None), (E4M3, per_head), "nearest"),
        ((BF16, None), (E4M3, per_tensor), "truncated"),
        ((BF16, None), (E5M2, per_tensor), "cast"),
        ((E4M3, per_head), (BF16, None), "nearest"),
        ((E4M3, per_head), (E5M2, per_tensor), "nearest"),
    ],
)
def test_no_read_on_a_gpu_compiles_its_kernels(
    *, start, direct, ours, theirs, rounding, monkeypatch
):
    compiled, prepared = [], Launches._prepared

    def counted(self, span):
        before = len(launch._kernels)
        job = prepared(self, span)
        compiled.append(len(launch._kernels) - before)
        return job

    monkeypatch.setattr(Launches, "_prepared", counted)
    launch = importlib.import_module("kvconnector_kernels.relayout.launch")
    launch._kernels.clear()
    place = {"device": "cuda:0", "paths": {"direct": direct}}
    p = start("p", "producer", ours[0], scale=ours[1], block=8, nhd=True, **place)
    fill(p)
    d = start(
        "d",
        "consumer",
        theirs[0],
        scale=theirs[1],
        block=16,
        nhd=False,
        rounding=rounding,
        **place,
    )
    source, target = [9, 2, 11, 0, 5, 7, 1, 3], [3, 11, 0, 8]
    load(p, d, source, target)
    assert not d.failed
    check(p, d, source, target)
    assert compiled
    assert not any(compiled)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"convert": "never"}, "convert=never in d"),
        ({"scale": None}, "d does not state a scale above 0"),
        ({"unknown": True}, r"d stores fp8 by a rule that is not known here (unknown)"),
        ({"dtype": torch.uint8}, "have no type that can be converted"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_reason(start, changes, reason):
    p = start("p", "producer", BF16, block=8, nhd=True)
    changes = {"dtype": E4M3, "scale": per_tensor} | changes
    d = start("d", "consumer", changes.pop("dtype"), block=8, nhd=True, **changes)
    load(p, d, list(range(8)), list(range(8)))
    (error,) = d.failed.values()
    assert reason in error


@pytest.mark.parametrize(
    "dtype, settings, expected",
    [
        ("dtype=float8_e5m2", {}, "ok: bfloat16 there, float8_e5m2 here: converted on the way"),
        ("dtype=float16", {}, "FAIL: float16 and bfloat16 are not converted"),
        ("dtype=float8_e5m2", {"KVCONNECTOR_CONVERT": "never"}, "FAIL: convert=never in here"),
        ("block=16", {}, "ok: blocks are copied"),
    ],
)
def test_the_doctor_says_what_is_converted_and_why_not(
    *, start, dtype, settings, expected, tmp_path, monkeypatch, capsys
):
    p = start("p", "producer", BF16, block=16, nhd=True)
    p.step()
    sizes = {"hidden_size": HEADS * DIM, "num_attention_heads": HEADS, "torch_dtype": "bfloat16"}
    layers = {"num_hidden_layers": LAYERS, "num_key_value_heads": HEADS}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **layers}))
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    peer = ["--peer", p.scheduler.address.removeprefix("tcp://")]
    model = ["--model", str(tmp_path / "config.json"), "--name", "m@1", "--decode", dtype]
    main(["doctor", "--json", *peer, *model])
    found = json.loads(capsys.readouterr().out)["findings"]
    said = [f"{each['verdict']}: {each['text']}" for each in found]
    verdict, _, text = expected.partition(": ")
    assert any(each.startswith(verdict) and text in each for each in said), said


def test_both_halves_know_the_same_rules():
    assert [*kernels.ROUNDINGS] == [*geometry.ROUNDINGS]
    assert [*kernels.ELEMENT_TYPES] == [*geometry.ELEMENTS]
    with pytest.raises(GeometryError, match="unknown rounding rule"):
        cache_group({0: (torch.zeros(2, 1, 4, 8, dtype=E4M3),)}, rounding="down")
