# SPDX-License-Identifier: Apache-2.0
"""A tiny random chat model with a tokenizer of its own, for tests that need a real engine or trainer in seconds.

Qwen2 (or Llama) with two layers, hidden size 128 and head_dim 32 (the smallest that vLLM's CPU attention takes), about
600 tokens of byte-level BPE, a ChatML template and ``<|im_end|>`` as end of turn. The weights come from one fixed seed.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = (
    "you are playing a game guess the number between one and twenty higher lower target move turn answer "
    "format bracket invalid correct history enter your response wrapped in square for example only will be as"
)
VOCAB_SIZE = 600
MAX_LENGTH = 4096
SEED = 20260101


def tiny_model_dir(architecture: str = "qwen2") -> Path:
    """The model's folder in the user's cache, built on first use.

    The folder is named by the builder's source and the libraries' versions, so a changed builder makes a new one.
    """
    import tokenizers
    import torch
    import transformers

    recipe = "|".join(
        [Path(__file__).read_text("utf-8"), torch.__version__, transformers.__version__, tokenizers.__version__]
    )
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "war-rl" / "test-models"
    target = root / f"tiny-{architecture}-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    if not target.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".tiny-", dir=root))
        try:
            build_tiny_model(work / "model", architecture)
            # Whoever comes second finds the same bytes there already.
            if not target.is_dir():
                (work / "model").rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def build_tiny_model(folder: Path, architecture: str = "qwen2") -> Path:
    """Write model and tokenizer into ``folder``. ``architecture`` is ``qwen2`` or ``llama``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    kinds = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
    if architecture not in kinds:
        raise ValueError(f"architecture={architecture!r} is unknown; use one of {', '.join(kinds)}")
    tokenizer = build_tokenizer()
    config_class, model_class = kinds[architecture]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    state = torch.get_rng_state()
    try:
        torch.manual_seed(SEED)
        model = model_class(config).to(torch.float32)
    finally:
        torch.set_rng_state(state)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def build_tokenizer():  # type: ignore[no-untyped-def]
    """The tokenizer alone; trained on invented text, the same every time."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_text(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _text() -> list[str]:
    words = WORDS.split()
    draw = random.Random(SEED)
    lines = []
    for _ in range(2000):
        picked = [draw.choice(words) if draw.random() < 0.9 else f"[{draw.randint(0, 30)}]" for _ in range(12)]
        lines.append(" ".join(picked).capitalize() + ".")
    return lines


if __name__ == "__main__":
    print(tiny_model_dir(*sys.argv[1:2]))
