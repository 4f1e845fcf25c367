"""Blocks and slots are used again as early as they may be while a slow consumer reads: right bytes or an error."""

from __future__ import annotations

from typing import Any

import pytest

from kvconnector.datapath.pump.machine import Slots
from kvconnector.session.lease import Lease
from kvconnector.session.load import Load
from kvconnector.wire import messages
from tests.property.races import SETTINGS, StaleBytesError, racing

pytestmark = pytest.mark.ucx

PACKED = {"paths": {"direct": "never"}}
PLAIN = {**PACKED, "staging": {**SETTINGS["staging"], "pump": False}}
PATHS: dict[str, dict[str, Any]] = {
    "packed": PACKED,
    "packed through Python": PLAIN,
    "direct": {},
    "streamed, packed": {**PACKED, "is_streamed": True},
    "streamed, packed through Python": {**PLAIN, "is_streamed": True},
    "streamed, direct": {"is_streamed": True},
}
CHECKED = {"verify": "checksum"}
PATHS_ON_GPU: dict[str, dict[str, Any]] = {
    "packed": PACKED,
    "direct": {},
    "checked": CHECKED,
    "streamed, packed": PATHS["streamed, packed"],
    "streamed, direct": PATHS["streamed, direct"],
}
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]
BATCHES = [
    pytest.param(0, 180, id="quick"),
    *(pytest.param(seed, 1000, id=f"{seed}", marks=SLOW) for seed in range(1, 11)),
]
"""Seeds, and how many races: ten thousand of the slow ones."""


def check(races, num_races, show):
    """Every race is accounted for, and enough of them were close."""
    show("".join(f"\n{races.seen[how]:6} {how}" for how in sorted(races.seen)))
    show(f"all loads of either consumer: {dict(races.paths)}")
    read = sum(count for how, count in races.seen.items() if how.endswith(": read"))
    assert races.seen.total() == num_races
    assert num_races // 50 < read < num_races - num_races // 50


@pytest.mark.parametrize("seed, num_races", BATCHES)
@pytest.mark.parametrize("path", PATHS)
def test_a_slow_reader_gets_right_bytes_or_an_error(path, seed, num_races, show):
    with racing(seed=seed, **PATHS[path]) as races:
        races.run(num_races)
    check(races, num_races, show)


@pytest.mark.gpu
@pytest.mark.parametrize("seed, num_races", BATCHES)
@pytest.mark.parametrize("path", PATHS_ON_GPU)
def test_a_slow_reader_on_a_gpu_gets_right_bytes_or_an_error(path, seed, num_races, show):
    from tests.property.gpu_caches import GpuCaches, Sleeper

    if path == "checked":
        pytest.importorskip("xxhash")
    with racing(
        seed=seed, make_caches=GpuCaches, slow_down=Sleeper(seed).delay, **PATHS_ON_GPU[path]
    ) as races:
        races.run(num_races)
    check(races, num_races, show)


def overwrite_too_early(monkeypatch):
    return {"too_early": "p"}


def reuse_too_early(monkeypatch):
    return {"too_early": "d"}


def reuse_slots_at_once(monkeypatch):
    monkeypatch.setattr(Slots, "quarantine", lambda slots, slot, is_over: slots.free(slot))
    return {}


def trust_for_as_long_as_ours(monkeypatch):
    monkeypatch.setattr(messages, "shorter_timeout_s", lambda ours_s, theirs_ms: ours_s)
    return {}


def forget_which_blocks_are_known(monkeypatch):
    grow = Lease.grow

    def forgetful(lease, granted):
        lease.blocks = ()
        return grow(lease, granted)

    monkeypatch.setattr(Lease, "grow", forgetful)
    return {}


def end_before_the_prompt(monkeypatch):
    monkeypatch.setattr(Load, "is_complete", lambda load, links: not any(load.left))
    return {}


@pytest.mark.parametrize(
    "fault, causes",
    [
        (overwrite_too_early, ("aborted by the producer", "confirmed", "expired")),
        (reuse_too_early, ("aborted by the consumer",)),
        (reuse_slots_at_once, ("given up without a word",)),
        (trust_for_as_long_as_ours, ("given up by timeout",)),
    ],
)
@pytest.mark.parametrize("path", ["packed", "packed through Python"])
def test_races_find_a_fault(path, fault, causes, monkeypatch):
    with (
        racing(**PATHS[path], **fault(monkeypatch)) as races,
        pytest.raises(StaleBytesError),
    ):
        races.run(60, *causes)


@pytest.mark.parametrize(
    "fault, cause",
    [
        (forget_which_blocks_are_known, "moved to other blocks"),
        (end_before_the_prompt, "preempted"),
    ],
)
@pytest.mark.parametrize("path", [path for path in PATHS if path.startswith("streamed")])
def test_races_of_streams_find_a_fault(path, fault, cause, monkeypatch):
    with racing(**PATHS[path], **fault(monkeypatch)) as races, pytest.raises(StaleBytesError):
        races.run(600, cause)
