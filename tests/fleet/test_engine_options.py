"""Who may hand which options to engines, in every spelling that vLLM's parser takes."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.access.roles import Actor
from controlplane.access.roles import Role as Access
from controlplane.deployments import permission
from controlplane.fleet import engine_options, spec
from controlplane.fleet.engine_options import HARMLESS, MANAGED_ARGUMENTS, admin_options
from controlplane.fleet.errors import AdminArgument, InvalidInput, ManagedArgument

OPERATOR, ADMIN = Actor("olga", Access.OPERATOR), Actor("ada", Access.ADMIN)

DANGEROUS = [
    "--trust-remote-code",
    "--worker-cls",
    "--worker-extension-cls",
    "--scheduler-cls",
    "--logits-processors",
    "--tool-parser-plugin",
    "--reasoning-parser-plugin",
    "--allowed-local-media-path",
    "--allowed-media-domains",
    "--lora-modules",
    "--default-mm-loras",
    "--hf-config-path",
    "--hf-overrides",
    "--load-format",
    "--model-loader-extra-config",
    "--chat-template",
    "--download-dir",
    "--otlp-traces-endpoint",
    "--tokenizer",
    "--tokenizer-mode",
    "--revision",
    "--code-revision",
    "--generation-config",
    "--speculative-config",
    "-sc",
    "--spec-model",
    "--compilation-config",
    "-cc",
    "--additional-config",
    "--structured-outputs-config",
    "--log-config-file",
    "--logging-config",
    "--io-processor-plugin",
    "--model-impl",
    "--config-format",
    "--tool-server",
    "--profiler-config",
    "--kernel-config",
    "--weight-transfer-config",
    "--mm-processor-kwargs",
    "--media-io-kwargs",
    "--mm-encoder-fp8-scale-path",
    "--mm-encoder-fp8-scale-save-path",
    "--pt-load-map-location",
    "--model-class-overrides",
    "--ignore-patterns",
    "--enable-prompt-embeds",
    "--enable-mm-embeds",
    "--trust-request-chat-template",
    "--enable-log-requests",
    "--enable-log-outputs",
    "--aux-output-config",
    "--engram-config",
    "--quantization-config",
    "--invented-by-a-later-version",
]


def document(*arguments: str, **more: object) -> dict[str, object]:
    return {"name": "d", "model": "/m", "pools": {"aggregated": {"extra_args": list(arguments)}}, **more}


def refused(*arguments: str, old: spec.DeploymentSpec | None = None, **more: object) -> bool:
    wanted = spec.parse(document(*arguments, **more))
    try:
        permission.check(OPERATOR, wanted, old)
    except AdminArgument:
        return True
    return False


@pytest.mark.parametrize("option", DANGEROUS)
def test_what_runs_code_or_reads_files_is_an_admins_in_every_spelling(option: str) -> None:
    spellings = [[option, "x"], [f"{option}=x"], ["--seed", "1", option], [option, "-1"]]
    if option.startswith("--"):
        spellings += [["--" + option[2:].replace("-", "_")], [f"--no-{option[2:]}"], [f"{option}.key", "x"]]
        spellings += [[option[:-1]], [f"{option}.a.b+=x"]]
    for arguments in spellings:
        with contextlib.suppress(ManagedArgument):  # its beginning is that of one that Tandem sets
            assert refused(*arguments), arguments
            permission.check(ADMIN, spec.parse(document(*arguments)), None)


@pytest.mark.parametrize(
    "arguments", [["-n2"], ["-n=2"], ["-r1"], ["-h"], ["--"], ["-"], ["--=x"], ["--middleware=os.system"]]
)
def test_what_tandem_sets_is_refused_to_admins_too(arguments: list[str]) -> None:
    with pytest.raises(ManagedArgument):
        spec.parse(document(*arguments))


@pytest.mark.parametrize("option", sorted(HARMLESS))
def test_harmless_options_are_anybodys(option: str) -> None:
    value = [] if option in engine_options._FLAGS else ["1"]
    assert not refused(option, *value)
    if option.startswith("--"):
        assert not refused("--" + option[2:].replace("-", "_"), *value)
    if option in engine_options._VALUED:
        assert not refused(f"{option}=-1")
        assert not refused(option, "-1")


@pytest.mark.parametrize("level", [["-O3"], ["-O", "2"], ["-O=1"], ["--optimization-level", "0"]])
def test_the_optimization_level_is_known_in_its_short_forms(level: list[str]) -> None:
    assert not refused(*level, "--seed", "7")


def test_no_option_is_both_set_by_tandem_and_harmless() -> None:
    assert not MANAGED_ARGUMENTS & HARMLESS
    assert not any(engine_options.managed_argument(option) for option in HARMLESS)


@pytest.mark.parametrize(
    "arguments", [["--enforce-eager", "org/m"], ["--seed", "1", "/m2"], ["--seed=1", "/m2"], ["-O3", "m"]]
)
def test_a_word_behind_an_option_that_takes_none_is_no_other_model(arguments: list[str]) -> None:
    with pytest.raises(InvalidInput, match="belongs to no option"):
        spec.parse(document(*arguments))


def test_a_stand_ins_own_options_are_harmless_only_where_nothing_else_reads_them() -> None:
    assert not refused("--fault", "slow", runtime="sim")
    assert refused("--fault", "slow")
    assert refused("--tokenizer", "/etc", runtime="sim")
    old = spec.parse(document("--fault", "slow", runtime="sim"))
    assert refused("--fault", "slow", old=old, runtime="cpu")


def test_an_operator_keeps_what_an_admin_gave_and_cannot_change_it() -> None:
    given_ = ("--trust-remote-code", "--seed", "1")
    old = spec.parse(document(*given_))
    assert not refused(*given_, old=old, max_model_len=2048, served_name="other")
    assert not refused("--seed", "1", old=old)
    assert refused(*given_, "--enforce-eager", old=old)
    assert refused("--trust-remote-code", old=old)
    assert refused(*given_, old=old, model="/another")
    assert refused(*given_, old=old, runtime="gpu")
    moved = {"prefill": {"extra_args": list(given_)}, "decode": {}}
    assert refused(*given_, old=spec.parse({**document(), "pools": moved}))
    assert refused(*given_)


def test_too_many_arguments_are_refused() -> None:
    for arguments in (["--seed=1"] * 201, ["--default-chat-template-kwargs", "x" * 33_000]):
        with pytest.raises(InvalidInput, match="at most"):
            spec.parse(document(*arguments))


@given(st.lists(st.text(max_size=8) | st.sampled_from(["--seed", "-O3", "-n2", "--no-x", "--a.b=1", "-1"]), max_size=5))
def test_any_arguments_are_judged(arguments: list[str]) -> None:
    """Whatever passes for harmless is made of listed options alone."""
    listed = [option.name in HARMLESS for option in engine_options.options(arguments)]
    assert (admin_options(arguments, stand_in=False) == []) == all(listed)
