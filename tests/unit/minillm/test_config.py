"""Engine options, configuration files and the demo's verdict."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from minillm.client import Completion
from minillm.config import (
    Architecture,
    CacheConfig,
    EngineConfig,
    MixerConfig,
    ModelConfig,
    ParallelConfig,
    engine_shape,
    load_engine_config,
    parse_engine_options,
    save_engine_config,
)
from minillm.demo import compare, draw_picture, parse_arguments
from minillm.worker_transfer import model_name


def test_engines_with_other_windows_are_told_apart() -> None:
    def name(architecture: Architecture, window: int) -> str:
        mixer = MixerConfig(sliding_window=window)
        return model_name(ModelConfig(architecture=architecture, mixer=mixer))

    assert name("hybrid", 64) != name("hybrid", 32)
    assert name("llama", 64) == name("llama", 32)


def test_tables_are_on_the_device_where_that_is_a_gpu() -> None:
    config = EngineConfig(role="mono", engine_id="e")
    assert config.resolved_block_tables == "host"
    assert msgspec.structs.replace(config, device="cuda").resolved_block_tables == "device"
    chosen = msgspec.structs.replace(config, block_tables="device")
    assert chosen.resolved_block_tables == "device"


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
def test_engine_options_become_parallelism_and_cache(options, parallel, cache) -> None:
    assert engine_shape(parse_engine_options(options)) == (parallel, cache)


def test_only_what_keeps_every_token_in_blocks_of_whole_turns_can_be_shared() -> None:
    parallel = ParallelConfig(tp_size=2, dcp_size=2, interleave_tokens=8)
    EngineConfig(role="mono", engine_id="e", parallel=parallel)
    with pytest.raises(ValueError, match="interleave=8 must divide block=12"):
        EngineConfig(
            role="mono", engine_id="e", parallel=parallel, cache=CacheConfig(block_size=12)
        )
    hybrid = ModelConfig(architecture="hybrid")
    with pytest.raises(ValueError, match=r"dcp=2 needs layers that keep every token.*hybrid"):
        EngineConfig(role="mono", engine_id="e", parallel=parallel, model=hybrid)


@pytest.mark.parametrize(
    "text",
    [
        "tp",
        "tp=2,tp=3",
        "tq=2",
        "tp=0",
        "layout=XYZ",
        "block=0",
        "host=-1",
        "prefix=maybe",
        "tp=x",
        "tp=3,dcp=2",
        "dcp=0",
        "dcp=2,interleave=0",
        "pp=2,layers=8",
        "pp=2,layers=8+0",
    ],
)
def test_bad_engine_options_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        engine_shape(parse_engine_options(text))


def test_a_config_survives_its_file_and_is_private(tmp_path: Path) -> None:
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


def test_the_demo_does_not_accept_a_prompt_that_was_not_moved() -> None:
    reference = Completion(token_ids=[1, 2], logprobs=[-1.0, -2.0])
    assert not compare(3, reference, reference).identical
    assert compare(1, reference, reference).identical


@pytest.mark.parametrize(
    "token_ids,logprobs,identical",
    [
        ([1, 2], [-1.0, -2.0], True),
        ([1, 2], [-1.0, -2.00001], True),
        ([1, 2], [-1.0, -2.01], False),
        ([1, 3], [-1.0, -2.0], False),
        ([1], [-1.0], False),
    ],
)
def test_the_demo_accepts_only_equal_completions(
    token_ids: list[int], logprobs: list[float], identical: bool
) -> None:
    reference = Completion(token_ids=[1, 2], logprobs=[-1.0, -2.0])
    remote = Completion(
        token_ids=token_ids, logprobs=logprobs, kv_transfer_stats={"bytes": 8, "seconds": 2e-9}
    )
    result = compare(3, remote, reference)
    assert result.identical is identical
    assert result.gigabytes_per_s == pytest.approx(4.0)


@pytest.mark.parametrize(
    "options, drawn",
    [
        ([], True),
        (["--model", "mla"], True),
        (["--model", "mamba"], False),
        (["--prefill", "pp=2,layers=5+3"], False),
    ],
)
def test_the_demo_draws_its_plan_where_a_plan_can_be_drawn(
    tmp_path: Path, options: list[str], drawn: bool
) -> None:
    picture = tmp_path / "made" / "plan.svg"
    text = draw_picture(parse_arguments([*options, "--picture", str(picture)]))
    assert picture.exists() == drawn
    assert (str(picture) in text) == drawn
    assert text.startswith("picture" if drawn else "no picture")
