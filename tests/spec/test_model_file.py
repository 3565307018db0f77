"""A ModelSpec file: an equal value comes back, and what is not one is refused with its key."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import SpecError
from meshwright.spec.model_file import VERSION, spec_from_json, spec_to_json
from meshwright.spec.model_spec import Bytes, ModelSpec, UnitSpec

amounts = st.floats(min_value=0, max_value=1e18, allow_nan=False)
counts = st.integers(min_value=0, max_value=10**15)
forms = st.builds(Bytes, fixed=amounts, inner=amounts, residual=amounts, normed=amounts)
modes = st.dictionaries(st.sampled_from(("none", "selective", "full")), forms)
plain_units = st.builds(
    UnitSpec, name=st.text(), count=counts, parameters=counts, frozen=counts, largest=counts, saved=modes,
    backward_peak=forms, recomputed_peak=modes, draw=st.none() | forms, matmul_parameters=counts,
)  # fmt: skip
units = st.builds(replace, plain_units, under_tp=st.none() | plain_units)
facts = st.dictionaries(st.text(), st.none() | st.booleans() | counts | amounts | st.text(), max_size=4)
specs = st.builds(
    ModelSpec, name=st.text(), units=st.lists(units, max_size=3).map(tuple), embedding_parameters=counts,
    tied=st.booleans(), before=forms, loss_peak=forms, d_model=counts, vocab_size=counts, seq_len=counts,
    max_seq_len=st.none() | counts, compute=st.sampled_from(("fp32", "bf16")), source=st.text(),
    confidence=st.sampled_from(("exact", "low")), architecture=facts,
)  # fmt: skip


@given(specs)
def test_what_is_written_comes_back_equal(spec) -> None:
    back = spec_from_json(spec_to_json(spec))
    assert back == spec and spec_to_json(back) == spec_to_json(spec)


def table(**changes: Any) -> str:
    unit = UnitSpec(name="b", count=2, parameters=5, saved={"none": Bytes(inner=3.0)})
    spec = ModelSpec(name="it", units=(unit,), d_model=3, vocab_size=4, seq_len=7, compute="fp32")
    whole = json.loads(spec_to_json(spec))
    for path, value in changes.items():
        *parents, last = path.split("__")
        part = whole
        for name in parents:
            part = part[int(name)] if isinstance(part, list) else part[name]
        if value is None:
            del part[last]
        else:
            part[last] = value
    return json.dumps(whole)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"^a file: is not JSON"),
        ("[1]", r'is no model spec: "format" must be "meshwright model spec"'),
        (table(format="other"), r"is no model spec"),
        (
            table(version=VERSION + 1),
            rf"is of version {VERSION + 1}, and {VERSION} is read here\. Trace the model again\.",
        ),
        (table(version=True), r"is of version true"),
        (table(extra=1), r"^a file.extra: is no key"),
        (table(model__seqlen=1), r"^a file: model.seqlen: is no key of a model spec\. Nearest: seq_len\."),
        (table(model__seq_len=None), r"^a file: model: lacks seq_len"),
        (table(model__seq_len="7"), r'^a file: model.seq_len: is "7", must be of type int'),
        (table(model__seq_len=True), r"model.seq_len: is true, must be of type int"),
        (table(model__seq_len=7.5), r"model.seq_len: is 7.5, must be of type int"),
        (table(model__confidence="sure"), r'model.confidence: is "sure", must be one of exact or low'),
        (table(model__units={"a": 1}), r"model.units: is .*, must be a list"),
        (table(model__units__0__count=None), r"model.units\[0\]: lacks count"),
        (table(model__units__0__saved=[]), r"model.units\[0\].saved: is \[\], must be a table"),
        (table(model__units__0__saved__none__innner=1.0), r"saved.none.innner: is no key.*Nearest: inner"),
        (table(model__before__fixed=float("inf")), r"model.before.fixed: is inf, must be of type float"),
        (table(model__architecture={"a": []}), r"model.architecture.a: is \[\], must be of type"),
    ],
)
def test_what_is_no_model_spec_is_refused_with_its_key(text, message) -> None:
    with pytest.raises(SpecError, match=message):
        spec_from_json(text, "a file")


def test_fields_with_defaults_may_be_left_out() -> None:
    assert spec_from_json(table(model__max_seq_len=None, model__loss_peak=None)) == spec_from_json(table())
