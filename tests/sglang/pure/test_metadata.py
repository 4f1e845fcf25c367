"""The columns of SGLang's metadata are known by name, whatever order and number a release has."""

from types import SimpleNamespace

import pytest
import torch

from kvconnector.errors import GeometryError
from kvconnector.integrations.sglang.caches import registered_groups
from kvconnector.integrations.sglang.metadata import (
    KNOWN,
    MASKS,
    NEEDED,
    NEEDED_SEEDS,
    OWN_COLUMNS,
    SEED_COLUMNS,
    MetadataRows,
    NamedPointers,
    forget_earlier_request,
    name_columns,
)
from tests.sglang.pure.pools import COLUMNS, NUM_ROWS, Model, Pools

PLAIN = [name for name in OWN_COLUMNS if name not in MASKS]
SENT, READ = 1, 3


class Buffers:
    """SGLang's `MetadataBuffers` of a release with these columns, each of another width, in this order."""

    def __init__(self, names, hidden=128):
        self.size = NUM_ROWS
        for name in sorted(names):
            width = hidden if name == "output_hidden_states" else 8 + 8 * len(name)
            setattr(self, name, torch.zeros(NUM_ROWS, width, dtype=torch.uint8))
        self._listed = names

    def get_buf_infos(self):
        tensors = [getattr(self, name) for name in self._listed]
        return (
            [each.data_ptr() for each in tensors],
            [each.nbytes for each in tensors],
            [each[0].nbytes for each in tensors],
        )


def _rows(buffers, draft=0):
    pointers, lengths, widths = name_columns(buffers.get_buf_infos(), buffers)
    args = SimpleNamespace(num_draft_entries=draft)
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = pointers, lengths, widths
    return MetadataRows(args, "cpu")


@pytest.mark.parametrize("masks", [False, True], ids=["plain", "masks"])
def test_what_a_request_did_not_ask_for_is_not_an_earlier_ones(masks):
    """SGLang fills these columns only for requests that ask, and a decode server reads them if it was asked."""
    names = {"val": torch.float32, "idx": torch.int32, "len": torch.int32}
    buffers = SimpleNamespace(output_ids=torch.ones(NUM_ROWS, 16))
    for name in (*OWN_COLUMNS[2:6], *MASKS):
        is_there = masks or name not in MASKS
        kind = names.get(name.rpartition("_")[2], torch.float32)
        setattr(buffers, name, torch.full((NUM_ROWS, 8), 5, dtype=kind) if is_there else None)
    forget_earlier_request(buffers, SimpleNamespace(metadata_buffer_index=SENT))
    for name in (*OWN_COLUMNS[2:6], *(MASKS[::2] if masks else ())):
        column = getattr(buffers, name)
        row = column[SENT]
        assert row.isnan().all() if column.is_floating_point() else not row.any()
        assert (column[READ] == 5).all(), "another request's row"
    assert buffers.output_ids[SENT, 0] == 1


def _write(buffers):
    for number, name in enumerate(KNOWN, 1):
        if hasattr(buffers, name):
            getattr(buffers, name)[SENT] = number


def _moved(sender, receiver):
    """Move a row as a transfer would."""
    sender.fill(SENT)
    receiver.clear(READ)
    receiver._mirror[READ] = sender._mirror[SENT]
    assert receiver.spread(READ)


@pytest.mark.parametrize("names", [(*PLAIN, *SEED_COLUMNS), KNOWN], ids=["plain", "masks"])
def test_each_column_arrives_under_its_name_from_a_release_with_another_order(names):
    prefill, decode = Buffers(names[::-1]), Buffers([*names[3:], *names[:3]])
    _write(prefill)
    sender, receiver = _rows(prefill), _rows(decode)
    assert (sender.own_bytes, sender.seed_bytes) == (receiver.own_bytes, receiver.seed_bytes)
    _moved(sender, receiver)
    for name in names:
        assert getattr(decode, name)[READ].equal(getattr(prefill, name)[SENT]), name


@pytest.mark.parametrize("masks", [(), MASKS])
@pytest.mark.parametrize("selected", [(), SEED_COLUMNS[3:]])
def test_a_row_has_the_order_of_builds_that_found_columns_by_place(masks, selected):
    """Those joined all but the seeds in SGLang's order, then the seeds."""
    *plain, room = PLAIN
    seeds = [*NEEDED_SEEDS, *selected]
    buffers = Buffers([*plain, *masks, *seeds, room])
    _write(buffers)
    rows = _rows(buffers)
    rows.fill(SENT)
    own, seeds = (
        torch.cat([getattr(buffers, name)[SENT] for name in names])
        for names in ([*plain, *masks, room], seeds)
    )
    assert rows._mirror[SENT, : len(own)].equal(own)
    assert rows._mirror[SENT, rows.own_bytes : rows.own_bytes + len(seeds)].equal(seeds)


def test_a_column_that_nobody_has_read_is_refused_by_name():
    """Also where a release has as many columns as a known one."""
    for names in ([*COLUMNS, "output_draft_scores"], ["output_draft_scores", *COLUMNS[1:]]):
        with pytest.raises(GeometryError, match=r"does not know.*unknown=.*output_draft_scores"):
            _rows(Buffers(names))


def test_a_column_without_a_name_is_refused():
    buffers = Buffers(COLUMNS)
    pointers, *others = buffers.get_buf_infos()
    del buffers.cached_tokens
    named, *_ = name_columns((pointers, *others), buffers)
    assert named.names == (COLUMNS[0], "", *COLUMNS[2:])
    buffers.__dict__["get_buf_infos"] = lambda: (pointers, *others)
    with pytest.raises(GeometryError, match="column 1 without a name"):
        _rows(buffers)


@pytest.mark.parametrize("name", NEEDED)
def test_a_row_without_a_token_or_a_room_is_refused(name):
    with pytest.raises(GeometryError, match=f"lacks metadata.*missing=.*{name}"):
        _rows(Buffers([each for each in COLUMNS if each != name]))


def test_columns_of_different_numbers_of_rows_are_refused():
    pools = _pools()
    pools.args.aux_data_lens[1] //= 2
    with pytest.raises(
        GeometryError, match=rf"have different numbers of rows.*{NUM_ROWS // 2}, {NUM_ROWS}"
    ):
        MetadataRows(pools.args, "cpu")


def test_a_column_that_is_listed_twice_is_refused():
    with pytest.raises(GeometryError, match="has some twice"):
        _rows(Buffers([*COLUMNS, COLUMNS[0]]))


def test_columns_that_nothing_names_are_refused():
    pools = _pools()
    pools.args.aux_data_ptrs = [*pools.args.aux_data_ptrs]
    with pytest.raises(GeometryError, match=r"nothing says which.*columns=10, named=0"):
        MetadataRows(pools.args, "cpu")


def test_a_second_name_of_a_tensor_changes_nothing():
    buffers = Buffers(COLUMNS)
    buffers.__dict__ = {"first": buffers.output_ids, **vars(buffers), "last": buffers.output_ids}
    named, *_ = name_columns(buffers.get_buf_infos(), buffers)
    assert named.names == COLUMNS


@pytest.mark.parametrize("name", NEEDED_SEEDS)
def test_without_one_of_its_columns_nothing_is_moved_for_a_draft_model(name, caplog):
    """The prompt is, as from an engine without a draft model."""
    buffers, whole = Buffers([each for each in COLUMNS if each != name]), Buffers(COLUMNS)
    rows, others = _rows(buffers, draft=1), _rows(whole, draft=1)
    assert f"no ['{name}']" in caplog.text
    assert (rows.seed_bytes, rows.lacks) == (0, ())
    assert rows.own_bytes == others.own_bytes
    assert others.seed_bytes


@pytest.mark.parametrize("mask", MASKS)
def test_a_row_has_all_sampling_masks_or_none_or_lacks_some(mask):
    assert _rows(Buffers([name for name in KNOWN if name != mask])).lacks == (mask,)
    assert _rows(Buffers([name for name in KNOWN if name not in MASKS])).lacks == ()


@pytest.mark.parametrize(
    "draft, hidden, is_moved", [(0, 32, 0), (1, 32, 1), (0, 128, 1), (1, 128, 1)]
)
def test_what_a_draft_model_needs_is_moved_where_there_is_one(draft, hidden, is_moved):
    assert bool(_rows(Buffers(COLUMNS, hidden=hidden), draft=draft).seed_bytes) == is_moved


def _pools(missing=(), **changes):
    shape = {"tp_size": 1, "pp_size": 1, "is_prefill": True, "page_size": 4}
    pools = Pools(Model(), rank=(0, 0), **shape | changes)
    kept = [at for at, name in enumerate(COLUMNS) if name not in missing]
    args = pools.args
    args.aux_data_ptrs = NamedPointers(
        [args.aux_data_ptrs[at] for at in kept], [COLUMNS[at] for at in kept]
    )
    args.aux_data_lens = [args.aux_data_lens[at] for at in kept]
    args.aux_item_lens = [args.aux_item_lens[at] for at in kept]
    return pools


def _row_part(*missing):
    pools = _pools(missing)
    groups, kinds = registered_groups(pools.args, pools.shape, MetadataRows(pools.args, "cpu"))
    (found,) = [
        group.geometry for group, kind in zip(groups, kinds, strict=True) if kind.kind == "row"
    ]
    return found.parts[0]


def test_engines_that_lack_different_columns_of_one_width_do_not_agree():
    """Their rows are equally long. The name of a whole row is that of builds that named none."""
    first, second = COLUMNS[4:6]
    parts = [_row_part(name) for name in (first, second)]
    assert parts[0].model_key == parts[1].model_key
    assert [each.name for each in parts] == [f"without {name}" for name in (first, second)]
    assert _row_part().name == "part0"
    assert _row_part(first, second).name == f"without {first}, {second}"
