"""All routes under /api/. What none of them takes is a 404 in the same JSON as every error."""

from django.urls import URLPattern, URLResolver, include, path, re_path
from drf_spectacular.views import SpectacularAPIView

from controlplane.api import deployments, keys, logs, nodes
from controlplane.api.view import UnknownRoute

urlpatterns: list[URLPattern | URLResolver] = [
    path("schema/", SpectacularAPIView.as_view(), name="schema"),
    path("v1/", include([*deployments.routes, *logs.routes, *nodes.routes, *keys.routes])),
    re_path(r"", UnknownRoute.as_view()),
]
