"""A model's folder as small as can be: a byte-level BPE trained here, special tokens, a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXTS = (
    "The river rises in the hills and turns east before it meets the sea.",
    "Two riders share one bicycle: the first reads the road, the second keeps the pace.",
    "You are a helpful assistant. What is the weather in Zürich today? It's 3.14 degrees.",
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EVERYTHING = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}({{ m.name }}{{ m.tool_call_id }})\n{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if documents %}{{ documents | tojson }}{% endif %}[{{ enable_thinking }}/{{ reasoning_effort }}]"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shows whatever the engine hands to a template."""
SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")


def tiny_tokenizer() -> Tokenizer:
    """Texts get `<s>` in front; the chat's marks are special tokens, `<think>` is a plain added one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def write_model(folder: Path, template: str | None = CHATML, **config: object) -> Path:
    """The folder, made into a model's."""
    folder.mkdir(exist_ok=True)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    named = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>", "lstrip": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
