# SPDX-License-Identifier: Apache-2.0
"""An agent loop with an easy task: say vowels. Two turns, so that trajectories return to their replica."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

TURNS = 2
TOKENS = 16


def share_of_vowels(text: str) -> float:
    return sum(text.count(letter) for letter in "aeiou") / max(1, len(text))


class VowelLoop(AgentLoopBase):
    """The reward is the share of vowels in what the model wrote, over all its turns."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        tokenizer: Any = self.tokenizer
        messages = list(kwargs["raw_prompt"])
        ids = await self.ct_build_initial_tokens(messages)
        prompt, request_id = len(ids), uuid4().hex
        mask: list[int] = []
        logprobs: list[float] = []
        extra: dict[str, Any] = {}
        for turn in range(TURNS):
            output = await self.server_manager.generate(
                request_id=request_id, prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": TOKENS}
            )
            first = extra.get("min_global_steps", output.extra_fields["min_global_steps"])
            extra = {**output.extra_fields, "min_global_steps": first}
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                ids, output.token_ids, mask, logprobs, assistant_logprobs=output.log_probs
            )
            ids = merged.token_ids
            if turn + 1 < TURNS:
                before = [*messages, {"role": "assistant", "content": tokenizer.decode(output.token_ids)}]
                messages = [*before, {"role": "user", "content": "more"}]
                merged, mask, logprobs = await self.ct_merge_context_msg(before, messages, ids, mask, logprobs)
                ids = merged.token_ids
        own = [token for token, mine in zip(ids[prompt:], mask, strict=True) if mine]
        return AgentLoopOutput(
            prompt_ids=ids[:prompt],
            response_ids=ids[prompt:],
            response_mask=mask,
            response_logprobs=logprobs,
            multi_modal_data={},
            reward_score=share_of_vowels(tokenizer.decode(own, skip_special_tokens=True)),
            num_turns=2 * TURNS,
            metrics=AgentLoopMetrics(),
            extra_fields={**extra, "turn_scores": [], "tool_rewards": []},
        )
