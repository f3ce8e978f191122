"""Find the blocks that a user means, and refuse those that cannot have own scales."""

from collections.abc import Iterable
from typing import Any

import torch

from buoy.torch import words_beyond as said

__all__ = ["check", "chosen"]

Named = list[tuple[str, torch.nn.Module]]


def chosen(model: torch.nn.Module, blocks: Any) -> Named:
    """List the blocks by name, in the order given (a class: of the modules)."""
    if not isinstance(model, torch.nn.Module):
        raise said.no_model(model)
    names = {id(module): name for name, module in model.named_modules()}
    if isinstance(blocks, str):
        found = list(_module(model, blocks).children())
    elif isinstance(blocks, type):
        found = [one for one in model.modules() if isinstance(one, blocks)]
    elif isinstance(blocks, Iterable):
        found = [_module(model, b) if isinstance(b, str) else b for b in blocks]
    else:
        raise said.which_blocks(blocks)
    if not found:
        raise said.which_blocks(blocks)
    for block in found:
        if id(block) not in names:
            raise said.block_elsewhere(block)
    return _with_the_rest(model, [(names[id(block)], block) for block in found])


def _with_the_rest(model: torch.nn.Module, blocks: Named) -> Named:
    """Add the modules before and after the blocks that hold parameters of their own.

    Between a block and what is outside of all the gradient has the global scale, which
    is the one that does not fit: a stem or a head is a block as well.
    """
    inside = {id(m) for _, block in blocks for m in block.modules()}
    around = {
        id(m)
        for m in model.modules()
        if id(m) not in inside and any(id(part) in inside for part in m.modules())
    }
    before: Named = []
    after: Named = []
    first = blocks[0][1]
    met = False
    for name, module in model.named_modules():
        met = met or module is first
        if id(module) in inside or id(module) in around:
            continue
        if any(True for _ in module.parameters(recurse=False)):
            inside.update(map(id, module.modules()))
            (after if met else before).append((name, module))
    return [*before, *blocks, *after]


def _module(model: torch.nn.Module, name: str) -> torch.nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise said.which_blocks(name) from error


def check(model: torch.nn.Module, blocks: Named) -> None:
    """Refuse blocks within blocks, and parameters that have no one factor."""
    owner: dict[int, str] = {}
    inside: dict[int, str] = {}
    for name, block in blocks:
        for module in block.modules():
            if id(module) in inside:
                raise said.block_in_block(name, inside[id(module)])
        inside.update({id(module): name for module in block.modules()})
        for label, param in block.named_parameters():
            full = f"{name}.{label}"
            if id(param) in owner:
                raise said.shared_parameter(full, owner[id(param)])
            owner[id(param)] = full
            _check_parameter(full, param)
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        for label, param in module.named_parameters(recurse=False):
            if id(param) in owner:
                raise said.shared_parameter(f"{name}.{label}", owner[id(param)])


def _check_parameter(name: str, param: torch.Tensor) -> None:
    if param.dtype is torch.float16:
        raise said.half_parameter(name)
    if hasattr(param, "to_local"):
        raise said.sharded_parameter(name)
