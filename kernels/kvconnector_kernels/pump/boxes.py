"""How the bytes of a box in a peer's memory come here: straight to their place, or through a slot and a re-layout.

Legend: a *box* is `[head, token, dim]` of tokens of one block, its strides in bytes. At *level* L the L axes of the
largest strides are cut, and each remaining piece is a *run*: from its first to its last item, gaps included. An axis of
one item cuts nothing, so such axes come first.
"""

from __future__ import annotations

from kvconnector_kernels.pump.steps import helper

MAX_RUNS = 1024  # what process_vm_readv takes in one call
NO_LEVEL = 3
# Another run takes as long as so many bytes: the kernel looks up pages anew.
RUN_COST_BYTES = 2048
# What goes through a slot is moved once more, out of the cache.
_MOVE_COST = 0.5
_OUTERMOST = 1 << 62


@helper
def _stride_of(strides, counts, axis):
    return strides[axis] if counts[axis] > 1 else _OUTERMOST


@helper
def falling_axes(strides, counts):
    """The axes by falling stride."""
    a, b, c = 0, 1, 2
    if _stride_of(strides, counts, a) < _stride_of(strides, counts, b):
        a, b = b, a
    if _stride_of(strides, counts, b) < _stride_of(strides, counts, c):
        b, c = c, b
    if _stride_of(strides, counts, a) < _stride_of(strides, counts, b):
        a, b = b, a
    return a, b, c


@helper
def num_runs_of(counts, axes, level):
    """Runs of a box."""
    num_runs = 1
    for index in range(level):
        num_runs *= counts[axes[index]]
    return num_runs


@helper
def run_bytes_of(strides, counts, axes, level, item_bytes):
    """Bytes of one run."""
    nbytes = item_bytes
    for index in range(level, 3):
        nbytes += (counts[axes[index]] - 1) * strides[axes[index]]
    return nbytes


@helper
def _place_level(src, dst, counts, axes, item_bytes):
    """The level whose runs have no gaps and look the same on both sides: they can be read to their place."""
    dense = item_bytes
    level = NO_LEVEL
    for index in (2, 1, 0):
        axis = axes[index]
        if counts[axis] > 1 and (src[axis] != dense or dst[axis] != dense):
            break
        dense *= counts[axis]
        level = index
    return level


@helper
def _slot_level(strides, counts, axes, item_bytes, room_bytes):
    """The level that takes the least time and fits a slot."""
    best, best_cost = NO_LEVEL, 0
    for level in range(3):
        num_runs = num_runs_of(counts, axes, level)
        nbytes = num_runs * run_bytes_of(strides, counts, axes, level, item_bytes)
        cost = num_runs * RUN_COST_BYTES + nbytes
        if num_runs <= MAX_RUNS and nbytes <= room_bytes and (best == NO_LEVEL or cost < best_cost):
            best, best_cost = level, cost
    return best


@helper
def _cost_per_byte(strides, counts, axes, level, item_bytes):
    """Of reading alone, by the bytes that are wanted."""
    run_bytes = run_bytes_of(strides, counts, axes, level, item_bytes)
    wanted = counts[0] * counts[1] * counts[2] * item_bytes
    return num_runs_of(counts, axes, level) * (RUN_COST_BYTES + run_bytes) / wanted


@helper
def plan_box(src, dst, num_heads, tokens, both_tokens, item, room_bytes):
    """What to read next: (whether to its place, level, tokens).

    `tokens` lie in one block of the peer, the first `both_tokens` of them in one block here as well. `item` is (head
    dim, item bytes). `NO_LEVEL`: not even one token fits `room_bytes`.
    """
    counts = (num_heads, both_tokens, item[0])
    axes = falling_axes(src, counts)
    place = _place_level(src, dst, counts, axes, item[1])
    if place == 0 and both_tokens == tokens:
        return True, place, tokens
    slot_counts = (num_heads, tokens, item[0])
    slot_axes = falling_axes(src, slot_counts)
    level = _slot_level(src, slot_counts, slot_axes, item[1], room_bytes)
    while level == NO_LEVEL and tokens > 1:
        tokens //= 2
        slot_counts = (num_heads, tokens, item[0])
        slot_axes = falling_axes(src, slot_counts)
        level = _slot_level(src, slot_counts, slot_axes, item[1], room_bytes)
    if place == NO_LEVEL or num_runs_of(counts, axes, place) > MAX_RUNS:
        return False, level, tokens
    if level != NO_LEVEL and (
        _cost_per_byte(src, slot_counts, slot_axes, level, item[1]) + _MOVE_COST
        < _cost_per_byte(src, counts, axes, place, item[1])
    ):
        return False, level, tokens
    return True, place, both_tokens


@helper
def slot_strides(strides, counts, axes, level, run_bytes):
    """The box's strides once its runs lie in a slot one behind the other."""
    outer, inner = strides[axes[0]], strides[axes[1]]
    if level == 1:
        outer = run_bytes
    elif level == 2:
        outer, inner = run_bytes * counts[axes[1]], run_bytes
    head, token, dim = strides
    for axis, stride in ((axes[0], outer), (axes[1], inner)):
        head = stride if axis == 0 else head
        token = stride if axis == 1 else token
        dim = stride if axis == 2 else dim
    return head, token, dim
