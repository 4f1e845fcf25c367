"""Engine options, configuration files and the demo's verdict."""

import pytest

from minillm.client import Completion
from minillm.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    engine_shape,
    load_engine_config,
    parse_engine_options,
    save_engine_config,
)
from minillm.demo import compare, parse_arguments
from minillm.demo_picture import draw_picture


@pytest.mark.parametrize(
    "options,parallel,cache",
    [
        (
            "tp=2,pp=2,layers=5+3,block=64,layout=nhd,blocks=9",
            ParallelConfig(tp_size=2, pp_size=2, pp_layers=(5, 3)),
            CacheConfig(block_size=64, layout="NHD", num_blocks=9),
        ),
        # ranks that share tokens are tensor ranks
        (
            "dcp=2,interleave=8",
            ParallelConfig(tp_size=2, dcp_size=2, interleave_tokens=8),
            CacheConfig(),
        ),
        (
            "host=0,prefix=off",
            ParallelConfig(),
            CacheConfig(num_host_blocks=0, prefix_caching=False),
        ),
    ],
)
def test_engine_options_become_parallelism_and_cache(options, parallel, cache):
    assert engine_shape(parse_engine_options(options)) == (parallel, cache)


def test_ranks_share_only_caches_of_every_token_in_blocks_of_whole_turns():
    parallel = ParallelConfig(tp_size=2, dcp_size=2, interleave_tokens=8)
    EngineConfig(role="mono", engine_id="e", parallel=parallel)
    with pytest.raises(ValueError, match="interleave=8 must divide block=12"):
        EngineConfig(
            role="mono", engine_id="e", parallel=parallel, cache=CacheConfig(block_size=12)
        )
    hybrid = ModelConfig(architecture="hybrid")
    with pytest.raises(ValueError, match=r"dcp=2 needs layers that keep every token.*hybrid"):
        EngineConfig(role="mono", engine_id="e", parallel=parallel, model=hybrid)


BAD = """tp tp=2,tp=3 tq=2 tp=0 tp=x layout=XYZ block=0 host=-1 prefix=maybe tp=3,dcp=2 dcp=0
    dcp=2,interleave=0 pp=2,layers=8 pp=2,layers=8+0 host_layout=XYZ host_block=5 host_block=32 host_block=-1
    host_layout=HDN layout=HDN,host_layout=NHD layout=HDN,host_block=8"""


@pytest.mark.parametrize("text", BAD.split())
def test_bad_engine_options_are_refused(text):
    with pytest.raises(ValueError, match=r"."):
        engine_shape(parse_engine_options(text))


def test_a_config_survives_its_file_and_is_private(tmp_path):
    config = EngineConfig(
        role="decode",
        engine_id="d",
        parallel=ParallelConfig(pp_size=2, pp_layers=(5, 3)),
        connector={"lease": {"duration_s": 7}},
    )
    path = tmp_path / "engine.json"
    save_engine_config(config, path)
    assert load_engine_config(path) == config
    assert path.stat().st_mode & 0o077 == 0


MOVED = {"bytes": 8, "seconds": 2e-9}


@pytest.mark.parametrize(
    "prompt_length,token_ids,logprobs,stats,identical",
    [
        (3, [1, 2], [-1.0, -2.0], MOVED, True),
        (3, [1, 2], [-1.0, -2.00001], MOVED, True),
        (3, [1, 2], [-1.0, -2.01], MOVED, False),
        (3, [1, 3], [-1.0, -2.0], MOVED, False),
        (3, [1], [-1.0], MOVED, False),
        # a prompt of more than one token has to be transferred
        (3, [1, 2], [-1.0, -2.0], None, False),
        (1, [1, 2], [-1.0, -2.0], None, True),
    ],
)
def test_the_demo_accepts_only_equal_completions_of_moved_prompts(
    prompt_length, token_ids, logprobs, stats, identical
):
    reference = Completion(token_ids=[1, 2], logprobs=[-1.0, -2.0])
    remote = Completion(token_ids=token_ids, logprobs=logprobs, kv_transfer_stats=stats)
    assert compare(prompt_length, remote, reference).identical is identical


@pytest.mark.parametrize(
    "options, drawn",
    [
        ([], True),
        (["--model", "mla"], True),
        (["--model", "mamba"], False),
        (["--prefill", "pp=2,layers=5+3"], False),
    ],
)
def test_the_demo_draws_its_plan_where_a_plan_can_be_drawn(tmp_path, options, drawn):
    picture = tmp_path / "made" / "plan.svg"
    text = draw_picture(parse_arguments([*options, "--picture", str(picture)]))
    assert picture.exists() == drawn
    assert (str(picture) in text) == drawn
    assert text.startswith("picture" if drawn else "no picture")
