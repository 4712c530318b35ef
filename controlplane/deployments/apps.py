from django.apps import AppConfig


class DeploymentsConfig(AppConfig):
    name = "controlplane.deployments"
    default_auto_field = "django.db.models.BigAutoField"
