"""A simulated cluster: one case computed by hand, and properties of others."""

from kvconnector.bench.shapes import MODELS, EngineShape, ModelShape
from kvconnector.bench.simulated_ranks import Costs
from kvconnector.bench.simulation import Cluster, Request, Simulation
from kvconnector.runtime import directory

MODEL = ModelShape(name="small", num_layers=2, num_kv_heads=2, head_dim=8)


def run(requests, *, prefill="tp=1", decode="tp=1", costs=None, model=MODEL, **idle):
    cluster = Cluster(
        model=model,
        prefill=EngineShape.parse(prefill),
        decode=EngineShape.parse(decode),
        costs=costs or Costs(),
        **idle,
    )
    return Simulation(cluster, requests).run()


def test_the_first_request_takes_the_sum_of_its_steps():
    turn, latency, endpoint, read = 2**-10, 2**-12, 2**-6, 2**-4
    costs = Costs(
        turn_s=turn, latency_s=latency, endpoint_s=endpoint, bytes_per_s=MODEL.token_bytes * 2**4
    )
    outcome = run([Request(at_s=0.0, num_tokens=1, producer=0, consumer=0)], costs=costs)
    # D: wanted, look-up sent; directory: taken, answered; D: taken, hello sent; P: taken, endpoint, opened, reply sent;
    # D: taken, connected back, heartbeat due, sent, slots taken, read sent; P: taken, sent; D: received
    turns = 2 + 2 + 2 + 3 + 1 + 2 + 2 + 1 + 1
    hops = 6  # look-up, directory, hello, reply, read, bytes
    assert outcome.p50_ms == 1e3 * (turns * turn + hops * latency + 2 * endpoint + read)
    kinds = ("DirectoryRequest", "Directory", "Hello", "HelloReply", "Read", "Done")
    assert outcome.messages == dict.fromkeys((*kinds, "Heartbeat", "HeartbeatReply"), 1)


def test_a_large_engines_ranks_are_requested_by_number(monkeypatch):
    size = directory.MAX_UNASKED + 1
    requests = [Request(at_s=0.0, num_tokens=9, producer=0, consumer=0)]
    shapes = {"prefill": f"tp={size}", "decode": f"tp={size}"}
    named = run(requests, **shapes)
    monkeypatch.setattr(directory, "MAX_UNASKED", size)
    whole = run(requests, **shapes)
    assert (named.succeeded, whole.succeeded) == (1, 1)
    assert whole.messages["DirectoryRequest"] == size
    assert named.messages["DirectoryRequest"] == size  # each reads its own number, as it guesses
    assert named.message_bytes < whole.message_bytes


def test_ranks_without_reads_between_them_do_not_greet():
    requests = [Request(at_s=0.0, num_tokens=100, producer=0, consumer=0)]
    mla = run(requests, prefill="tp=16", decode="tp=16", model=MODELS["deepseek-r1"])
    assert mla.messages["Hello"] == 16
    assert mla.messages["Done"] == 16


def test_idle_engines_greet_again():
    requests = [
        Request(at_s=at_s, num_tokens=100, producer=0, consumer=0) for at_s in (0.0, 10.0, 60.0)
    ]
    assert run(requests).messages["Hello"] == 1
    apart = run(requests, idle_timeout_s=20.0)
    assert (apart.messages["Hello"], apart.succeeded, apart.peak_links) == (2, 3, 1)
    assert apart.messages["Heartbeat"] < run(requests).messages["Heartbeat"]
