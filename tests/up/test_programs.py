"""The programs, their environment and the supervisord configuration, as they are generated."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from supervisor.options import ServerOptions

from controlplane import web
from controlplane.fleet.addresses import reachable
from controlplane.fleet.config import VARIABLES, Config
from controlplane.fleet.errors import InvalidInput
from controlplane.up.programs import environment, programs, supervisord
from controlplane.up.redis_server import EmbeddedRedis
from controlplane.up.state import StateFolder

REDIS = EmbeddedRedis(Path("/usr/bin/valkey-server"), "Valkey 8", ("127.0.0.1",), 17001, "redis-password")
SECRET = "s3cr3t-value"


def made(tmp_path: Path, **settings: object) -> tuple[StateFolder, dict[str, tuple[str, ...]]]:
    state = StateFolder(tmp_path / "h")
    found = programs(Config(**settings), state, "/venv/bin/python", REDIS, "node-a")  # type: ignore[arg-type]
    return state, {program.name: program.argv for program in found}


def test_all_of_them_bind_loopback_unless_told_otherwise(tmp_path: Path) -> None:
    with web.bind("127.0.0.1", 0) as listening, web.bind("::1", 0) as other:
        assert (listening.getsockname()[0], other.getsockname()[0]) == ("127.0.0.1", "::1")
        with pytest.raises(InvalidInput, match="TANDEM_WEB_PORT: port"):
            web.bind(*listening.getsockname())
    with pytest.raises(InvalidInput, match=r"TANDEM_BIND: 192\.0\.2\.7 is not an address"):
        web.bind("192.0.2.7", 0)
    _, argv = made(tmp_path, bind="10.0.0.5")
    assert argv["agent"][-1] == "http://10.0.0.5:8000"


def test_proxy_headers_are_believed_only_behind_a_proxy() -> None:
    assert web.options(Config())["proxy_headers"] is False
    behind = web.options(Config(public_url="https://tandem.example.com"))
    assert (behind["proxy_headers"], behind["forwarded_allow_ips"]) == (True, "127.0.0.1,::1")


@pytest.mark.parametrize(
    ("bind", "host"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.0.0.5", "10.0.0.5"), ("fd00::5", "[fd00::5]")]
)
def test_a_bound_address_is_reached_at(bind: str, host: str) -> None:
    assert reachable(bind) == host


def test_they_stop_from_the_outside_in(tmp_path: Path) -> None:
    found = programs(Config(), StateFolder(tmp_path), "python", REDIS, "node-a")
    assert [p.name for p in sorted(found, key=lambda p: p.stops)] == [
        "router", "agent", "beat", "controller", "web", "redis",
    ]  # fmt: skip
    assert found[0].name == "redis"  # and Redis starts first


def test_with_a_redis_of_the_users_none_is_started(tmp_path: Path) -> None:
    assert "redis" not in [p.name for p in programs(Config(), StateFolder(tmp_path), "python", None, "node-a")]


def test_no_secret_is_in_the_environment_but_the_hubs_token(tmp_path: Path) -> None:
    inherited = {variable.name: SECRET for variable in VARIABLES if variable.secret} | {"PATH": "/bin"}
    state = StateFolder(tmp_path)
    result = environment(Config(), state, inherited, {"REDIS_URL": state.redis_url})
    assert [name for name, value in result.items() if value == SECRET] == ["HF_TOKEN"]
    assert result["REDIS_URL_FILE"] == str(state.redis_url)
    assert result["PATH"] == "/bin"


def test_only_the_agent_sees_the_hubs_token_and_it_has_no_key_to_the_rest(tmp_path: Path) -> None:
    found = {p.name: p for p in programs(Config(), StateFolder(tmp_path), "python", REDIS, "node-a")}
    for name, program in found.items():
        assert (program.environment.get("HF_TOKEN") == "") is (name != "agent")
    for name in ("REDIS_URL_FILE", "DATABASE_URL_FILE", "TANDEM_SECRET_KEY_FILE"):
        assert found["agent"].environment[name] == ""


def test_supervisord_reads_what_was_meant(tmp_path: Path) -> None:
    """By its own parser: odd characters in paths, no restart of what is to stop, and no signal to whole groups."""
    state = StateFolder(tmp_path / "an 'odd' folder")
    state.prepare()
    found = programs(Config(runtime="sim"), state, "/a 100% venv/bin/python", REDIS, "node-a")
    state.write(state.supervisor_config, supervisord(found, state, folder=tmp_path, root=False, open_files=1024))
    options = ServerOptions()
    options.realize(args=["-c", str(state.supervisor_config), "-n"])
    read = {config.name: config.process_configs[0] for config in options.process_group_configs}
    assert set(read) == {program.name for program in found}
    for program in found:
        one = read[program.name]
        assert shlex.split(one.command) == list(program.argv)  # as supervisord splits it
        assert (one.autostart, one.stopasgroup, one.killasgroup, one.redirect_stderr) == (False, False, False, True)
        assert one.stopwaitsecs == program.stop_seconds
        assert dict(one.environment) == dict(program.environment)
        assert one.stdout_logfile == str(state.logs / f"{program.name}.log")
        assert one.stdout_logfile_maxbytes * one.stdout_logfile_backups < 100_000_000
    (server,) = options.server_configs
    assert server["file"] == str(state.supervisor_socket)
    assert server["chmod"] == 0o600


def test_the_configuration_holds_no_secret(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    config = Config(secret_key=SECRET, hf_token=SECRET, database_url=SECRET, redis_url=SECRET, join_token=SECRET)
    text = supervisord(
        programs(config, state, "python", REDIS, "node-a"), state, folder=tmp_path, root=True, open_files=9
    )
    assert SECRET not in text
    assert REDIS.password not in text
    assert "user=root" in text
