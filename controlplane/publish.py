"""The only way out of the control plane: plans to agents, the snapshot to routers, "this changed" to browsers.

Everything sent is a whole set with a generation, so that a lost message costs only the time to the next beat. When Redis
is away, sending raises `Unavailable`; the caller's next beat sends again.
"""

from __future__ import annotations

LIVE_GROUP = "changed"
