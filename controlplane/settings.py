"""Django settings, all derived from `fleet.config`."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dj_database_url

from controlplane.door import MOST_BYTES
from controlplane.fleet import config
from controlplane.fleet.addresses import bracketed

CONFIG = config.load()
BASE_DIR = Path(__file__).resolve().parent.parent
HOME = CONFIG.home_path()


def _secret_key() -> str:
    """The configured key, else one generated once into the state folder, readable by the owner alone."""
    if CONFIG.secret_key:
        return CONFIG.secret_key
    path = CONFIG.made_home() / "secret_key"
    try:
        return path.read_text()
    except FileNotFoundError:
        fresh = path.with_suffix(f".{secrets.token_hex(4)}")
        fresh.touch(mode=0o600)
        fresh.write_text(secrets.token_urlsafe(50))
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(fresh)  # atomic: of two processes that start at once, one key wins
        fresh.unlink()
        return path.read_text()


SECRET_KEY = _secret_key()
DEBUG = False
_EVERYWHERE = CONFIG.bind in ("0.0.0.0", "::")
ALLOWED_HOSTS = [
    "127.0.0.1",  # this machine's agent comes this way, whatever names people use
    "localhost",
    "[::1]",
    *([] if _EVERYWHERE else [bracketed(CONFIG.bind)]),
    *([bracketed(urlsplit(CONFIG.public_url).hostname or "")] if CONFIG.public_url else []),
    *(CONFIG.allowed_hosts.split(",") if CONFIG.allowed_hosts else ["*"] if _EVERYWHERE else []),
]

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "rest_framework",
    "drf_spectacular",
    "controlplane.access.apps.AccessConfig",
    "controlplane.nodes.apps.NodesConfig",
    "controlplane.deployments.apps.DeploymentsConfig",
    "controlplane.api.apps.ApiConfig",
    "controlplane.dashboards.apps.DashboardsConfig",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "controlplane.dashboards.csp.ContentSecurityPolicy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "controlplane.urls"
ASGI_APPLICATION = "controlplane.asgi.application"

TEMPLATES: list[dict[str, Any]] = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": False,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

DATABASES: dict[str, Any]
if CONFIG.database_url.startswith("postgres:"):
    DATABASES = {"default": dj_database_url.parse(CONFIG.database_url, conn_max_age=60, conn_health_checks=True)}
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": dj_database_url.parse(CONFIG.database_url)["NAME"]
            if CONFIG.database_url
            else CONFIG.made_home() / "tandem.sqlite3",
            "OPTIONS": {
                # Several processes write: WAL lets readers go on, immediate transactions take the write lock at their
                # start (a later upgrade would fail at once instead of waiting), and the timeout waits for it.
                "transaction_mode": "IMMEDIATE",
                "timeout": 20,
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA foreign_keys=ON;",
            },
            # Tests too use a file in WAL mode: a database in memory, shared by threads, locks in another way.
            "TEST": {"NAME": HOME / "test.sqlite3"},
        }
    }
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

CHANNEL_LAYERS: dict[str, Any] = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [CONFIG.redis_url or "redis://127.0.0.1:6379/0"], "prefix": "tandem:live"},
    }
}

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
AUTHENTICATION_BACKENDS = ["controlplane.access.login.ThrottledBackend"]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "fleet"
LOGOUT_REDIRECT_URL = "login"

SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SAMESITE = "Lax"
CSRF_FAILURE_VIEW = "controlplane.dashboards.errors.stale_form"
X_FRAME_OPTIONS = "DENY"
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
if CONFIG.public_url:
    CSRF_TRUSTED_ORIGINS = [CONFIG.public_url]
    if CONFIG.public_url.startswith("https://"):
        SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
        SESSION_COOKIE_SECURE = True
        CSRF_COOKIE_SECURE = True

DATA_UPLOAD_MAX_MEMORY_SIZE = FILE_UPLOAD_MAX_MEMORY_SIZE = (
    MOST_BYTES  # the door takes no more, and nothing goes to a file
)

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
USE_I18N = False

STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = False

REST_FRAMEWORK: dict[str, Any] = {
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "controlplane.api.authentication.ManageKey",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["controlplane.api.documents.JSONParser"],
    "EXCEPTION_HANDLER": "controlplane.api.errors.handler",
}
SPECTACULAR_SETTINGS: dict[str, Any] = {
    "TITLE": "Tandem",
    "DESCRIPTION": "The control plane for disaggregated LLM serving.",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "ENUM_GENERATE_CHOICE_DESCRIPTION": False,
    "ENUM_NAME_OVERRIDES": {
        "PoolRole": "controlplane.api.resources.POOL_ROLES",
        "AccessRole": "controlplane.api.resources.ACCESS_ROLES",
    },
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",  # rebuilds the components: whatever adds some comes later
        "controlplane.api.schema.complete",
    ],
}

LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": CONFIG.log_level.upper()},
    # Three lines for every step of the loop, once a second, would bury all others.
    "loggers": {name: {"level": "WARNING"} for name in ("celery.beat", "celery.worker.strategy", "celery.app.trace")},
}
