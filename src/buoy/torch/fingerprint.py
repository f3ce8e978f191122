"""Know gradients again: have others been computed since they were looked at?"""

import weakref
from typing import Any

import torch

from buoy.torch.gather import parameters_of

__all__ = ["Fingerprint", "fingerprint", "first_of", "still_there", "unchanged"]

# One per parameter that has a gradient: which tensor it is, and how often changed.
Fingerprint = list[tuple[weakref.ref[torch.Tensor], int]]


def fingerprint(optimizer: Any) -> Fingerprint:
    """Remember the gradients of an optimizer, without keeping them."""
    return [
        (weakref.ref(grad), grad._version)
        for param in parameters_of(optimizer)
        if (grad := param.grad) is not None
    ]


def unchanged(optimizer: Any, known: Fingerprint) -> bool:
    """Say whether they are the same tensors still, and nobody has written to them."""
    grads = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    return len(grads) == len(known) and all(
        reference() is grad and version == grad._version
        for grad, (reference, version) in zip(grads, known, strict=True)
    )


def first_of(optimizer: Any) -> Fingerprint:
    """Remember the first gradient only: whoever computes others touches it as well."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (grad := param.grad) is not None:
                return [(weakref.ref(grad), grad._version)]
    return []


def still_there(optimizer: Any, known: Fingerprint) -> bool:
    """Say whether that one is the first still, as it was."""
    now = first_of(optimizer)
    if not (now and known):
        return False
    (reference, version), (old, before) = now[0], known[0]
    return reference() is old() and version == before
