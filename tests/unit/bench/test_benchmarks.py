"""Every benchmark with tiny sizes: it runs, reports every contender, and reports nothing for a wrong result."""

from pathlib import Path

import pytest

import kvconnector_kernels.relayout
from kvconnector.bench import blocks, deployments, gil, limits, planning, relayout, transfer_limits
from kvconnector.bench.contract import BenchOptions, Peer, ResultMismatchError, Staging, Ways
from kvconnector.bench.registry import BENCHMARKS, benchmark_named
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.cache import slot_mapping
from kvconnector.errors import ConfigError, PeerLostError
from kvconnector.planning import PeerPlan, TransferPlan

README = Path(__file__).parents[3] / "README.md"
MODEL = ModelShape(name="tiny", num_layers=3, num_kv_heads=2, head_dim=16)
MLA = ModelShape(name="tiny-mla", num_layers=2, num_kv_heads=1, head_dim=24, is_mla=True)


def _options(**fields):
    return BenchOptions(
        **{
            "model": MODEL,
            "tokens": (70,),
            "iterations": 2,
            "warmup": 1,
            "timeout_s": 60.0,
            **fields,
        }
    )


def _run(name, **fields):
    said: list[str] = []
    cases = benchmark_named(name).run(_options(**fields), said.append)
    assert said
    for case in cases:
        assert all(each.samples_s for each in case.measurements)
        assert all(sample > 0 for each in case.measurements for sample in each.samples_s)
        assert [each.part for each in case.measurements].count("ours") == 1
    return cases


def _parts(case):
    return {each.part for each in case.measurements}


def test_an_unknown_benchmark_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="relayout"):
        benchmark_named("speed")
    assert set(BENCHMARKS) == {"relayout", "plan", "transfer", "request", "gil", "blocks"}


def test_the_readme_names_every_benchmark():
    rows = [line.split("|")[1] for line in README.read_text().splitlines() if line.count("|") == 3]
    named = {name for row in rows for name in row.replace("`", " ").replace(",", " ").split()}
    assert set(BENCHMARKS) <= named


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("model", [MODEL, MLA], ids=lambda model: model.name)
def test_relayout(model, scattered):
    (case,) = _run("relayout", model=model, scattered=scattered)
    assert _parts(case) == {"ours", "naive", "limit"}
    # rounded up to whole blocks of both sides
    assert case.ours.nbytes == 128 * model.token_bytes


def test_relayout_takes_any_two_shapes():
    (case,) = _run(
        "relayout",
        prefill=EngineShape(tp=2, block=24, layout="NHD"),
        decode=EngineShape(block=16, layout="HND"),
    )
    assert case.ours.nbytes == 96 * MODEL.token_bytes


def test_a_copy_that_misses_a_byte_reports_no_time(monkeypatch):
    copy = kvconnector_kernels.relayout.relayout
    monkeypatch.setattr(
        relayout,
        "relayout",
        lambda src, dst, **counts: copy(src, dst, **{**counts, "num_heads": 1}),
    )
    with pytest.raises(ResultMismatchError, match="one fused copy"):
        _run("relayout")


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize("model", [MODEL, MLA], ids=lambda model: model.name)
def test_plan(model):
    cases = _run(
        "plan",
        model=model,
        prefill=EngineShape(tp=2),
        decode=EngineShape(block=64),
        tokens=(20, 300),
    )
    assert "naive" in _parts(cases[0])
    assert [case.case.split(",")[0] for case in cases[1:]] == [
        "1 blocks of 64 tokens",
        "5 blocks of 64 tokens",
        "starting a request of 20 tokens in 1 blocks on the engine's thread",
    ]
    assert len(cases[-1].measurements) == 3
    line = benchmark_named("plan").headline(cases)
    assert "x the naive speed; 1 blocks of 64 tokens" in line
    assert "on the engine's thread" in line


@pytest.mark.integration
def test_a_plan_for_one_of_the_ranks_that_share_tokens():
    cases = _run(
        "plan",
        prefill=EngineShape(tp=2, dcp=2, interleave=4),
        decode=EngineShape(tp=2, dcp=2),
        tokens=(20, 300),
    )
    assert cases[2].case.startswith("10 blocks of 32 tokens")


def test_a_plan_that_misses_a_read_reports_no_time(monkeypatch):
    whole = PeerPlan.plan

    def partial(self, ranges, *, chunk_bytes):
        return TransferPlan(reads=whole(self, ranges, chunk_bytes=chunk_bytes).reads[1:])

    monkeypatch.setattr(PeerPlan, "plan", partial)
    with pytest.raises(ResultMismatchError):
        _run("plan", prefill=EngineShape(tp=2))
    monkeypatch.setattr(planning, "_check_against_naive", lambda *_: None)
    with pytest.raises(ResultMismatchError, match="every head of every layer"):
        _run("plan", prefill=EngineShape(tp=2))


def test_blocks():
    slots, writes, allocation = _run("blocks", tokens=(600,))
    for case in (slots, writes, allocation):
        assert {"ours", "naive"} <= _parts(case)
    assert allocation.ours.batch > 1


def test_wrong_slots_report_no_time(monkeypatch):
    naive_slot = slot_mapping.naive_slot
    monkeypatch.setattr(blocks, "naive_slot", lambda *args: naive_slot(*args) + 1)
    with pytest.raises(ResultMismatchError, match="slots on the device"):
        _run("blocks", tokens=(40,))


def test_memcpy_has_a_time_for_every_repetition():
    measured = limits.memcpy(5000, iterations=2, warmup=0)
    assert measured.part == "limit"
    assert len(measured.samples_s) == 2
    assert measured.gigabytes_per_s


def test_the_raw_socket_brings_every_byte_each_time_it_is_asked():
    with limits.SocketStream(5_000_000, timeout_s=30.0) as stream:
        for _ in range(2):
            stream.target[:] = bytes(len(stream.target))
            assert stream.move() > 0
            assert bytes(stream.target) == b"\1" * 5_000_000


def test_a_socket_that_is_closed_early_is_an_error():
    stream = limits.SocketStream(1000, timeout_s=30.0)
    stream.close()
    with pytest.raises(PeerLostError):
        stream.move()


def test_plain_copies_carry_what_the_ranks_read_from_each_other(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    tp2, tp1 = EngineShape(tp=2), EngineShape()
    half = 70 * MODEL.token_bytes // 2
    dcp2 = EngineShape(tp=2, dcp=2, interleave=16)
    first = 38 * MODEL.token_bytes // 2  # of 70 tokens by turns of 16
    for decode, expected in (
        (
            dcp2,
            {
                (f"cuda:{producer}", f"cuda:{2 + consumer}"): (first, half - first)[consumer]
                for producer in range(2)
                for consumer in range(2)
            },
        ),
        (tp2, {("cuda:0", "cuda:2"): half, ("cuda:1", "cuda:3"): half}),
        (tp1, {("cuda:0", "cuda:2"): half, ("cuda:1", "cuda:2"): half}),
    ):
        options = _options(device="cuda", prefill=tp2, decode=decode)
        deployment = deployments.Deployment.of(options, (70,))
        (transfer,) = deployment.transfers()
        assert transfer_limits.copies_of(deployment, transfer) == expected
        pair = transfer_limits.one_pair(deployment)
        assert pair.devices() == (["cuda:0"], ["cuda:2"])
        assert pair.transfers()[0].num_tokens == 70
        assert (pair.prefill, pair.decode) == (tp1, tp1)
    alike = deployments.Deployment.of(_options(device="cuda"), (70,))
    assert transfer_limits.one_pair(alike) is None


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize(
    "model,prefill,decode",
    [
        (MODEL, EngineShape(), EngineShape()),
        (MODEL, EngineShape(tp=2, layout="HND"), EngineShape(pp=2, block=64)),
        (MLA, EngineShape(tp=2, block=32), EngineShape()),
        (MLA, EngineShape(), EngineShape(tp=2, dcp=2)),
        (MODEL, EngineShape(tp=2, dcp=2, interleave=8), EngineShape(tp=2, block=4)),
    ],
    ids=["alike", "tp2-to-pp2", "mla", "to-dcp2", "from-dcp2"],
)
def test_transfer(model, prefill, decode):
    cases = _run(
        "transfer",
        model=model,
        prefill=prefill,
        decode=decode,
        tokens=(70, 9),
        staging=Staging(chunk_bytes=4096),
    )
    assert [case.ours.nbytes for case in cases] == [70 * model.token_bytes, 9 * model.token_bytes]
    assert all(_parts(case) == {"ours", "limit"} for case in cases)


@pytest.mark.ucx
@pytest.mark.integration
def test_request_over_tcp():
    (case,) = _run("request", ways=Ways("tcp,self"), tokens=(16,), scattered=False)
    assert len(case.ours.samples_s) == 2
    assert any("packed" in note for note in case.notes)
    assert {each.contender: each.part for each in case.measurements} == {
        "kvconnector": "ours",
        "memcpy, one thread": "variant",
        "raw TCP socket": "limit",
    }


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.slow
def test_gil(monkeypatch):
    monkeypatch.setattr(gil, "ALONE_S", 0.05)
    cases = _run("gil", staging=Staging(chunk_bytes=4096))
    assert [case.case.rpartition(", ")[2] for case in cases] == list(gil.MAIN_THREADS.values())
    for case in cases:
        pump, plain = (each for each in case.measurements if each.figures)
        assert pump.contender.startswith("pump (")
        assert plain.contender == "plain (packed)"
        for each in (pump, plain):
            assert each.nbytes == 70 * MODEL.token_bytes
            assert each.figures["decode_start_step_s"] > 0
            assert each.figures["prefill_poll_s"] > 0
    idle, *busy = ({**case.ours.figures} for case in cases)
    assert idle["time_over_idle"] == 1
    assert "decode_steps_kept" not in idle
    assert all(figures["prefill_steps_kept"] > 0 for figures in busy)
    line = benchmark_named("gil").headline(cases)
    assert "beside pure Python: pump" in line
    assert "of D's steps kept" in line


def test_the_decode_load_needs_a_gpu():
    with pytest.raises(ConfigError, match="GPU kernels"):
        _run("gil", decode_caps=(8,))


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize("name", ["transfer", "gil"])
def test_a_transfer_of_other_bytes_reports_no_time(monkeypatch, name):
    opens = deployments.Deployment.opens

    def with_another_seed(self):
        prefill, decode = opens(self)
        changed = [type(each)(**{**_fields(each), "seed": each.seed + 1}) for each in decode]
        return prefill, changed

    monkeypatch.setattr(deployments.Deployment, "opens", with_another_seed)
    with pytest.raises(ResultMismatchError, match="tokens differ"):
        _run(name)


def _fields(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


@pytest.mark.parametrize(
    "ways,expected",
    [
        (Ways(), "auto"),
        (Ways("tcp"), "never"),
        (Ways("tcp,sysv"), "auto"),
        (Ways("tcp", "always"), "always"),
    ],
)
def test_who_asks_for_sockets_alone_gets_no_reads_of_anothers_memory(ways, expected):
    assert _options(ways=ways).config("d", "consumer").paths.direct == expected


def test_the_peer_is_compared_only_between_engines_alike():
    with pytest.raises(ConfigError, match="whole blocks"):
        _run("transfer", peer=Peer("nixl"), prefill=EngineShape(tp=2))


@pytest.mark.parametrize("shape,unit", [(EngineShape(), 16), (EngineShape(tp=2, dcp=2), 32)])
def test_the_peer_is_compared_only_by_requests_that_fill_their_blocks(shape, unit):
    with pytest.raises(ConfigError, match=f"block_tokens={unit}"):
        _run("transfer", peer=Peer("nixl"), prefill=shape, decode=shape, tokens=(64, 40))


def test_mooncake_is_compared_only_where_its_tcp_transport_reads():
    with pytest.raises(ConfigError, match="host memory"):
        _run("transfer", peer=Peer("mooncake"), device="cuda")
