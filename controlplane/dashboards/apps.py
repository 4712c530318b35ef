from django.apps import AppConfig


class DashboardsConfig(AppConfig):
    name = "controlplane.dashboards"
    default_auto_field = "django.db.models.BigAutoField"
