"""Which layers a pipeline stage holds."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnector.errors import GeometryError


def partition_layers(
    num_layers: int, pp_size: int, layers_per_stage: Sequence[int] | None = None
) -> tuple[range, ...]:
    """Global layer indices of every pipeline stage.

    Without `layers_per_stage` the stages' sizes differ by at most one, longer stages first.

    Raises:
        GeometryError: fewer layers than stages, or sizes that do not add up to `num_layers`.
    """
    if pp_size < 1 or num_layers < pp_size:
        raise GeometryError(
            "every pipeline stage needs a layer", num_layers=num_layers, pp_size=pp_size
        )
    if layers_per_stage is None:
        short, longer = divmod(num_layers, pp_size)
        layers_per_stage = [short + (stage < longer) for stage in range(pp_size)]
    if len(layers_per_stage) != pp_size or sum(layers_per_stage) != num_layers:
        raise GeometryError(
            "layers_per_stage must have one size a stage and add up to num_layers",
            layers_per_stage=tuple(layers_per_stage),
            pp_size=pp_size,
            num_layers=num_layers,
        )
    if min(layers_per_stage) < 1:
        raise GeometryError(
            "every pipeline stage needs a layer", layers_per_stage=tuple(layers_per_stage)
        )
    stages, start = [], 0
    for count in layers_per_stage:
        stages.append(range(start, start + count))
        start += count
    return tuple(stages)
