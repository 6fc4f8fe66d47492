# SPDX-License-Identifier: Apache-2.0
"""The tiny model, taught by heart to call a tool: it really writes the calls that verl's tool agent parses.

It sees eight conversations again and again: a question, two calls of ``add``, each answered, and a last word. That
takes about a minute once; the model then stays in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.tiny_model import tiny_model_dir

ROWS = 8
STEPS, ENOUGH = 500, 0.005
"""It is taught until its loss falls below the second, at most so many steps."""
SYSTEM = "Add the numbers, then double the sum. Use the tool."


def numbers(index: int) -> tuple[int, int]:
    return index % 4 + 1, index // 4 + 2


def question(index: int) -> list[dict[str, str]]:
    a, b = numbers(index)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{a} and {b}"}]


def call(a: int, b: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'a': a, 'b': b}})}\n</tool_call>"


def tool_rows(folder: Path) -> Path:
    """A data set of the questions, for verl's ``tool_agent``."""
    import pandas

    rows = [
        {
            "data_source": "sums",
            "prompt": question(i),
            "reward_model": {"style": "rule", "ground_truth": str(2 * sum(numbers(i)))},
            "extra_info": {"index": i, "split": "train"},
            "agent_name": "tool_agent",
        }
        for i in range(ROWS)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sums.parquet"
    pandas.DataFrame(rows).to_parquet(path)
    return path


def tool_model() -> Path:
    """The model's folder, made on first use."""
    plain = tiny_model_dir()
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    taught = plain.with_name(f"{plain.name}-tools-{recipe}")
    if not (taught / "done").exists():
        shutil.copytree(plain, taught, dirs_exist_ok=True)
        _teach(taught)
        (taught / "done").touch()
    return taught


def _teach(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    examples = [conversation(tokenizer, i) for i in range(ROWS)]
    length = max(len(ids) for ids, _ in examples)
    ids = torch.tensor([e + [tokenizer.pad_token_id] * (length - len(e)) for e, _ in examples])
    labels = torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in examples])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < ENOUGH:
            break
    else:
        raise AssertionError(f"the tiny model has not learnt its conversations: loss {loss.item():.3f}")
    model.save_pretrained(folder)


def conversation(tokenizer: Any, index: int) -> tuple[list[int], list[int]]:
    """Token ids of one conversation as verl's tool agent puts them together, and labels on the model's own."""
    a, b = numbers(index)
    said = [call(a, b), call(a + b, a + b), f"It is {2 * (a + b)}."]
    answers = [f"sum={a + b}", f"sum={2 * (a + b)}"]
    prompt = tokenizer.apply_chat_template(question(index), tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
    labels = [-100] * len(ids)
    for turn, text in enumerate(said):
        own = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        ids, labels = ids + own, labels + own
        if turn < len(answers):
            between = f"\n<|im_start|>tool\n{answers[turn]}<|im_end|>\n<|im_start|>assistant\n"
            context = tokenizer.encode(between, add_special_tokens=False)
            ids, labels = ids + context, labels + [-100] * len(context)
    return ids, labels
