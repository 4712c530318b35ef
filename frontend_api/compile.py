"""`python -m frontend_api.compile SETTINGS FOLDER SOURCE …`: mypyc and the C compiler, for `build`, in a copy of the source."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mypyc.build import mypycify
from setuptools import setup
from setuptools._distutils.compilers.C.base import Compiler

from frontend_api.compiled import LIBRARY


def _compile_side_by_side(self: Compiler, sources: list[str], **given: Any) -> list[str]:
    """As the method it replaces, which compiles one file after the other."""
    _, objects, extra, flags, build = self._setup_compile(
        given["output_dir"], given["macros"], given["include_dirs"], sources, given["depends"], given["extra_postargs"]
    )
    arguments = self._get_cc_args(flags, given["debug"], None)

    def compile_one(target: str) -> None:
        self._compile(target, *build[target], arguments, extra, flags)

    workers = min(8, len(os.sched_getaffinity(0)))  # a container may have many cores and little memory
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(compile_one, build))
    return list(objects)


if __name__ == "__main__":
    Compiler.compile = _compile_side_by_side
    settings, made, *modules = sys.argv[1:]
    sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", made]
    try:
        # One library: calls between modules are C calls. More than -O1 takes longer and gains nothing.
        extensions = mypycify(
            [f"--config-file={settings}", *modules],
            opt_level="1",
            debug_level="0",
            multi_file=True,
            group_name=LIBRARY,
        )
    except OSError as error:  # a full disk
        sys.exit(str(error))
    setup(name="tandem-router", packages=[], ext_modules=extensions)
