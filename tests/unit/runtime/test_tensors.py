"""Cache groups from an engine's tensors."""

import pytest
import torch

import kvconnector as kvc
from kvconnector.errors import GeometryError, IncompatiblePeerError
from kvconnector.ids import Rank
from kvconnector.topology import EngineGeometry, ModelDescription, RankGeometry, TpKVTopology

NAN = float("nan")
LATENT = {layer: (torch.zeros(4, 1, 16, 576),) for layer in range(2)}


def engine(name, group):
    model = ModelDescription(model="m", dtype="float32", num_layers=2)
    rank = RankGeometry(pp_rank=0, tp_rank=0, groups=(group.geometry,))
    return EngineGeometry(engine_id=name, tp_size=1, pp_size=1, model=model, ranks=(rank,))


def test_a_latent_has_the_name_that_vllm_and_sglang_give_it():
    ours, same = (engine(name, kvc.cache_group(LATENT, part_names=["latent"])) for name in "de")
    topology = TpKVTopology(ours, Rank(0, 0))
    topology.check_compatible(same)
    with pytest.raises(IncompatiblePeerError, match="they differ in parts"):
        topology.check_compatible(engine("p", kvc.cache_group(LATENT)))


@pytest.mark.ucx
def test_a_page_may_have_any_number_of_planes():
    planes = {0: tuple(torch.zeros(4, 1, 16, width, dtype=torch.uint8) for width in (448, 128, 8))}
    group = kvc.cache_group(planes, part_names=["values", "rope", "scales"])
    assert [part.name for part in group.geometry.parts] == ["values", "rope", "scales"]
    assert [part.head_dim for part in group.geometry.parts] == [448, 128, 8]
    assert len(group.geometry.families) == 3
    worker = kvc.Worker(
        kvc.Config.from_mapping({"engine_id": "e", "role": "both", "control": {"insecure": True}}),
        rank=(0, 0),
        model="m",
    )
    with worker:
        worker.register([group])


@pytest.mark.parametrize("names", [["latent", "scales"], ["k", "k"], "kv", ["", "v"], [1, 2]])
def test_each_part_has_a_name_of_its_own(names):
    caches = LATENT if "latent" in names else {0: (torch.zeros(4, 1, 16, 8),) * 2}
    with pytest.raises(GeometryError):
        kvc.cache_group(caches, part_names=names)


@pytest.mark.parametrize(
    "wrong, words",
    [
        *(
            ({"total_heads": heads}, "total_heads must be an integer")
            for heads in (-1, "8", 1 << 31)
        ),
        *(({"row_tokens": rows}, "row_tokens") for rows in (0, -4, "4")),
        *(({"scales": {0: scale}}, "scales must be") for scale in (1.0, [["x"]], [[0.0]], [[NAN]])),
        ({"context_parallel": None}, "context_parallel must be"),
    ],
)
def test_arguments_of_a_group_that_make_no_sense_are_refused_with_their_names(wrong, words):
    with pytest.raises(GeometryError, match=words):
        kvc.cache_group(LATENT, **wrong)


@pytest.mark.parametrize(
    "tensor, words",
    [
        (torch.zeros(4, 1, 16, 8, device="meta"), "device='meta'"),
        (torch.zeros(4, 1, 16, 8).to_sparse(), "layout='torch.sparse_coo'"),
    ],
)
def test_a_tensor_without_memory_to_read_is_refused(tensor, words):
    with pytest.raises(GeometryError, match=f"a dense tensor on a CPU or a CUDA GPU .*{words}"):
        kvc.cache_group({0: (tensor,)})


def test_a_layer_s_number_is_no_truth_value():
    with pytest.raises(GeometryError, match="layers must be numbered from 0"):
        kvc.cache_group({True: LATENT[0]})
