"""Whoever creates or changes a deployment can choose every routing mode there is."""

from __future__ import annotations

import pytest
from django.urls import reverse

from controlplane.fleet.wire import RoutingMode
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
