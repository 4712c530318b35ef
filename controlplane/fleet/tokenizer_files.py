"""The files that make a model's token ids, as one message: how they travel from an engine's node to routers elsewhere. Pure.

A set of files is named by the digest of its contents, so that nobody needs to trust the way.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping

import msgspec

OPTIONS = "tandem.json"
"""What an engine was told beside its model's files: `content_format` (`openai` or `string`; absent: the template decides) and
`chat_template_kwargs`, the defaults of a request's own."""
NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
    OPTIONS,
)
TEMPLATES = "additional_chat_templates"
"""A folder of further templates, `<name>.jinja` each."""
MAX_BYTES = 64 << 20
"""Of all files together: the largest vocabularies known take half of it."""
MAX_PACKED_BYTES = 32 << 20
_TEMPLATE = re.compile(TEMPLATES + r"/[A-Za-z0-9_-]{1,64}\.jinja")


class Unpackable(ValueError):
    """Not such a message, too large, or not what its name says."""


def belongs(name: str) -> bool:
    """Whether a path inside a model's folder is one of these files."""
    return name in NAMES or _TEMPLATE.fullmatch(name) is not None


def digest(files: Mapping[str, bytes]) -> str:
    """Of names and contents, in hex."""
    whole = hashlib.sha256()
    for name, content in sorted(files.items()):
        whole.update(f"{name}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()


def pack(files: Mapping[str, bytes]) -> bytes:
    """Raises `Unpackable` for files that no router would take."""
    if sum(map(len, files.values())) > MAX_BYTES or not all(map(belongs, files)):
        raise Unpackable("these are not the files of a tokenizer, or they have too many bytes")
    packed = zlib.compress(msgspec.msgpack.encode(dict(files)), 6)
    if len(packed) > MAX_PACKED_BYTES:
        raise Unpackable("too many bytes")
    return packed


def unpack(data: bytes, wanted: str) -> dict[str, bytes]:
    """The files whose digest is `wanted`. Raises `Unpackable`."""
    if len(data) > MAX_PACKED_BYTES:
        raise Unpackable("too many bytes")
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(data, MAX_BYTES + (1 << 16))
        files = msgspec.msgpack.decode(plain, type=dict[str, bytes]) if inflate.eof else {}
    except (zlib.error, msgspec.MsgspecError) as error:
        raise Unpackable(f"not understood: {error}") from None
    if not files or not all(map(belongs, files)) or digest(files) != wanted:
        raise Unpackable("not the files that its name says")
    return files
