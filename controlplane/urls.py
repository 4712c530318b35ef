"""All routes: REST under /api/, pages at the root."""

from django.urls import include, path

handler404 = "controlplane.dashboards.errors.not_found"

urlpatterns = [
    path("api/", include("controlplane.api.urls")),
    path("", include("controlplane.dashboards.urls")),
]
