"""Blocks and slots are reused as early as allowed while a slow consumer reads: it gets right bytes or an error."""

from contextlib import closing
from functools import partial
from typing import Any

import pytest

from kvconnector.datapath.staging import SlotPool
from kvconnector.session.lease import Lease
from kvconnector.session.load import Load
from kvconnector.wire import messages
from tests.property.races import Races, StaleBytesError
from tests.support.fakes import make_caches

pytestmark = pytest.mark.ucx

PACKED = {"paths": {"direct": "never"}}
CHECKED = {"verify": "checksum"}
PATHS: dict[str, dict[str, Any]] = {
    "packed": PACKED,
    "packed and checked": CHECKED,
    "direct": {},
    "streamed, packed": {**PACKED, "is_streamed": True},
    "streamed, direct": {"is_streamed": True},
}
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]
BATCHES = [
    pytest.param(0, 180, id="quick"),
    *(pytest.param(seed, 1000, id=f"{seed}", marks=SLOW) for seed in range(1, 11)),
]
"""Seeds and numbers of races: the slow ones have ten thousand together."""


def check(races, num_races, show):
    """Every race has an outcome, and neither right bytes nor errors are rare."""
    show("".join(f"\n{races.seen[how]:6} {how}" for how in sorted(races.seen)))
    show(f"all loads of either consumer: {dict(races.paths)}")
    read = sum(count for how, count in races.seen.items() if how.endswith(": read"))
    assert races.seen.total() == num_races
    assert num_races // 50 < read < num_races - num_races // 50


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed, num_races", BATCHES)
@pytest.mark.parametrize("path", PATHS)
def test_a_slow_reader_gets_right_bytes_or_an_error(path, seed, num_races, device, show):
    options = dict(PATHS[path])
    if device != "cpu":
        from tests.support.gpu_caches import Sleeper

        options["make_caches"] = partial(make_caches, device=device)
        options["slow_down"] = Sleeper(seed).delay
    with closing(Races(seed=seed, **options)) as races:
        races.run(num_races)
    check(races, num_races, show)


def forget_the_granted_blocks(lease, granted, grow=Lease.grow):
    lease.blocks = ()
    return grow(lease, granted)


ON_PACKED, ON_STREAMS = (
    [path for path in PATHS if path.startswith(kind)] for kind in ("packed", "streamed")
)
FAULTS = [
    ({"too_early": "p"}, (), ON_PACKED, ["aborted by the producer", "confirmed", "expired"]),
    ({"too_early": "d"}, (), ON_PACKED, ["aborted by the consumer"]),
    (
        {},
        (SlotPool, "quarantine", lambda pool, slot, _: pool._refill(slot, pool._memory[slot])),
        ON_PACKED,
        ["given up silently"],
    ),
    (
        {},
        (messages, "shorter_timeout_s", lambda ours_s, theirs_ms: ours_s),
        ON_PACKED,
        ["given up by timeout"],
    ),
    ({}, (Lease, "grow", forget_the_granted_blocks), ON_STREAMS, ["moved to other blocks"]),
    (
        {},
        (Load, "is_complete", lambda load, links: not any(load.unread_tokens)),
        ON_STREAMS,
        ["preempted"],
    ),
]
"""Options of races, a patch, the paths that it affects, and the causes by which races must find it."""


@pytest.mark.parametrize(
    "path, options, fault, causes",
    [(path, options, fault, causes) for options, fault, paths, causes in FAULTS for path in paths],
)
def test_races_find_planted_faults(path, options, fault, causes, monkeypatch):
    if fault:
        monkeypatch.setattr(*fault)
    with closing(Races(**PATHS[path], **options)) as races, pytest.raises(StaleBytesError):
        races.run(600 if path in ON_STREAMS else 240, *causes)
