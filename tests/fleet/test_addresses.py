"""What people write for addresses and URLs: it works in one form, for every library that reads it, or is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

import dj_database_url
import pytest
import redis
from channels_redis.utils import create_pool, decode_hosts
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection

from controlplane.fleet import addresses
from controlplane.fleet.errors import InvalidInput

SECRET = "hush-hush"


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("redis://127.0.0.1", "redis://127.0.0.1/0"),
        ("redis://HOST:6380/", "redis://host:6380/0"),
        ("REDIS://h:1/3", "redis://h:1/3"),
        ("redis://h?db=7", "redis://h/7"),
        ("redis://[::1]:5/0", "redis://[::1]:5/0"),
        ("redis://:a:b@h/0", "redis://:a%3Ab@h/0"),
        ("redis://me:p%2F%23%40@h/0", "redis://me:p%2F%23%40@h/0"),
        ("redis://:!$&'()*+,;=~@h", "redis://:%21%24%26%27%28%29%2A%2B%2C%3B%3D~@h/0"),
        ("rediss://h", "rediss://h/0?ssl_cert_reqs=required"),
        ("rediss://h/1?ssl_ca_certs=/etc/ca.pem", "rediss://h/1?ssl_ca_certs=%2Fetc%2Fca.pem&ssl_cert_reqs=required"),
        ("unix:///run/r.sock", "unix:///run/r.sock?db=0"),
        ("unix://:p%20w@/run/r.sock?db=2", "unix://:p%20w@/run/r.sock?db=2"),
    ],
)
def test_a_redis_url_has_one_form_that_every_client_reads_alike(text: str, form: str) -> None:
    assert addresses.redis_url(text) == form
    assert addresses.redis_url(form) == form
    pool = redis.ConnectionPool.from_url(form)
    pool.make_connection()
    create_pool(decode_hosts([form])[0]).make_connection()
    asked = pool.connection_kwargs
    if "path" not in asked:
        celery = Connection(addresses.broker_url(form))  # type: ignore[no-untyped-call]
        seen = (celery.hostname, celery.password, int(celery.virtual_host))
        assert seen == (asked["host"], asked.get("password"), asked["db"])
        assert bool(celery.ssl) == form.startswith("rediss:")
        assert not celery.ssl or celery.ssl["ssl_cert_reqs"].name == "CERT_REQUIRED", "never any certificate"


@pytest.mark.parametrize(
    "text",
    [
        f"{SECRET}:6379",
        f"localhost:6379/{SECRET}",
        f"http://:{SECRET}@h",
        f"redis:/{SECRET}",
        f"redis://:{SECRET}/x@h:6379/0",
        f"redis://:57/{SECRET}@h:6379/0",
        f"redis://:{SECRET}#1@h:6379/0",
        f"redis://:57#{SECRET}@h/0",
        f"redis://:{SECRET}?x@h",
        f"redis://:{SECRET}@x@h/0",
        f"redis://:{SECRET}[@h/0",
        f"redis://:{SECRET}%@h/0",
        f"redis://:{SECRET}%zz@h/0",
        f"redis://:{SECRET} @h/0",
        f"redis://:{SECRET}@/0",
        f"redis://:{SECRET}@h:0/0",
        f"redis://:{SECRET}@h:70000/0",
        f"redis://:{SECRET}@h:port/0",
        f"redis://:{SECRET}@h/zero",
        f"redis://:{SECRET}@h/-1",
        f"redis://:{SECRET}@h o/0",
        f"redis://:{SECRET}@h?{SECRET}=1",
        f"redis://:{SECRET}@h?ssl_cert_reqs=none",
        f"rediss://:{SECRET}@h?ssl_cert_reqs={SECRET}",
        f"redis://:{SECRET}@h%2F",
        f"redis://:{SECRET}@[::1%25lo]/0",
        f"unix://:{SECRET}@h/run/r.sock",
        f"unix://{SECRET}",
    ],
)
def test_a_redis_url_that_cannot_work_is_a_sentence_without_its_password(text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        addresses.redis_url(text)
    assert SECRET not in refused.value.message
    assert "redis://" in refused.value.message or "known" in refused.value.message or "ssl_" in refused.value.message


@pytest.mark.parametrize("sign", "/#@?%[")
@pytest.mark.parametrize("parse", [addresses.redis_url, addresses.database_url])
def test_a_password_that_is_not_encoded_names_the_remedy(parse: Callable[[str], str], sign: str) -> None:
    scheme, rest = ("redis", "h:6379/0") if parse is addresses.redis_url else ("postgres", "h:5432/tandem")
    with pytest.raises(InvalidInput, match="percent-encoded: / as %2F, @ as %40, # as %23") as refused:
        parse(f"{scheme}://me:{SECRET}{sign}more@{rest}")
    assert SECRET not in refused.value.message


@given(
    user=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    password=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
)
def test_every_encoded_password_arrives(user: str, password: str) -> None:
    who = f"{quote(user, safe='')}:{quote(password, safe='')}@"
    asked = redis.ConnectionPool.from_url(addresses.redis_url(f"redis://{who}h/0")).connection_kwargs
    assert asked.get("password") == password
    celery = Connection(addresses.broker_url(addresses.redis_url(f"redis://{who}h/0")))  # type: ignore[no-untyped-call]
    assert celery.password == password
    found = dj_database_url.parse(addresses.database_url(f"postgres://{who}h/db"))
    assert (found["USER"], found["PASSWORD"]) == (user, password)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("postgres://u:p@db.example.com:5433/tandem", ("db.example.com", 5433, "u", "p", "tandem", {})),
        ("postgresql://u@h/tandem?sslmode=require", ("h", "", "u", "", "tandem", {"sslmode": "require"})),
        ("postgres://u@[::1]/t", ("::1", "", "u", "", "t", {})),
        ("postgres:///tandem", ("", "", "", "", "tandem", {})),
        ("postgres:///tandem?host=/run/pg", ("", "", "", "", "tandem", {"host": "/run/pg"})),
        ("postgres://u:p%2F@%2Frun%2FPostgres:5433/t", ("", 5433, "u", "p/", "t", {"host": "/run/Postgres"})),
        ("postgres://u@h/my%20db", ("h", "", "u", "", "my db", {})),
    ],
)
def test_a_database_url_of_postgres(text: str, want: tuple[object, ...]) -> None:
    found = dj_database_url.parse(addresses.database_url(text))
    assert found["ENGINE"] == "django.db.backends.postgresql"
    fields = ("HOST", "PORT", "USER", "PASSWORD", "NAME")
    assert (*(found[field] for field in fields), found.get("OPTIONS", {})) == want  # type: ignore[literal-required]


def test_a_database_url_of_sqlite_is_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert dj_database_url.parse(addresses.database_url("sqlite:///a%3Fb c.db"))["NAME"] == str(tmp_path / "a?b c.db")
    assert dj_database_url.parse(addresses.database_url("sqlite:////x/y.db"))["NAME"] == "/x/y.db"


@pytest.mark.parametrize(
    "text",
    [
        f"{SECRET}",
        f"mysql://u:{SECRET}@h/db",
        f"postgres://u:{SECRET}@h",
        f"postgres://u:{SECRET}@h/",
        f"postgres://u:{SECRET}@h/a/b",
        f"postgres://u:{SECRET}@h,i/db",
        f"postgres://u:{SECRET}@h/{'x' * 64}",
        f"postgres://u:{SECRET}@h/db?{SECRET}=1",
        "sqlite://:memory:",
        "sqlite:///",
        "sqlite:x.db",
        "sqlite:///x.db?mode=ro",
        "sqlite:///100%.db",
    ],
)
def test_a_database_url_that_cannot_work_is_a_sentence(text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        addresses.database_url(text)
    assert SECRET not in refused.value.message


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("https://Tandem.Example.com/", "https://tandem.example.com"),
        ("https://h:443", "https://h"),
        ("http://h:8000", "http://h:8000"),
        ("http://[FD00::1]:8000/", "http://[fd00::1]:8000"),
    ],
)
def test_a_web_url_has_one_form(text: str, form: str) -> None:
    assert addresses.web_url(text) == form


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("https://example.com/tandem", "the path '/tandem', and Tandem answers at the root of a host only"),
        ("https://example.com/a/b/", "the path '/a/b/'"),
        ("example.com:8000", "http:// or https:// in front"),
        ("ftp://h", "write a URL such as"),
        (f"http://me:{SECRET}@h", "no user, no password"),
        (f"http://me:{SECRET}/@h", "percent-encoded"),
        ("http://", "names no host"),
        ("http://h?x=1", "no query"),
        ("http://h h", "write a URL"),
        ("http://h:0", "its port is not from 1 to 65535"),
        ("http://h:65536", "its port is not from 1 to 65535"),
        ("http://[::1", "write a URL"),
    ],
)
def test_a_web_url_that_cannot_work_is_a_sentence(text: str, says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        addresses.web_url(text)
    assert says in refused.value.message
    assert SECRET not in refused.value.message


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("::", "::"),
        ("[::1]", "::1"),
        ("localhost", "127.0.0.1"),
        ("FD00::1", "fd00::1"),
    ],
)
def test_an_address_to_listen_on(text: str, form: str) -> None:
    assert addresses.ip_address(text) == form
    assert urlsplit(f"http://{addresses.reachable(form)}:1").port == 1


@pytest.mark.parametrize(
    "text", ["host", "127.1", "10.0.0.0/8", "224.0.0.1", "255.255.255.255", "fe80::1", "fe80::1%eth0", "1.2.3.4:80"]
)
def test_an_address_that_nothing_can_listen_on(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"such as 127\.0\.0\.1"):
        addresses.ip_address(text)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("a.example, B ,", "a.example,b"),
        ("*", "*"),
        (".example.com", ".example.com"),
        ("::1,[fd00::1],1.2.3.4", "[::1],[fd00::1],1.2.3.4"),
    ],
)
def test_host_names(text: str, form: str) -> None:
    assert addresses.host_names(text) == form


@pytest.mark.parametrize("text", ["https://a.example", "a:8000", "a b", "a/b", "*.example"])
def test_what_is_no_host_name(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not a host name"):
        addresses.host_names(text)


@pytest.mark.parametrize("text", ["9-5", "0-5", "1-65536", "5", "a-b", "1-2-3", "-5", "５-９", "21000-21002"])
def test_a_range_that_holds_no_engine(text: str) -> None:
    with pytest.raises(InvalidInput, match="21000-24999"):
        addresses.port_range(text)


@given(
    st.text(max_size=40)
    | st.builds(
        "{}://{}".format,
        st.sampled_from(["redis", "rediss", "unix", "postgres", "http"]),
        st.text("ab:/@#?%[]&=.0159-", max_size=30),
    )
)
def test_any_text_is_one_form_or_one_sentence(text: str) -> None:
    """What is taken is taken again, unchanged, and the libraries behind read it."""
    readers: dict[Callable[[str], str], Callable[[str], object]] = {
        addresses.redis_url: lambda url: redis.ConnectionPool.from_url(url).make_connection(),
        addresses.database_url: dj_database_url.parse,
        addresses.web_url: lambda url: urlsplit(url).port,
        addresses.ip_address: str,
        addresses.host_names: str,
        addresses.port_range: str,
    }
    for parse, read in readers.items():
        try:
            form = parse(text)
        except InvalidInput:
            continue
        assert parse(form) == form or not form
        if form:
            read(form)
