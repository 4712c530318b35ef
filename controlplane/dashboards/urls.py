"""Routes of the pages. `tests/controlplane/pages` walks them all, for every role and for nobody."""

from __future__ import annotations

from django.contrib.auth.views import LogoutView
from django.urls import path

from controlplane.dashboards import (
    changing,
    creating,
    deployments,
    events,
    fleet,
    help,
    keys,
    listing,
    logs,
    nodes,
    users,
)
from controlplane.dashboards.login import Login
from controlplane.dashboards.page import foot_part

urlpatterns = [
    path("login/", Login.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("", fleet.fleet, name="fleet"),
    path("events/", events.events, name="events"),
    path("help/<slug:topic>/", help.help, name="help"),
    path("foot/", foot_part, name="foot"),
    path("deployments/", listing.deployments, name="deployments"),
    path("new/", creating.new, name="deployments-new"),
    path("deployments/<slug:name>/", deployments.deployment, name="deployment"),
    path("deployments/<slug:name>/scale/", changing.scale, name="deployment-scale"),
    path("deployments/<slug:name>/retry/", changing.retry, name="deployment-retry"),
    path("deployments/<slug:name>/logs/", logs.deployment_logs, name="deployment-logs"),
    path("deployments/<slug:name>/logs/more/", logs.more, name="deployment-logs-more"),
    path("deployments/<slug:name>/logs/download/", logs.download, name="deployment-logs-download"),
    path("deployments/<slug:name>/revisions/", deployments.revisions, name="deployment-revisions"),
    path("deployments/<slug:name>/events/", events.of_deployment, name="deployment-events"),
    path("deployments/<slug:name>/settings/", deployments.settings, name="deployment-settings"),
    path("deployments/<slug:name>/export/", deployments.export, name="deployment-export"),
    path("deployments/<slug:name>/document/", changing.change_document, name="deployment-document"),
    path("deployments/<slug:name>/routing/", changing.routing, name="deployment-routing"),
    path("deployments/<slug:name>/delete/", changing.delete, name="deployment-delete"),
    path("nodes/", nodes.nodes, name="nodes"),
    path("join-token/", nodes.join_token, name="nodes-join-token"),
    path("nodes/<str:name>/", nodes.node, name="node"),
    path("nodes/<str:name>/cordon/", nodes.cordon, name="node-cordon"),
    path("nodes/<str:name>/remove/", nodes.remove, name="node-remove"),
    path("users/", users.users, name="users"),
    path("users/create/", users.create, name="users-create"),
    path("users/<str:user>/change/", users.change, name="user-change"),
    path("users/<str:user>/password/", users.reset, name="user-reset"),
    path("password/", users.password, name="password"),
    path("keys/", keys.keys, name="keys"),
    path("keys/create/", keys.create, name="keys-create"),
    path("keys/<str:key>/", keys.key, name="key"),
    path("keys/<str:key>/edit/", keys.edit, name="key-edit"),
    path("keys/<str:key>/limits/", keys.limit, name="key-limit"),
    path("keys/<str:key>/rotate/", keys.rotate, name="key-rotate"),
    path("keys/<str:key>/revoke/", keys.revoke, name="key-revoke"),
]
