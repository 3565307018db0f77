"""Activation recompute: keep less in the forward pass and compute it again in backward, to the same bits.

    none        every block keeps all that its backward needs
    selective   a block keeps its input and the results of its matrix products, the dear part; the cheap rest (norms,
                activations, dropout, attention scores) is computed again
    full        a block keeps its input alone; everything inside is computed again, a third more work in all

Chen et al., arXiv 1604.06174; selective: Korthikanti et al., arXiv 2205.05198, section 5, here by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from meshwright.errors import SpecError
from meshwright.models.anatomy import is_bare_layer, repeated_blocks

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

aten = torch.ops.aten
KEPT: Final = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Operators whose results `selective` keeps: much arithmetic for each byte."""


def apply_recompute(model: nn.Module, mode: str) -> None:
    """Wrap the forward of each repeated block, so that names of modules and parameters never change.

    The wrapped forward runs inside the module's call, after its pre-hooks: a block is seeded outside the recomputed
    region, and checkpoint stores and restores the state that the seeding left.

    Args:
        model: bare, before data parallelism wraps it.
        mode: none | selective | full.

    Raises:
        SpecError: the model repeats no blocks, so there is nothing to cut the recomputation by.
    """
    if mode == "none":
        return
    for name, block in recomputable_blocks(model, mode):
        contexts: Contexts = noop_context_fn if mode == "full" else partial(selective_contexts, name)
        # A partial of a bound method, because a deep copy of the module copies it along with its self.
        block.forward = partial(_recomputed, block.forward, contexts)


def recomputable_blocks(model: nn.Module, mode: str) -> list[tuple[str, nn.Module]]:
    """The blocks that recompute acts on.

    Raises:
        SpecError: there are none.
    """
    blocks = repeated_blocks(model)
    if not blocks or is_bare_layer(blocks[0][1]):
        rule = f"works block by block, and {type(model).__name__} has no list of equal blocks of several layers."
        nearest = 'Hold the repeated layers in an nn.ModuleList or nn.Sequential, or set train.recompute = "none".'
        raise SpecError(f'train.recompute = "{mode}"', rule, nearest)
    return blocks


def _recomputed(forward: Callable[..., Any], contexts: Contexts, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def selective_contexts(block: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for a block's forward pass and for its recomputation, which takes the results that the first kept."""
    keeping, taking = create_selective_checkpoint_contexts(keeps)  # type: ignore[no-untyped-call]
    return keeping, _says_where(block, taking)


@contextmanager
def _says_where(block: str, taking: AbstractContextManager[Any]) -> Iterator[None]:
    """Tell the user which block wrote over a result that was to be kept; torch notices it only in backward."""
    with taking:
        try:
            yield
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            rule = f"block `{block}` changes the result of a matrix product in place, and that result was to be kept."
            nearest = 'Write it out of place (no inplace=True, no +=), or set train.recompute = "full".'
            raise SpecError('train.recompute = "selective"', rule, nearest) from error


def keeps(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Does `selective` keep this result? Two kinds of product are computed again all the same.

    Attention scores, or any batched product larger than its factors, take more room than they save work. And an
    operator that draws random numbers (attention with dropout, on GPUs): kept, it would not move the generator on
    during recomputation, and every mask after it would differ from the forward pass.
    """
    if operator not in KEPT or _draws(operator, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    if operator is aten.bmm.default:
        (_, rows, inner), columns = args[0].shape, args[1].shape[2]
        if rows * columns > inner * (rows + columns):
            return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Is this an attention operator with dropout?"""
    for index, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given > 0.0)
    return False
