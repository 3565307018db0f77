"""Models of Hugging Face over tp ranks, by their own plans."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.models.hf_tensor import hf_rules, share_heads
from meshwright.parallel.recompute import apply_recompute
from meshwright.parallel.tensor import cut_tensors, head_part
from meshwright.parallel.tensor_check import require_matches
from models.tiny_hf import CONFIGS
from parallel.tensor_runs import axis_of, train_beside

EXACT = 1e-11
"""Of the model-wide maximum, in fp64."""
HALF_EXACT = 1e-6
"""Where attention is written out, transformers computes its softmax in fp32: a sum that differs by 1e-17 may round to
another fp32 number, 6e-8 away, and gradients of small weights are a few times that apart."""


def norm_in_its_own_type(module, x):
    """RMSNorm as transformers has it, without its cast to fp32, in which a last bit that differs costs 6e-8."""
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    scale = 1.0 + module.weight if "Gemma" in type(module).__name__ else module.weight
    return scale * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def model_of(name, **changes):
    keys = CONFIGS[name] | {"use_cache": False} | changes
    config = AutoConfig.for_model(**keys)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(norm_in_its_own_type, module)
    return model.double().train()


def compare(world, name, changes):
    recompute, loss_parallel = changes.pop("recompute", "none"), changes.pop("loss_parallel", True)
    axis = axis_of(world, world.world_size)
    whole, local = model_of(name, **changes), model_of(name, **changes)
    rules = hf_rules(local)
    require_matches(local, rules)
    cuts = cut_tensors(local, rules, axis, loss_parallel=loss_parallel)
    share_heads(local)
    for model in (whole, local):
        apply_recompute(model, recompute)
    return train_beside(whole, local, cuts, axis, head_part(rules, cuts, axis) if loss_parallel else None)


EIGHT = {"num_attention_heads": 8, "hidden_size": 48, "head_dim": 6}
CASES = [
    ("llama", {}, 2),
    ("llama tied", {"attention_dropout": 0.1, "recompute": "selective", "loss_parallel": False}, 2),
    ("llama", EIGHT | {"attention_dropout": 0.1, "attention_bias": True}, 4),
    ("llama tied", {"num_key_value_heads": 6}, 2),
    ("qwen3", {"attention_dropout": 0.1}, 2),
    ("qwen3", EIGHT, 4),
    ("qwen2", {}, 2),
    ("gemma2", {"attention_dropout": 0.1}, 2),
    ("phi3", {"attention_dropout": 0.1, "resid_pdrop": 0.1}, 2),
    ("gpt_neox", {"num_attention_heads": 6, "hidden_dropout": 0.1}, 2),
]


@pytest.mark.parametrize(
    ("name", "changes", "tp"),
    [pytest.param(*case, marks=[] if i % 3 == 0 else pytest.mark.matrix, id=str(case)) for i, case in enumerate(CASES)],
)
def test_three_steps_equal_those_of_the_whole_model(run_ranks, name, changes, tp) -> None:
    for apart in run_ranks(tp, compare, name, changes):
        assert max(apart.values()) < (HALF_EXACT if name == "gemma2" else EXACT), apart
