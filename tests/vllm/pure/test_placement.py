"""What the ranks of one engine agree on."""

import multiprocessing
from contextlib import ExitStack

import torch

from kvconnector.integrations.vllm.placement import is_any
from tests.support.waiting import DEADLINE_S

NUM_RANKS = 4
NOBODY, LAST = (False, False, False, False), (False, False, False, True)
SHORT_S = 1.0


def agree(store, rank, pipe):
    """Be a rank of a square, whose row and column are groups; the last one leaves the third question unanswered."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS
    )
    groups = [torch.distributed.new_group(each) for each in ([0, 1], [2, 3], [0, 2], [1, 3])]
    mine = [groups[rank // 2], groups[2 + rank % 2]]
    for values in (NOBODY, LAST):
        pipe.send(is_any(values[rank], mine, DEADLINE_S))
    try:
        pipe.send(rank == NUM_RANKS - 1 or is_any(False, mine, SHORT_S))
    except RuntimeError as error:
        pipe.send(str(error))
    pipe.recv()  # until all have answered


def test_all_ranks_hear_of_a_problem_in_any_and_wait_for_no_other_for_long(tmp_path):
    made = multiprocessing.get_context("spawn")
    with ExitStack() as ended:
        pipes = []
        for rank in range(NUM_RANKS):
            ours, theirs = made.Pipe()
            process = made.Process(target=agree, args=(tmp_path / "store", rank, theirs))
            process.start()
            ended.callback(process.join)
            ended.callback(process.kill)
            pipes.append(ours)

        def answers():
            assert all(pipe.poll(DEADLINE_S) for pipe in pipes)
            return [pipe.recv() for pipe in pipes]

        assert answers() == [False] * NUM_RANKS
        assert answers() == [True] * NUM_RANKS
        found = answers()
        assert isinstance(found[1], str)  # of its column
        assert isinstance(found[2], str)  # of its row


def test_a_single_rank_asks_nobody():
    assert [is_any(value, [], 0.0) for value in (False, True)] == [False, True]
