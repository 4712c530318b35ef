"""Runs in the engine runtime: writes a model with a vocabulary of a few hundred tokens and random weights.

`tiny_model.py FOLDER` makes the folder, with tokenizer, chat template and weights as vLLM loads them.
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}<s>"
VOCABULARY = 280


def main(folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEMPLATE], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
        dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    print(len(fast))


main(sys.argv[1])
