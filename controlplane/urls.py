"""All routes: REST under /api/, pages at the root."""

from django.urls import include, path

urlpatterns = [
    path("api/", include("controlplane.api.urls")),
    path("", include("controlplane.dashboards.urls")),
]
