"""Why an engine ended: the line of its log that tells, and never a harmless one."""

from __future__ import annotations

import pytest

from workers.obituary import LONGEST, cause, ending

HARMLESS = """\
[tandem] Starting: it loads the model.
(APIServer pid=70) INFO 12-01 12:00:01 [api_server.py:1977] vLLM API server version 0.32.0
(APIServer pid=70) WARNING 12-01 12:00:02 [config.py:88] ImportError: cannot import name 'flash_attn'; falling back.
stand-in engine smollm2 (decode) serves http://127.0.0.1:21000
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00,  1.95it/s]
(EngineCore_DP0 pid=71) INFO 12-01 12:00:09 [core.py:90] init engine took 0 errors, 3.2 seconds
"""
TRACEBACK = """\
Traceback (most recent call last):
  File "/opt/engine.py", line 3, in <module>
    raise ValueError("boom")
"""
OUT_OF_MEMORY = """\
(EngineCore_DP0 pid=71) ERROR 12-01 12:00:09 [core.py:718] EngineCore failed to start.
(EngineCore_DP0 pid=71) ERROR 12-01 12:00:09 [core.py:718] Traceback (most recent call last):
(EngineCore_DP0 pid=71) ERROR 12-01 12:00:09 [core.py:718]   File "/opt/vllm/v1/engine/core.py", line 709, in run_engine_core
(EngineCore_DP0 pid=71) ERROR 12-01 12:00:09 [core.py:718]     raise OutOfMemoryError(
(EngineCore_DP0 pid=71) ERROR 12-01 12:00:09 [core.py:718] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
(APIServer pid=70) Traceback (most recent call last):
(APIServer pid=70)   File "<frozen runpy>", line 198, in _run_module_as_main
(APIServer pid=70) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
(APIServer pid=70) INFO 12-01 12:00:11 [launcher.py:99] Shutting down.
"""


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", ""),
        (HARMLESS, ""),
        ("[tandem] ValueError: not the engine's own words\n", ""),
        ("boom\nINFO:     Finished server process [70]\n", ""),
        (HARMLESS + TRACEBACK + "ValueError: boom\n" + HARMLESS, "ValueError: boom"),
        (TRACEBACK + "ValueError: first\n\nDuring handling of the above exception, another exception occurred:\n\n"
         + TRACEBACK + "KeyError: 'then'\n", "KeyError: 'then'"),
        (OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
         "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"),
        ("(EngineCore_DP0 pid=71) ERROR 12-01 12:00:09 [core.py:718] ValueError: Free memory on device (3.1/79.1 GiB) on startup "
         "is less than desired GPU memory utilization (0.9, 71.2 GiB).\n" + HARMLESS,
         "ValueError: Free memory on device (3.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB)."),
        ("ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use\n"
         "INFO:     Waiting for application shutdown.\n",
         "[Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use"),
        ("HTTP port 21000 on 127.0.0.1 cannot be had: Address already in use\n",
         "HTTP port 21000 on 127.0.0.1 cannot be had: Address already in use"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/models/m/config.json'\n",
         "FileNotFoundError: [Errno 2] No such file or directory: '/models/m/config.json'"),
        ("usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --foo\n",
         "api_server.py: error: unrecognized arguments: --foo"),
        ("/usr/bin/python: No module named vllm\n", "/usr/bin/python: No module named vllm"),
        ("python: error while loading shared libraries: libcudart.so.13: cannot open shared object file\n",
         "python: error while loading shared libraries: libcudart.so.13: cannot open shared object file"),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
         "  Value error, Model architectures ['Foo'] are not supported. [type=value_error]\n",
         "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig: "
         "Value error, Model architectures ['Foo'] are not supported. [type=value_error]"),
        ("Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n",
         "Fatal Python error: Segmentation fault"),
        ("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
         "what():  std::bad_alloc"),
        ("RuntimeError: CUDA error: device-side assert triggered\n", "RuntimeError: CUDA error: device-side assert triggered"),
        ("huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error.\n",
         "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error."),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("ERROR 12-01 12:00:09 [worker.py:7] NIXL side channel: the handshake failed\n", "NIXL side channel: the handshake failed"),
        ("ValueError: " + "x" * 999, "ValueError: " + "x" * (LONGEST - 12)),
    ],
)  # fmt: skip
def test_the_line_that_tells_why(log: str, line: str) -> None:
    assert cause(log) == line


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "Ended by itself with exit code 0"),
        (98, "Ended by itself with exit code 98"),
        (-9, "Ended by signal 9, SIGKILL (killed); perhaps out of memory, see the system's log"),
        (-11, "Ended by signal 11, SIGSEGV (segmentation fault)"),
        (-6, "Ended by signal 6, SIGABRT (aborted)"),
        (-300, "Ended by signal 300, unknown"),
        (None, "Ended by itself; its exit code is unknown, because a former agent process had started it"),
    ],
)
def test_the_ending_in_words(code: int | None, words: str) -> None:
    assert ending(code) == words
