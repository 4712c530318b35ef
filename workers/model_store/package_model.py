"""Prepare a model that lies as GGUF in an installed Python package. Run by an engine runtime's interpreter.

    python package_model.py DISTRIBUTION FOLDER

vLLM reads no quantised GGUF on a CPU, so the weights are dequantised into a plain float32 model with its tokenizer and
chat template. Says `tandem:progress FRACTION SENTENCE` and `tandem:error SENTENCE`; imports nothing of Tandem.
"""

import importlib.metadata
import sys
from pathlib import Path


def main(distribution: str, folder: Path) -> None:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"tandem:error The package {distribution} is not part of this engine runtime.")
    found = [file for file in files if file.name.endswith(".gguf")]
    if len(found) != 1:
        sys.exit(f"tandem:error The package {distribution} holds {len(found)} GGUF files, not one.")
    gguf = Path(str(found[0].locate()))
    progress(0.05, f"Reads {gguf.name}.")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    progress(0.6, "Reading the tokenizer.")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = packed.config.to_dict()
    config.pop("quantization_config", None)  # else vLLM would look for packed weights
    config.pop("_name_or_path", None)
    plain = type(packed)(type(packed.config)(**config))
    plain.load_state_dict(packed.state_dict())
    progress(0.8, "Writing the float32 model.")
    plain.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def progress(fraction: float, sentence: str) -> None:
    print(f"tandem:progress {fraction:.3f} {sentence}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
