"""Fetch a model from a hub into a folder, going on where an earlier try stopped. Run by an engine runtime's interpreter.

    HF_TOKEN=… python hub_model.py ORG/NAME REVISION FOLDER

Takes what vLLM loads and leaves other formats of the same weights. Says `tandem:progress FRACTION SENTENCE` and
`tandem:error SENTENCE`; imports nothing of Tandem and never prints the token.
"""

import fnmatch
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

OTHER_FORMATS = (
    "*.gguf",
    "*.onnx",
    "*.pth",
    "*.h5",
    "*.msgpack",
    "*.ot",
    "*.tflite",
    "original/*",
    "onnx/*",
    "openvino/*",
)


def main(model: str, revision: str, folder: Path) -> None:
    import httpx2
    from huggingface_hub import HfApi, errors, snapshot_download

    token: Any = os.environ.get("HF_TOKEN") or False
    shown = model if revision == "main" else f"{model}@{revision}"
    try:
        info = HfApi(token=token).model_info(model, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
        unwanted = other_formats(list(sizes))
        total = sum(size for name, size in sizes.items() if name not in unwanted)
        require_room(folder, total - size_of(folder), shown)
        done = threading.Event()
        watcher = threading.Thread(target=watch, args=(folder, total, done), daemon=True)
        watcher.start()
        snapshot_download(model, revision=info.sha, local_dir=folder, token=token, ignore_patterns=unwanted)
        done.set()
        watcher.join()
    except errors.GatedRepoError:
        fail(
            f"{shown} is gated: accept its terms at the hub and set HF_TOKEN (or HF_TOKEN_FILE) to a token of that account."
        )
    except errors.RepositoryNotFoundError:
        fail(f"The hub does not show {shown}: check the name, or set HF_TOKEN (or HF_TOKEN_FILE) if it is private.")
    except errors.RevisionNotFoundError:
        fail(f"The hub has no revision {revision} of {model}.")
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "?"
        if status in (401, 403):
            fail(
                f"The hub answered {status} for {shown}: check the name, or set HF_TOKEN (or HF_TOKEN_FILE) to a token of an account "
                "that may read it."
            )
        fail(f"The hub answered {status} for {shown}. The download goes on at the next attempt.")
    except (httpx2.HTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        fail(
            f"The hub cannot be reached for {shown}. Let this node reach it (HTTPS_PROXY, or HF_ENDPOINT for a mirror), "
            "or put the model into a folder on the node and write model: /FOLDER. The download goes on at the next attempt."
        )
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def other_formats(names: list[str]) -> list[str]:
    """The files that hold the same weights in a form vLLM does not load (pickles only where safetensors exist)."""
    patterns = list(OTHER_FORMATS)
    if any(name.endswith(".safetensors") and "/" not in name for name in names):
        patterns.append("*.bin")
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def watch(folder: Path, total: int, done: threading.Event) -> None:
    while not done.wait(1.0):
        have = min(size_of(folder), total)
        print(f"tandem:progress {have / max(total, 1):.3f} {mib(have)} of {mib(total)} MiB.", flush=True)


def require_room(folder: Path, missing: int, shown: str) -> None:
    free = shutil.disk_usage(folder).free
    if missing > free:
        fail(
            f"{shown} needs {mib(missing)} MiB more on the disk of {folder.parent}, which has {mib(free)} free. Make room, or "
            "set TANDEM_CACHE to a folder on a larger disk."
        )


def size_of(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:  # renamed meanwhile
            continue
    return total


def mib(size: int) -> str:
    return f"{max(size, 0) // (1 << 20):,}"


def fail(sentence: str) -> None:
    sys.exit(f"tandem:error {sentence}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
