from django.apps import AppConfig


class AccessConfig(AppConfig):
    name = "controlplane.access"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from controlplane.access import users  # noqa: F401  (hears of sign-ins)
