"""What ranks ask one another: messages of one size that begin with what they are.

Over gloo a collective that meets one of another size ends the process, and one of the
same size gives numbers that mean nothing.  Here all are of one size, and ranks that
ask different things hear so, all of them.
"""

from functools import cache

import torch

__all__ = ["BYTES", "QUESTIONS", "asked", "code_of", "content", "packed"]

BYTES = 128  # of every message
_HEAD = 16  # bytes of it that say what it is

# What a rank is doing that asks it.  "norm" is the last: it alone is added up, and no
# sum of others' numbers is a multiple of its own.
QUESTIONS = {
    "agree": "checking gradients (`unscale_`, `clip_grad_norm_` or `step`)",
    "loss": "scaling a loss that its policy looks at",
    "again": "running a step again (`scaler.run`)",
    "fit": "going up again after a re-run (`scaler.run`)",
    "largest": "clipping by the largest gradient",
    "compare": "comparing parameters, to clip by a norm",
    "norm": "clipping by a norm",
}


def code_of(question: str) -> float:
    """Number a question: between 1 and 2, exact in any format."""
    return 1.0 + list(QUESTIONS).index(question) / 16.0


def asked(code: float) -> str:
    """Say what a rank is doing that asks the question of this number."""
    return {code_of(name): said for name, said in QUESTIONS.items()}[code]


@cache
def _blank(question: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    message = torch.zeros(BYTES // dtype.itemsize, dtype=dtype, device=device)
    message[0], message[1] = code_of(question), -code_of(question)
    return message


def packed(question: str, numbers: torch.Tensor) -> torch.Tensor:
    """Put numbers into a message."""
    message = _blank(question, numbers.dtype, numbers.device).clone()
    content(message, numbers.shape).copy_(numbers)
    return message


def content(message: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Give the numbers in a message."""
    start = _HEAD // message.element_size()
    return message[start : start + shape.numel()].view(shape)
