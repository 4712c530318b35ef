"""What one stand-in engine is told on its command line. Values only; `__main__` reads them."""

from __future__ import annotations

from msgspec import Struct

from controlplane.fleet.model import Role

VERSION = "0.32.0"
"""The vLLM release whose surface this is; what `/version` answers."""
FINGERPRINT = f"vllm-{VERSION}-standin0"
"""`system_fingerprint` of every answer."""


class Settings(Struct, frozen=True, kw_only=True):
    """Times in seconds, sizes in tokens, blocks or bytes, as the names say."""

    host: str = "127.0.0.1"
    """The one address that every socket of this engine listens on."""
    port: int = 8000
    served_model_name: str = "sim"
    tokenizer: str = ""
    """A model's folder, whose token ids this engine has; empty: words of its own."""
    role: Role = Role.AGGREGATED
    side_channel_port: int = 0
    """Where decode engines read this engine's KV; 0: none (aggregated)."""
    events_port: int = 0
    """KV event publisher; 0: events are off, as is vLLM's default."""
    replay_port: int = 0
    max_model_len: int = 8192
    max_num_batched_tokens: int = 2048
    """Prompt tokens that one step may compute: the chunk size of a prefill."""
    max_num_seqs: int = 256
    block_size: int = 16
    kv_blocks: int = 4096
    prefill_tokens_per_second: float = 100_000.0
    itl_seconds: float = 0.005
    """Duration of one decode step, whatever the batch holds."""
    transfer_bytes_per_second: float = 1e9
    kv_bytes_per_token: int = 46_080
    """SmolLM2-135M in float32."""
    lease_seconds: float = 30.0
    startup_seconds: float = 0.2
    faults: tuple[str, ...] = ()
    api_key: str = ""

    @property
    def disaggregated(self) -> bool:
        return self.role is not Role.AGGREGATED
