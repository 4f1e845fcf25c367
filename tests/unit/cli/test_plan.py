"""`kvconnector plan`: pictures, models from configuration files, predicted times."""

import json
import re

import pytest

from kvconnector.bench.shapes import MODELS
from kvconnector.cli import main
from kvconnector.cli.model_config import read_model_config

LLAMA_70B = {
    "_name_or_path": "llama-3.1-70b",
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "_name_or_path": "deepseek-r1",
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}


def written(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def planned(capsys, *arguments):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("config", [LLAMA_70B, DEEPSEEK], ids=["gqa", "mla"])
def test_a_models_configuration_file_gives_the_shape_that_is_known_by_name(tmp_path, config):
    known = MODELS[config["_name_or_path"]]
    assert read_model_config(written(tmp_path, config)) == known
    nested = {"_name_or_path": config["_name_or_path"], "text_config": config}
    assert read_model_config(written(tmp_path, nested).parent) == known


@pytest.mark.parametrize(
    "config, words",
    [
        ({}, "a model without a model_type is not known"),
        ({**LLAMA_70B, "model_type": "llama9"}, "llama9 is not known"),
        ({"model_type": "deepseek"}, "num_hidden_layers"),
        ([], "JSON object"),
        ({**LLAMA_70B, "layer_types": ["linear_attention"] * 80}, "unknown=['linear_attention']"),
        ({**LLAMA_70B, "layer_types": ["rwkv", "full_attention"] * 40}, "unknown=['rwkv']"),
        ({**LLAMA_70B, "layer_types": ["full_attention"] * 79}, "named=79, layers=80"),
        ({**LLAMA_70B, "mamba_d_state": 16}, "fields=['mamba_d_state']"),
        ({**DEEPSEEK, "index_topk": 2048}, "index_head_dim"),
        ({**DEEPSEEK, "model_type": "llama"}, "kv_lora_rank"),
        ({**LLAMA_70B, "num_kv_shared_layers": 8}, "fields=['num_kv_shared_layers']"),
        ({**LLAMA_70B, "sliding_window": -1}, "sliding_window"),
        ({**LLAMA_70B, "torch_dtype": "complex64"}, "complex64"),
        ({**LLAMA_70B, "num_key_value_heads": -8}, "num_key_value_heads"),
        ({**LLAMA_70B, "num_hidden_layers": 1 << 40}, "num_layers is 1 to 65536"),
        ({**LLAMA_70B, "layer_types": 3}, "unknown=['3']"),
        ({**LLAMA_70B, "layer_types": ["mlp"] * 80}, "no layer of the model caches anything"),
        ({**LLAMA_70B, "num_nextn_predict_layers": "x"}, "num_nextn_predict_layers='x'"),
        ({**LLAMA_70B, "model_type": "jamba", "attn_layer_period": 0}, "attn_layer_period=0"),
        ({**LLAMA_70B, "model_type": "bamba", "attn_layer_indices": 3}, "attn_layer_indices=3"),
        (
            {**LLAMA_70B, "model_type": "qwen3_next", "full_attention_interval": "4"},
            "full_attention_interval='4'",
        ),
        ({**LLAMA_70B, "model_type": "llama4", "no_rope_layers": 7}, "no_rope_layers=7"),
        ({**LLAMA_70B, "model_type": "llama4", "no_rope_layers": [1] * 79}, "layers=80"),
        ({**LLAMA_70B, "model_type": "bamba", "attn_layer_indices": [9, 80]}, "from 0 to 79"),
        ({**LLAMA_70B, "model_type": "gemma3n", "num_kv_shared_layers": 80}, "not all layers"),
        ({**DEEPSEEK, "num_nextn_predict_layers": 10**12}, "at most 65536 draft layers"),
        (
            {
                **LLAMA_70B,
                "model_type": "mamba2",
                "mamba_d_ssm": -1,
                "num_heads": 8,
                "head_dim": 8,
                "state_size": 16,
                "conv_kernel": 4,
                "n_groups": 1,
            },
            "mamba_d_ssm=-1",
        ),
    ],
)
def test_a_configuration_file_that_says_no_shape_is_refused_with_the_reason(
    tmp_path, capsys, config, words
):
    assert main(["plan", "--model", str(written(tmp_path, config))]) == 2
    assert words in capsys.readouterr().err


def test_the_predicted_time_is_that_of_the_busiest_link(capsys):
    # 32 layers x K and V x 8 heads x 128 x 2 bytes x 1000 tokens: all of it into one consumer, a quarter into each of 4
    report = planned(capsys, "--prefill", "tp=4", "--tokens", "1000", "--link", "100")
    assert report["predicted_ms"] == pytest.approx(131_072_000 * 8 / 100e9 * 1e3)
    report = planned(
        capsys, "--prefill", "tp=4", "--decode", "tp=4", "--tokens", "1000", "--link", "100"
    )
    assert report["predicted_ms"] == pytest.approx(131_072_000 / 4 * 8 / 100e9 * 1e3)
    assert planned(capsys)["predicted_ms"] is None
    assert main(["plan", "--link", "0"]) == 2


@pytest.mark.parametrize(
    "prefill, decode, needed",
    [
        ("layout=HND", "layout=NHD", True),
        ("layout=HND", "layout=HND", False),
        ("tp=8,layout=HND", "tp=8,layout=NHD", False),  # one head per rank: the same order
        ("block=32", "block=16", True),
    ],
)
def test_blocks_of_another_layout_are_laid_out_anew(capsys, prefill, decode, needed):
    cut = ("--prefill", prefill, "--decode", decode)
    assert planned(capsys, *cut)["comparison"]["needs_relayout"] is needed
    assert main(["plan", *cut]) == 0
    verdict = "change their layout" if needed else "are copied as they are"
    assert f"blocks {verdict}" in capsys.readouterr().out.replace("\n", " ")


def drawn_texts(path):
    """Return a picture's labels, which matplotlib writes in comments beside their glyphs."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_a_picture_names_every_rank_and_draws_a_ribbon_for_each_read(capsys, tmp_path):
    path = tmp_path / "plan.svg"
    arguments = ("--prefill", "tp=4,pp=2", "--decode", "tp=2,block=64", "--link", "400")
    report = planned(capsys, *arguments, "--svg", str(path))
    texts = drawn_texts(path)
    for row in (*report["producers"], *report["consumers"]):
        assert any(text.startswith(row["rank"]) and row["holds"] in text for text in texts)
    assert any("2.62 ms" in text for text in texts)
    ranks, page = len(report["producers"]) + len(report["consumers"]), 1
    assert path.read_text().count('id="patch_') == ranks + page
    assert path.read_text().count('id="read_') == len(report["reads"])
    # the ranks' bytes are the sums of their ribbons
    for side, rows in (("producer", report["producers"]), ("consumer", report["consumers"])):
        for row in rows:
            assert row["bytes"] == sum(
                r["bytes"] for r in report["reads"] if r[side] == row["rank"]
            )


HYBRID = {
    **LLAMA_70B,
    "model_type": "qwen3_next",
    "num_hidden_layers": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}


def test_kinds_of_layers_have_names_and_colours_and_ranks_show_attention_heads(capsys, tmp_path):
    model, path = str(written(tmp_path, HYBRID)), tmp_path / "plan.svg"
    cut = ("--model", model, "--prefill", "tp=2", "--decode", "tp=4")
    report = planned(capsys, *cut, "--svg", str(path))
    assert [row["holds"] for row in report["producers"]] == [
        "layers 0-15, heads 0-3",
        "layers 0-15, heads 4-7",
    ]
    texts = drawn_texts(path)
    colors = {}
    for kind in ("full attention", "gated delta net state"):
        assert any(text.startswith(f"{kind}, ") for text in texts)
        ribbons = re.findall(
            rf'id="read_\w+_{kind.replace(" ", "_")}".*?fill: (#\w+)', path.read_text(), re.DOTALL
        )
        assert len(ribbons) == len([row for row in report["reads"] if row["kind"] == kind])
        (colors[kind],) = set(ribbons)
    assert len(set(colors.values())) == 2
    # alternating layers take one line of the table
    assert main(["plan", *cut]) == 0
    assert "12 within" in capsys.readouterr().out


def test_a_rank_that_keeps_only_states_is_shown_as_such(capsys, tmp_path):
    sizes = {"state_size": 16, "conv_kernel": 4, "expand": 2, "hidden_size": 64}
    config = {**LLAMA_70B, **sizes, "model_type": "mamba"}
    report = planned(capsys, "--model", str(written(tmp_path, config)), "--prefill", "tp=2")
    assert report["producers"][1]["holds"] == "layers 0-79, state 64-127"


def test_a_picture_that_cannot_be_written_is_one_line(capsys, tmp_path):
    assert main(["plan", "--svg", str(tmp_path / "no" / "plan.png")]) == 2
    assert "no folder that can be written to" in capsys.readouterr().err
    assert main(["plan", "--svg", str(tmp_path / "plan.unknown")]) == 2
    assert "does not end in .svg or .png or .pdf" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[" * 100_000], ids=["absent", "nested"])
def test_a_configuration_that_cannot_be_read_is_one_line(tmp_path, capsys, text):
    path = tmp_path / "config.json"
    if text:
        path.write_text(text)
    assert main(["plan", "--model", str(path)]) == 2
    err = capsys.readouterr().err
    assert re.search(f"cannot read the model's configuration.*{path}", err)


def test_a_configuration_without_an_end_is_not_read_into_memory(tmp_path, capsys):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert main(["plan", "--model", str(path)]) == 2
    assert "it has more than 64 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--layers", str(1 << 40)), "num_layers is 1 to 65536"),
        (("--decode", f"tp={1 << 40}"), "max_ranks=65536"),
        (("--link", "nan"), "no finite number"),
        (("--link", "0"), "x>0"),
        (("--tokens", "0"), "x>=1"),
        (("--start", "-1"), "x>=0"),
    ],
)
def test_impossible_sizes_are_refused_before_planning(capsys, arguments, words):
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_model_s_name_with_brackets_is_shown_as_it_is(capsys, tmp_path):
    path = written(tmp_path, {**LLAMA_70B, "_name_or_path": "[/llama]"})
    assert main(["plan", "--model", str(path)]) == 0
    assert capsys.readouterr().out.startswith("[/llama]: 80 layers")


@pytest.mark.parametrize(
    "short, name",
    [("fp8", "float8_e4m3fn"), ("bf16", "bfloat16"), ("FP16", "float16"), ("flaot32", "float32")],
)
def test_a_short_name_of_an_element_type_is_refused_with_the_whole_one(capsys, short, name):
    assert main(["plan", "--dtype", short]) == 2
    assert f"did you mean '{name}'" in capsys.readouterr().err


def test_a_model_of_the_hub_is_refused_with_what_to_give_instead(capsys):
    assert main(["plan", "--model", "meta-llama/Llama-3.1-8B"]) == 2
    assert "give the path of a model's config.json" in capsys.readouterr().err


def test_the_default_chunk_holds_a_large_state(capsys, tmp_path):
    """A state of Qwen3.5-397B is 4 MiB in float32 at TP 1, more than a chunk of 2 MiB."""
    sizes = {"linear_num_value_heads": 64, "mamba_ssm_dtype": "float32"}
    path = str(written(tmp_path, {**HYBRID, "model_type": "qwen3_5_text", **sizes}))
    report = planned(capsys, "--model", path)
    assert report["chunk_bytes"] == 64 * 128 * 128 * 4
    assert report["chunk_bytes"] == max(row["largest_chunk_bytes"] for row in report["reads"])
    assert planned(capsys, "--model", path, "--decode", "tp=4")["chunk_bytes"] == 2 << 20
    assert main(["plan", "--model", path, "--chunk", "2MiB"]) == 2
    err = capsys.readouterr().err
    assert "staging.chunk_bytes" in err
    assert "--chunk" in err


def test_the_busiest_rank_may_be_a_producer(capsys):
    """One producer sends all to four consumers, each of which gets a quarter."""
    report = planned(capsys, "--decode", "tp=4", "--tokens", "1000", "--link", "100")
    assert report["predicted_ms"] == pytest.approx(131_072_000 * 8 / 100e9 * 1e3)


def test_replicas_are_read_rank_by_rank_and_connections_counted_once_for_a_pair(capsys):
    """Eight ranks hold two KV heads four times, and four ranks hold them twice."""
    model = ("--kv-heads", "2")
    report = planned(capsys, *model, "--prefill", "tp=8", "--decode", "tp=8")
    assert [(r["consumer"], r["producer"]) for r in report["reads"]] == [
        (f"pp0tp{rank}", f"pp0tp{rank}") for rank in range(8)
    ]
    assert report["comparison"]["connections"] == 8
    assert report["comparison"]["replicated"] == ["prefill", "decode"]
    # each consumer of two stages reads a part of both producers' layers
    report = planned(capsys, "--prefill", "tp=2", "--decode", "pp=2")
    assert report["comparison"]["connections"] == 4
    assert (
        planned(capsys, "--prefill", "pp=2", "--decode", "pp=2")["comparison"]["connections"] == 2
    )


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-r1"])
def test_two_types_are_planned_with_what_is_converted_and_the_bytes_of_the_narrower_one(
    capsys, model
):
    sizes = ["--model", model, "--tokens", "1000"]
    plain = planned(capsys, *sizes)
    assert plain["direct_bytes"] == plain["total_bytes"]
    bf16, fp8 = "dtype=bfloat16", "dtype=float8_e4m3fn"
    for prefill, decode in (("block=16", fp8), (bf16, fp8), (fp8, "block=64")):
        found = planned(capsys, *sizes, "--prefill", prefill, "--decode", decode)
        assert found["total_bytes"] * 2 == plain["total_bytes"]
        wide = prefill != fp8
        assert found["direct_bytes"] == plain["total_bytes"] // (1 if wide else 2)
        there, here = ("bfloat16", "float8_e4m3fn") if wide else ("float8_e4m3fn", "bfloat16")
        assert f"{there} there, {here} here: converted on the way" in found["summary"]
    same = planned(capsys, *sizes, "--prefill", fp8, "--decode", fp8)
    assert same["direct_bytes"] == same["total_bytes"] == plain["total_bytes"] // 2
    assert "converted" not in same["summary"]
    assert main(["plan", *sizes, "--decode", fp8]) == 0
    assert "where reads are packed; direct reads take" in " ".join(capsys.readouterr().out.split())


def test_types_that_are_not_converted_are_refused(capsys):
    for arguments, words in (
        (["--decode", "dtype=int8"], "elements of this type cannot be converted"),
        (["--model", "deepseek-v3.2", "--decode", "dtype=bfloat16"], "several kinds of bytes"),
        (
            ["--prefill", "dtype=bfloat16", "--decode", "dtype=float16"],
            "are not converted, since neither is fp8",
        ),
    ):
        assert main(["plan", *arguments]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
