"""Tokenizer files as one message: whole, bounded, and never other files than asked for."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet import tokenizer_files as files
from controlplane.fleet.tokenizer_files import Unpackable

FILES = {"tokenizer.json": b'{"a":1}', "additional_chat_templates/tool_use.jinja": b"{{ x }}"}
NAMES = st.sampled_from([*files.NAMES, "additional_chat_templates/a.jinja"])


@given(st.dictionaries(NAMES, st.binary(max_size=300), min_size=1))
def test_what_was_packed_comes_out(given: dict[str, bytes]) -> None:
    assert files.unpack(files.pack(given), files.digest(given)) == given


def test_the_digest_tells_names_and_borders_apart() -> None:
    sets = [
        {"config.json": b"ab"},
        {"config.json": b"a"},
        {"tokenizer.json": b"ab"},
        {"config.json": b"a", "tokenizer.json": b"b"},
    ]
    assert len({files.digest(one) for one in sets}) == 4


def raw(content: object) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(content))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zlib",
        zlib.compress(b"\xc1"),
        raw([1]),
        raw({}),
        raw({"tokenizer.json": b"other"}),
        files.pack(FILES)[:-3],
        zlib.compress(bytes(files.MAX_BYTES + (1 << 20))),
        b"x" * (files.MAX_PACKED_BYTES + 1),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(Unpackable):
        files.unpack(data, files.digest(FILES))


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "model.safetensors", "additional_chat_templates/../a.jinja", "a/config.json"]
)
def test_no_other_file_travels(name: str) -> None:
    content = {name: b"x"}
    with pytest.raises(Unpackable):
        files.pack(content)
    with pytest.raises(Unpackable):
        files.unpack(raw(content), files.digest(content))
