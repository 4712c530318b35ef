"""Whoever creates or changes a deployment can choose every routing mode there is, and the whole policy."""

from __future__ import annotations

import pytest
from django.urls import reverse

from controlplane.deployments import queries
from controlplane.fleet.wire import Affinity, Disaggregate, RoutingMode, RoutingPolicy
from tests.browser import seed
from tests.controlplane.pages.test_every_page import signed_in

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("mode", RoutingMode)
def test_every_mode_can_be_chosen(mode: RoutingMode) -> None:
    seed.one_ready_pair()
    client = signed_in("operator")
    assert f">{mode}</option>" in client.get(reverse("deployments-new")).content.decode()
    settings = reverse("deployment-settings", args=["smollm2"])
    assert f'name="mode" value="{mode}"' in client.get(settings).content.decode()
    assert client.post(reverse("deployment-routing", args=["smollm2"]), {"mode": mode}).status_code == 302
    assert f'value="{mode}" checked' in client.get(settings).content.decode()


def test_every_field_of_the_policy_has_its_place() -> None:
    seed.one_ready_pair()
    client = signed_in("operator")
    new = client.get(reverse("deployments-new")).content.decode()
    settings = client.get(reverse("deployment-settings", args=["smollm2"])).content.decode()
    for name in RoutingPolicy.__struct_fields__:
        assert f'name="routing.{name}"' in new
        assert f'name="{name}"' in settings
    for word in (*Disaggregate, *Affinity):
        assert f">{word}</option>" in new.replace(" selected", "")
        assert f'value="{word}"' in settings


def test_the_policy_is_saved_and_an_emptied_limit_is_none() -> None:
    seed.one_ready_pair()
    client = signed_in("operator")
    address, settings = (reverse(f"deployment-{page}", args=["smollm2"]) for page in ("routing", "settings"))
    sent = {"mode": "kv", "disaggregate": "always", "affinity": "user", "temperature": "0.5", "max_in_flight": "64",
            "local_below_tokens": "256", "queue_limit": "1,000", "queue_seconds": "5"}  # fmt: skip
    assert client.post(address, sent).status_code == 302
    assert queries.deployment_row("smollm2").spec.routing == RoutingPolicy(
        mode=RoutingMode.KV, disaggregate=Disaggregate.ALWAYS, affinity=Affinity.USER, temperature=0.5,
        max_in_flight=64, local_below_tokens=256, queue_seconds=5.0,
    )  # fmt: skip
    page = client.get(settings).content.decode()
    assert 'name="max_in_flight" type="text" value="64"' in page
    assert client.post(address, {**sent, "max_in_flight": ""}).status_code == 302
    assert queries.deployment_row("smollm2").spec.routing.max_in_flight is None


@pytest.mark.parametrize(("field", "text"), [("temperature", "hot"), ("temperature", "-1"), ("max_in_flight", "0")])
def test_a_bad_number_is_told_at_its_field_and_nothing_is_lost(field: str, text: str) -> None:
    seed.one_ready_pair()
    client = signed_in("operator")
    answer = client.post(reverse("deployment-routing", args=["smollm2"]), {"mode": "random", field: text})
    page = answer.content.decode()
    assert answer.status_code == 400
    assert f'name="{field}" type="text" value="{text}" inputmode="numeric"' in page
    assert 'class="error" role="alert"' in page
    assert 'value="random" checked' in page
    assert queries.deployment_row("smollm2").spec.routing == RoutingPolicy()
