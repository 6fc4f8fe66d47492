# SPDX-License-Identifier: Apache-2.0
"""What a slime user brings: arguments, a data source, custom generate functions and a reward."""

from __future__ import annotations

import types
from typing import Any


def arguments(router: tuple[Any, Any], **changes: Any) -> Any:
    """slime's arguments as far as its rollout reads them."""
    values: dict[str, Any] = {
        "sglang_router_ip": router[0],
        "sglang_router_port": router[1],
        "hf_checkpoint": "none",
        "sglang_server_concurrency": 512,
        "rollout_num_engines": 2,
        "sglang_dp_size": 1,
        "use_distributed_post": False,
        "rollout_global_dataset": True,
        "rollout_batch_size": 6,
        "over_sampling_batch_size": changes.get("rollout_batch_size", 6),
        "n_samples_per_prompt": 4,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 8,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "rollout_seed": 1,
        "custom_generate_function_path": None,
        "custom_rm_path": "tests.trainers.slime.seams.reward",
        "rm_type": None,
        "group_rm": False,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None,
        "use_rollout_routing_replay": False,
        "ci_test": False,
        "use_wandb": False,
        "reward_key": None,
    }
    return types.SimpleNamespace(**(values | changes))


class Prompts:
    """slime's data source, as far as a rollout asks it."""

    def __init__(self, args: Any, texts: list[str] | None = None) -> None:
        from slime.utils import http_utils

        http_utils.init_http_client(args)
        self._args = args
        self._texts = texts
        self._groups = 0
        self._samples = 0

    def get_samples(self, count: int) -> list[list[Any]]:
        from slime.utils.types import Sample

        groups = []
        for _ in range(count):
            text = self._texts[self._groups % len(self._texts)] if self._texts else f"prompt {self._groups} " * 8
            group = []
            for _ in range(self._args.n_samples_per_prompt):
                group.append(Sample(prompt=text, group_index=self._groups, index=self._samples))
                self._samples += 1
            self._groups += 1
            groups.append(group)
        return groups

    def add_samples(self, samples: Any) -> None:
        raise AssertionError("a synchronous rollout hands nothing back")


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    return float(sum(sample.tokens) % 7)


async def ask(args: Any, sample: Any, params: dict[str, Any]) -> None:
    """One turn, as custom generate functions write it: slime's own post, without a routing key."""
    from slime.utils.http_utils import post

    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    answer = await post(url, {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True})
    pairs = answer["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[p[1] for p in pairs],
        log_probs=[p[0] for p in pairs],
        meta_info=answer["meta_info"],
        text=answer["text"],
    )


async def two_turns(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Two assistant turns with a tool's answer between them."""
    sample.tokens = list(sample.prompt.encode())
    await ask(args, sample, sampling_params)
    sample.append_response_tokens(args, tokens=[7, sample.index % 90], trainable=False, text=" tool ")
    await ask(args, sample, sampling_params)
    return sample


async def asks_elsewhere(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    from slime.utils.http_utils import post

    await post(f"{args.elsewhere}/generate", {"input_ids": [1], "sampling_params": {}})
    return await two_turns(args, sample, sampling_params)


async def fails(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    raise RuntimeError("the tool broke")
