"""Counts how often operators read or write the memory of some tensors."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CHECK = "_amp_foreach_non_finite_check_and_unscale_"


class Passes(TorchDispatchMode):
    """Count the operators that read or write any of some tensors' memory."""

    def __init__(self, tensors):
        super().__init__()
        self.memory = {tensor.data_ptr() for tensor in tensors}
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = tree_leaves((args, kwargs))
        held = {x.data_ptr() for x in given if isinstance(x, torch.Tensor)}
        if held & self.memory:
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
