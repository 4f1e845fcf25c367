"""Wrong input, over real UCX and ZMQ: the bad request gets a clear error, and a good one beside it completes."""

from contextlib import closing

import pytest

from tests.integration.runtime_pair import Engine, arrives, same, until
from tests.support.keys import keyed_controls
from tests.support.ports import free_ports

pytestmark = [pytest.mark.ucx, pytest.mark.integration]


@pytest.fixture(scope="module")
def pair():
    p, d = Engine("p", "producer"), Engine("d", "consumer", seed=1)
    yield p, d
    d.close()
    p.close()


@pytest.fixture
def name(request):
    return request.node.name


def _good_request_completes(p, d, name):
    assert arrives(p, d, f"{name}-good", [10, 11], [20, 21])


@pytest.mark.parametrize(
    "change, error",
    [
        ({"transfer_secret": "0" * 32}, "UnknownTransferError: no such transfer"),
        ({"remote_request_id": f"nobody|{'0' * 32}||"}, "UnknownTransferError: no such transfer"),
        ({"remote_block_ids": [[1, 3]]}, "ReadRefusedError: the read's block ids are not"),
        ({"remote_block_ids": [[1, 9999]]}, "ReadRefusedError: the read's block ids are not"),
        ({"remote_block_ids": [[1]]}, "ReadRefusedError: the read's block ids are not"),
        ({"remote_first_blocks": [1]}, "ReadRefusedError: the read's block ids are not"),
        ({"remote_num_tokens": 31}, "ReadRefusedError: a read is ahead of the lease"),
        ({"remote_engine_id": "q"}, "IncompatiblePeerError: engine 'p' is here, not 'q'"),
        ({"remote_port": "free"}, "Error: "),
    ],
)
def test_an_offer_that_was_falsified(pair, name, change, error):
    p, d = pair
    params = p.offer(name, [1, 2], 30)
    if change.get("remote_port"):
        change = {"remote_port": free_ports()}
    d.load(name, {**params, **change}, [5, 6], 32)
    _good_request_completes(p, d, name)
    until(lambda: name in d.received, d, p)
    assert error in d.failed[name]
    p.scheduler.abort(name)
    until(lambda: name in p.sent, p)


@pytest.mark.parametrize(
    "stated,is_refused",
    [
        ({"position_encodings": (("", "default(rope_theta=10000)"),)}, True),
        ({"revision": f"org/m@{'f' * 40}"}, True),
        ({"config": (("rms_norm_eps", "1e-06"),)}, True),
        ({"config": (("scale_emb", "2"),)}, False),  # the other engine says nothing of it
        ({}, False),  # as a release that states nothing
    ],
)
@pytest.mark.parametrize("is_reader", [True, False])
def test_caches_of_other_numbers_are_not_read(stated, is_refused, is_reader):
    """Whichever side states what, bytes of one shape are not loaded if both know that they mean something else."""
    full = {"position_encodings": (("", "yarn(rope_theta=10000, factor=4)"),)}
    full |= {"revision": f"org/m@{'0' * 40}", "config": (("rms_norm_eps", "1e-05"),)}
    ours, theirs = (stated, full) if is_reader else (full, stated)
    with (
        closing(Engine("p", "producer", stated=theirs)) as p,
        closing(Engine("d", "consumer", seed=1, stated=ours)) as d,
    ):
        if not is_refused:
            assert arrives(p, d, "r", [10, 11], [20, 21])
            return
        d.load("r", p.offer("r", [1, 2], 30), [5, 6], 32)
        until(lambda: "r" in d.received, d, p)
        (field,) = stated
        assert d.failed["r"].startswith("IncompatiblePeerError: the engines cannot exchange blocks")
        for value in (full[field], stated[field]):
            assert (value if isinstance(value, str) else value[0][1]).removeprefix(
                "org/m@"
            ) in d.failed["r"]
        assert "--revision" in d.failed["r"] or "--hf-overrides" in d.failed["r"]


@pytest.mark.parametrize(
    "blocks, text",
    [
        ([5, 9999], "outside the pool"),
        ([5], "do not hold these tokens"),
        ([5, 5], "name a block twice"),
    ],
)
def test_local_blocks_that_cannot_be_fail_their_load_alone(pair, name, blocks, text):
    """A good load of the same step continues; the producer gets the blocks of both back at once."""
    p, d = pair
    offers = {
        f"{name}-good": p.offer(f"{name}-good", [10, 11], 30),
        name: p.offer(name, [1, 2], 30),
    }
    for request, local in ((f"{name}-good", [20, 21]), (name, blocks)):
        d.load(request, offers[request], local, 31, steps=False)
    until(lambda: set(offers) <= d.received, d, p)
    assert f"{name}-good" not in d.failed
    assert d.failed[name].startswith(f"BlockIdError: the blocks of request {name}")
    assert text in d.failed[name]
    assert same(p.dense([10, 11], 30), d.dense([20, 21], 30))
    until(lambda: set(offers) <= p.sent, d, p)


def test_keys_that_were_not_agreed_on(start, tmp_path, name):
    keys, controls = keyed_controls(tmp_path, p=("p", "d"), d=("p", "d"), thief=("p",))
    p, d, thief = (
        start(engine_id, "producer" if engine_id == "p" else "consumer", control=control)
        for engine_id, control in controls.items()
    )
    params = p.offer(name, [1, 2], 30)
    thief.load("stolen", params, [5, 6], 31)
    d.load("false key", {**params, "remote_public_key": keys["thief"].public_key}, [7, 8], 31)
    _good_request_completes(p, d, name)
    until(lambda: "stolen" in thief.received and "false key" in d.received, p, d, thief)
    assert "AuthenticationError" in thief.failed["stolen"]
    assert "AuthenticationError" in d.failed["false key"]
