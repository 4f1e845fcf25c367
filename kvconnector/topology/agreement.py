"""What two engines must agree on, value by value."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvconnector.topology.geometry import EngineGeometry, RankGeometry


def agreed_values(engine: EngineGeometry) -> dict[str, object]:
    """All that must be equal on both sides, by name. With several cache groups a name ends with its group's number."""
    values = {**msgspec.structs.asdict(engine.model), "verify": engine.verify}
    if engine.num_groups != 1:
        values["cache_groups"] = engine.num_groups
    # the ranks of a stage hold the same layers
    stages = [engine.stage(pp_rank)[0] for pp_rank in range(engine.pp_size)]
    for index, parts in enumerate(parts_of(engine.ranks[0])):
        names, heads, dims, sizes = zip(*parts, strict=True)
        layers = sorted({layer for rank in stages for layer in rank.groups[index].layers})
        group = {
            "layers": _written(layers),
            "parts": names,
            "kv_heads": _joined(heads),
            "head_dim": _joined(dims),
            "item_size_bytes": _joined(sizes),
        }
        end = f"_{index}" if engine.num_groups > 1 else ""
        values |= {name + end: value for name, value in group.items()}
    return values


def parts_of(rank: RankGeometry) -> list[list[tuple[str, int, int, int]]]:
    """The parts of every cache group: name, and what the model says of it."""
    return [[(part.name, *part.model_key) for part in group.parts] for group in rank.groups]


def _joined(values: tuple[int, ...]) -> int | tuple[int, ...]:
    """One for all parts where they are equal."""
    return values[0] if len(set(values)) == 1 else values


def _written(layers: Sequence[int]) -> str:
    """Ascending layers in words: "0-31", or each of them."""
    if len(layers) > 1 and layers[-1] - layers[0] + 1 == len(layers):
        return f"{layers[0]}-{layers[-1]}"
    return ",".join(map(str, layers))
