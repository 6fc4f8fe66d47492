# SPDX-License-Identifier: Apache-2.0
"""Actor, reference policy and critic of a tiny model really train on the CPU platform, through verl's registry."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("verl")

# Each rank is a fresh process, as in a real run: the platform must be found by verl itself, from the entry point.
_RANK = textwrap.dedent(
    """
    import os, sys, tempfile
    import torch
    from tensordict import TensorDict
    import verl
    from verl.utils import tensordict_utils as tu
    from verl.utils.distributed import initialize_global_process_group_ray
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    path = sys.argv[1]
    rank = int(os.environ["RANK"])
    initialize_global_process_group_ray()

    def engine(model_type, forward_only=False):
        model = HFModelConfig(path=path, load_tokenizer=False, use_remove_padding=False,
                              enable_gradient_checkpointing=False, model_type=model_type,
                              override_config={"attn_implementation": "sdpa"})
        config = FSDPEngineConfig(strategy="fsdp2", forward_only=forward_only, use_torch_compile=False,
                                  mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"})
        optim = None if forward_only else FSDPOptimizerConfig(lr=1e-2, total_training_steps=4)
        built = EngineRegistry.new(model_type, "fsdp2", model, config, optim, CheckpointConfig())
        built.initialize()
        return built

    def batch():
        generator = torch.Generator().manual_seed(rank)
        rows = [torch.randint(0, 64, (n,), generator=generator) for n in (5, 8)]
        nested = lambda xs: torch.nested.as_nested_tensor(xs, layout=torch.jagged)
        data = TensorDict(
            {"input_ids": nested(rows), "position_ids": nested([torch.arange(len(r)) for r in rows]),
             "loss_mask": nested([torch.ones(len(r)) for r in rows])}, batch_size=2)
        tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, temperature=1.0,
                             use_remove_padding=False, max_response_length=8, use_fused_kernels=False,
                             calculate_entropy=False)
        return data

    def full(built):
        return torch.cat([p.full_tensor().flatten() for p in built.module.parameters()])

    def learn(built, loss_of):
        before = full(built).clone()
        with built.train_mode():
            loss = lambda model_output, data, dp_group=None: (loss_of(model_output), {})
            built.train_batch(batch(), loss)
        after = full(built)
        assert torch.isfinite(after).all() and not torch.equal(before, after)

    actor = engine("language_model")
    learn(actor, lambda out: -out["log_probs"].values().mean())
    critic = engine("value_model")
    learn(critic, lambda out: (out["values"].values() - 1.0).square().mean())
    reference = engine("language_model", forward_only=True)
    with reference.eval_mode():
        out = reference.infer_batch(batch(), None)
    if reference.is_mp_src_rank_with_outputs():
        assert torch.isfinite(torch.cat(list(out["model_output"]["log_probs"]))).all()
    names = [n for n, _ in actor.get_per_tensor_param()[0]]
    assert "model.embed_tokens.weight" in names
    print("OK", type(actor).__name__, type(critic).__name__, torch.distributed.get_backend())
    torch.distributed.destroy_process_group()
    """
)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.mark.slow
def test_two_ranks_train_an_actor_a_critic_and_a_reference(tiny_model, tmp_path):
    from war_rl.trainers.verl.cpu.platform import accelerator_traces

    if accelerator_traces():
        pytest.skip("this machine has an accelerator")
    env = {k: v for k, v in os.environ.items() if k not in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE")}
    env |= {"WORLD_SIZE": "2", "DIST_INIT_METHOD": f"file://{tmp_path}/rendezvous", "OMP_NUM_THREADS": "1"}
    env |= {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, tiny_model],
            env=env | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, output in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
        assert "OK CpuEngineWithLMHead CpuEngineWithValueHead" in output
