"""How to reach the OpenAI endpoint stands on every page where it is looked for, as a program elsewhere reaches it."""

from __future__ import annotations

import ast
import json
import shlex

import pytest
from django.contrib.auth.models import User
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from controlplane.access.roles import SYSTEM
from controlplane.access.services import create_key
from controlplane.dashboards.connect import Connect
from controlplane.fleet.config import Config
from tests.browser import seed

HERE = "http://127.0.0.1:8080/v1"


@pytest.mark.parametrize(
    ("config", "reached", "url"),
    [
        (Config(), "localhost:8000", HERE),
        (Config(bind="10.0.0.5", openai_port=81), "tandem.lan", "http://10.0.0.5:81/v1"),
        (Config(bind="::1"), "[::1]:8000", "http://[::1]:8080/v1"),
        (Config(bind="0.0.0.0"), "gpu-1.lan:8000", "http://gpu-1.lan:8080/v1"),
        (Config(bind="::"), "[fd00::7]:8000", "http://[fd00::7]:8080/v1"),
        (Config(public_url="https://tandem.example.com"), "127.0.0.1:8000", "https://tandem.example.com/v1"),
        (Config(public_url="https://t.example.com:8443"), "t.example.com", "https://t.example.com:8443/v1"),
        (Config(public_url="http://10.0.0.5:8000", bind="0.0.0.0"), "10.0.0.5:8000", "http://10.0.0.5:8080/v1"),
    ],
)
def test_the_address_is_the_one_that_others_reach(config: Config, reached: str, url: str) -> None:
    assert config.openai_url(reached) == url


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30))
def test_every_model_name_survives_the_snippets(model: str) -> None:
    made = Connect(HERE, model, local=False)
    words = shlex.split(made.curl.replace("\\\n", " "))
    assert words[1] == HERE + "/chat/completions"
    assert json.loads(words[-1])["model"] == model
    strings = [node.value for node in ast.walk(ast.parse(made.python)) if isinstance(node, ast.Constant)]
    assert {HERE, model, "TANDEM_KEY"} <= set(strings)
    assert f"model: {json.dumps(model, ensure_ascii=False)}," in made.javascript


@pytest.mark.django_db
def test_it_stands_on_fleet_on_the_deployment_and_at_the_key_and_never_with_a_key_in_it() -> None:
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    assert HERE in client.get("/").text, "before anything is deployed"
    seed.one_ready_pair()
    key, _ = create_key(actor=SYSTEM, name="app", scope="inference", models=["smollm2"])
    manage, _ = create_key(actor=SYSTEM, name="ops", scope="manage")
    for path in ("/", "/deployments/smollm2/", f"/keys/{key.pk}/"):
        text = client.get(path).text
        assert f"curl {HERE}/chat/completions" in text, path
        assert "&quot;model&quot;: &quot;smollm2&quot;" in text, path
        assert "Only programs on the control plane's machine reach this address." in text, path
    assert HERE not in client.get(f"/keys/{manage.pk}/").text
    made = client.post("/keys/create/", {"name": "fresh", "scope": "inference"}, headers={"HX-Request": "true"}).text
    _, _, how = made.partition("How to use it")
    assert f"curl {HERE}" in how
    assert "Bearer $TANDEM_KEY" in how
    assert "tdm-" not in how.partition("keys-table")[0]
