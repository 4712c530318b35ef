"""What happened to one request on its way: for its record, its explanation, and the decisions that are kept. No decision."""

from __future__ import annotations

from frontend_api.formats.openai import Usage, cached_at_prefill
from frontend_api.kv.evidence import Prompt
from frontend_api.routing.choice import Choice
from frontend_api.routing.costs import Weighed
from frontend_api.routing.failures import Failure
from frontend_api.routing.outcomes import computed_itself


class Trace:
    """What happened on the way, for the record and the explanation."""

    __slots__ = (
        "block_size", "cause", "decode", "explain", "fallback", "left_out", "overlap", "params", "prefill", "reason", "stranded",
        "tried", "usage", "weighed",
    )  # fmt: skip

    def __init__(self, *, explain: bool = False) -> None:
        self.explain = explain
        """Weigh the candidates also where tokens are not known and load alone decides."""
        self.prefill: str | None = None
        self.decode: str | None = None
        self.reason = ""
        self.fallback = False
        self.cause = ""
        self.weighed: tuple[Weighed, ...] = ()
        """The candidates of the last choice, as they were then."""
        self.overlap: int | None = None
        """Tokens that the engine which reads the prompt was expected to have; None: not known."""
        self.stranded = 0
        """Prompts whose KV a prefill engine keeps until its lease ends, as no decode engine has ever got its params. (One that
        refuses them, or whose leg is cut, tells the prefill engine.)"""
        self.tried: tuple[Failure, ...] = ()
        """Legs that gave nothing, before the one that did or the end."""
        self.left_out: tuple[Failure, ...] = ()
        """Why engines and pairs were no candidates of the last choice."""
        self.usage: Usage | None = None
        """The answer's counts, as they come in."""
        self.params: bytes | None = None
        """What the last decode leg had, to fetch KV by …"""
        self.block_size: int | None = None
        """… in blocks of so many tokens, if that is known."""

    def computed_itself(self) -> bool:
        """The counts show that decode had KV to fetch and computed the prompt itself."""
        usage, params = self.usage, self.params
        if usage is None or params is None or not (usage.cached == 0 or usage.created):
            return False
        return computed_itself(usage, cached_at_prefill(params), self.block_size)

    def look_at_counts(self) -> bool:
        """Call it a fallback if the counts show it. Returns whether they do."""
        if not self.computed_itself():
            return False
        self.fallback, self.cause = True, "decode-computed"
        return True

    def note(self, choice: Choice, prompt: Prompt | None) -> None:
        self.prefill = choice.prefill.id if choice.prefill else None
        self.decode = choice.decode.id if choice.decode else None
        self.reason = choice.reason.value
        self.fallback = choice.fallback
        self.weighed = choice.weighed
        reads = choice.prefill or choice.decode
        if prompt is not None and reads is not None:
            self.overlap = prompt.overlap.get(reads, 0)
