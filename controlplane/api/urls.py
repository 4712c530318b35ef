"""All routes under /api/. What none of them takes is a 404 in the same JSON as every error."""

from django.urls import URLPattern, URLResolver, include, path, re_path
from drf_spectacular.views import SpectacularJSONAPIView

from controlplane.api import deployments, keys, logs, nodes, users
from controlplane.api.view import ApiView, UnknownRoute


class Schema(ApiView, SpectacularJSONAPIView):
    """The OpenAPI document of all routes, for those who are signed in."""

    authentication_classes = ApiView.authentication_classes
    permission_classes = ApiView.permission_classes


urlpatterns: list[URLPattern | URLResolver] = [
    path("schema/", Schema.as_view(), name="schema"),
    path("v1/", include([*deployments.routes, *logs.routes, *nodes.routes, *keys.routes, *users.routes])),
    re_path(r"", UnknownRoute.as_view()),
]
