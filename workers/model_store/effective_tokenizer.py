"""Write a model's tokenizer as the engine will load it. Run by an engine runtime's interpreter.

    python effective_tokenizer.py SOURCE FOLDER [--trust-remote-code]

`transformers` builds some tokenizer classes anew, whatever their `tokenizer.json` says; what counts is the outcome. Writes
`tokenizer.json` and `tokenizer_config.json` into FOLDER. Says `tandem:error SENTENCE`; imports nothing of Tandem.
"""

import json
import sys
from pathlib import Path


def main(source: Path, folder: Path, trust: bool) -> None:
    from transformers import AutoTokenizer

    # as vLLM's loader does (vllm/tokenizers/hf.py and registry.py)
    tokenizer = AutoTokenizer.from_pretrained(
        source, trust_remote_code=trust, truncation_side="left", local_files_only=True
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        sys.exit(f"tandem:error {type(tokenizer).__name__} is a tokenizer in Python: only the engine can run it.")
    original = source / "tokenizer_config.json"
    config = json.loads(original.read_text()) if original.is_file() else {}
    for listed in ("added_tokens_decoder", "additional_special_tokens"):
        config.pop(listed, None)  # they are in tokenizer.json now
    if isinstance(config.get("extra_special_tokens"), list):
        del config["extra_special_tokens"]
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | named, ensure_ascii=False))
    (folder / "tokenizer.json").write_text(backend.to_str())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), "--trust-remote-code" in sys.argv[3:])
