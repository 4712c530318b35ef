"""The web process: pages and REST by Django, the live channel by Channels."""

from __future__ import annotations

import os
import warnings

from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
# WhiteNoise reads its small files in one go; under ASGI Django warns of that at each start.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")
_http = get_asgi_application()

from controlplane.door import Door  # noqa: E402
from controlplane.live import SignedIn, websocket_urls  # noqa: E402  (needs the app registry)

application = ProtocolTypeRouter(
    {
        "http": Door(_http),
        "websocket": AuthMiddlewareStack(SignedIn(AllowedHostsOriginValidator(URLRouter(websocket_urls)))),
    }
)
