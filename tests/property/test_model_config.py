"""Configurations with a field of another type or size: planned, or refused with words, whatever the field."""

import json

from hypothesis import given
from hypothesis import strategies as st

from kvconnector.bench.shapes import EngineShape, with_types
from kvconnector.cli.model_config import read_model_config
from kvconnector.cli.plan import build_report, default_chunk_bytes
from kvconnector.errors import KVConnectorError
from tests.support.examples import examples
from tests.support.model_configs import FAMILIES

SCALARS = st.sampled_from([None, 0, -1, 1, 3, 1.5, 1e300, 10**12, True, False, "", "x"])
MARKS = st.one_of(SCALARS, st.sampled_from(["full_attention", "mamba", "*", {}, [1], {"a": 1}]))
VALUES = st.one_of(
    SCALARS,
    st.lists(MARKS, max_size=8),
    MARKS.map(lambda mark: [mark] * 12),  # for each layer of any family
    st.dictionaries(st.sampled_from(["0", "1", "99", "attention", "head_dim"]), MARKS, max_size=2),
)
PLACES = [
    (family, path)
    for family, fields in sorted(FAMILIES.items())
    for outer, inner in fields.items()
    for path in [(outer,), *((outer, name) for name in (inner if isinstance(inner, dict) else ()))]
]


@examples(1000)
@given(place=st.sampled_from(PLACES), value=VALUES)
def test_any_value_of_a_field_is_planned_or_refused_with_words(tmp_path_factory, place, value):
    family, (*outer, name) = place
    changed = json.loads(json.dumps(FAMILIES[family]))
    fields = changed[outer[0]] if outer else changed
    fields[name] = value
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_text(json.dumps(changed))
    try:
        model = read_model_config(path)
        engines = with_types(model, EngineShape(tp=2), EngineShape(pp=2, block=32))
        if model.num_layers <= 12:  # more take long
            chunk = default_chunk_bytes(model, *engines)
            report = build_report(model, *engines, range(100), chunk_bytes=chunk)
            assert report.total_bytes >= 0
    except KVConnectorError:
        pass  # any other exception is a traceback on the user's terminal
