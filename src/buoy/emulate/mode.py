"""The context manager under which a float32 model computes as if in a narrow format.

Three kinds of float32 tensors meet inside.  Those that an operator made there are
*narrow*: on the format's grid.  Those that a kept operator made are *wide*: FP32 on
purpose.  All others came from outside, weights and data, and are rounded on entry,
like a cast.  A mark on the tensor tells them apart; a lost mark costs time, no bits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Self

import torch
from torch._ops import OpOverload
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

from buoy._core.formats import Format, number_format
from buoy.emulate import nodes
from buoy.emulate.errors import StepInsideError
from buoy.emulate.operators import Plan, has_own_kernel, operators, plan_of
from buoy.emulate.rounding import KERNELS, rounder
from buoy.emulate.tensors import floats, mapped

__all__ = ["emulate", "fp32"]

# Of an operator: any values.
Args = Sequence[Any]
Kwargs = dict[str, Any]

_MARK = "_buoy_precision"
_tokens = count(1)  # a mark is of one entry into one context, and void after it


class emulate(TorchDispatchMode):  # type: ignore[no-untyped-call]  # noqa: N801 - as autocast
    """Compute as if every operator returned a narrow format.

    Weights and data stay float32; inside, inputs and outputs of operators are rounded
    to the format's grid, forward and backward.

    Args:
        number: "fp16", "bf16", "fp8_e4m3fn", "fp8_e4m3" or "fp8_e5m2"; "fp32" rounds
            nothing.
        keep: operators that stay in FP32 with their backward passes, by name:
            `buoy.emulate.AUTOCAST` for what torch.autocast keeps, `LOSSES`, or your
            own.  What is computed from their results stays FP32, up to the next matrix
            product, as under torch.autocast.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> with emulate("fp16", keep="mse_loss"):
        ...     loss = torch.nn.functional.mse_loss(layer(torch.ones(4, 2)),
        ...                                         torch.ones(4, 1))
        ...     (loss * 1024).backward()
        >>> bool((layer.weight.grad == layer.weight.grad.half()).all())
        True
    """

    def __init__(
        self, number: str | Format = "fp16", *, keep: str | Iterable[str] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.format = number_format(number)
        self.keep = operators(keep)
        self._round = rounder(self.format)
        self._dtype = KERNELS.get(self.format.name)
        self._lacking: set[OpOverload] = set()  # without a kernel of that dtype
        self._entered: list[Callable[[], None]] = []  # what undoes each entry
        self._regions = 0  # of `fp32`, that are entered
        self._begin()

    def _begin(self) -> None:
        """Make new marks, so that tensors of an earlier entry count as from outside."""
        self._narrow = next(_tokens)
        self._wide = -self._narrow
        self._seen = nodes.made()
        self._kept = nodes.KeptNodes()

    def __enter__(self) -> Self:
        if not self._entered:
            self._begin()
        self._entered.append(register_optimizer_step_pre_hook(self._refuse).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        remove_hook = self._entered.pop()
        remove_hook()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _refuse(self, optimizer: Optimizer, *_: object) -> None:
        raise StepInsideError(optimizer, self.format.name)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Compute one operator, in FP32 or narrow."""
        del types
        kwargs = kwargs or {}
        plan = plan_of(func)
        start = self._seen
        self._seen = nodes.made()
        if plan.view:
            return self._viewed(func(*args, **kwargs), args)
        inputs = list(floats((*args, *kwargs.values())))
        if not inputs:  # counts, masks, and what is made from nothing
            return func(*args, **kwargs)
        if self._is_kept(plan, inputs):
            self._kept.add(start, self._seen)
            return self._marked(func(*args, **kwargs), self._wide, plan)
        return self._narrowed(func, plan, args, kwargs, inputs)

    def _is_kept(self, plan: Plan, inputs: list[torch.Tensor]) -> bool:
        """Return whether an operator computes in FP32."""
        node = nodes.now()
        if self._regions:
            return True
        if plan.name in self.keep and (node is None or torch.is_grad_enabled()):
            return True
        if node is not None:  # gradients are added up in FP32, like the weights
            return nodes.is_leaf(node) or node._sequence_nr() in self._kept
        if plan.narrowing:
            return False
        marks = [getattr(x, _MARK, 0) for x in inputs if x.dim()]
        if marks:
            return self._wide in marks
        # Numbers alone: FP32 wins, and those from outside are, but for parameters.
        return any(
            mark == self._wide or not (mark == self._narrow or x.requires_grad)
            for x in inputs
            for mark in [getattr(x, _MARK, 0)]
        )

    def _is_narrow(self, x: torch.Tensor) -> bool:
        return getattr(x, _MARK, 0) == self._narrow

    def _narrowed(
        self,
        func: OpOverload,
        plan: Plan,
        args: Args,
        kwargs: Kwargs,
        inputs: list[torch.Tensor],
    ) -> Any:
        """Cast what comes in, compute, and round what goes out."""
        # Gradients of one number are numbers of the format; others may be FP32.
        flat = nodes.now() is not None or not any(x.dim() for x in inputs)
        dtype = self._dtype
        if dtype is not None and has_own_kernel(plan, args, kwargs):
            done, result = self._by_own_kernel(
                dtype, func, plan, args, kwargs, flat=flat
            )
            if done:
                return self._marked(result, self._narrow, plan)
        alike = all(map(self._is_narrow, inputs))
        if not alike:
            args, kwargs = self._cast(plan, args, kwargs, self._round, flat=flat)
        result = func(*args, **kwargs)
        if plan.written or plan.out:
            for x in self._changed(plan, args, kwargs):
                x.copy_(self._round(x))
            return result
        if not (plan.moving and alike):
            result = mapped(self._round, result)
        return self._marked(result, self._narrow, plan)

    def _by_own_kernel(
        self,
        dtype: torch.dtype,
        func: OpOverload,
        plan: Plan,
        args: Args,
        kwargs: Kwargs,
        *,
        flat: bool,
    ) -> tuple[bool, Any]:
        """Compute with torch's kernel of the format: the same bits on every CPU.

        Returns whether there is such a kernel, and its result.
        """
        changed = [args[place] for place in sorted(plan.written)]
        if func in self._lacking or plan.out or not all(map(self._is_narrow, changed)):
            return False, None

        def convert(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype)

        given, named = self._cast(plan, args, kwargs, convert, flat=flat, every=True)
        try:
            result = func(*given, **named)
        except (RuntimeError, NotImplementedError):
            self._lacking.add(func)  # should the arguments be wrong, FP32 will say so
            return False, None
        for place in plan.written:
            args[place].copy_(given[place])
        return True, changed[0] if changed else _widened(result, dtype)

    def _cast(
        self,
        plan: Plan,
        args: Args,
        kwargs: Kwargs,
        to: Callable[[torch.Tensor], torch.Tensor],
        *,
        flat: bool,
        every: bool = False,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Round what comes from outside; a lone number beside tensors is left FP32."""

        def cast(x: torch.Tensor) -> torch.Tensor:
            if self._is_narrow(x) and not every:
                return x
            return to(x) if flat or x.dim() or x.requires_grad else x

        positional = [
            arg if place in plan.left_alone and not every else mapped(cast, arg)
            for place, arg in enumerate(args)
        ]
        named = {
            name: arg if name in plan.out else mapped(cast, arg)
            for name, arg in kwargs.items()
        }
        return positional, named

    def _changed(
        self, plan: Plan, args: Args, kwargs: Kwargs
    ) -> Iterator[torch.Tensor]:
        """Yield what was written to: `out=` always, in place only what was narrow."""
        yield from floats(kwargs[name] for name in plan.out if name in kwargs)
        places = (args[place] for place in plan.written if place < len(args))
        yield from filter(self._is_narrow, floats(places))

    def _marked(self, result: Any, mark: int, plan: Plan) -> Any:
        if not plan.written and not plan.out:
            for x in floats((result,)):
                setattr(x, _MARK, mark)
        return result

    def _viewed(self, result: Any, args: Args) -> Any:
        """Let a view be what its base is; a parameter's gradient is FP32."""
        mark = getattr(args[0], _MARK, 0)
        if not mark:
            return result
        node = nodes.now()
        if node is None or not nodes.is_leaf(node):
            for x in floats((result,)):
                setattr(x, _MARK, mark)
        return result


@contextmanager
def fp32() -> Iterator[None]:
    """Compute in FP32 again, forward and backward, inside of `emulate`.

    Does nothing outside of `emulate`, so that models may contain it.

    Example:
        >>> with emulate("fp16"):
        ...     x = torch.ones(2) * 300
        ...     print((x * x).tolist())
        ...     with fp32():
        ...         print((x * x).tolist())
        [inf, inf]
        [90000.0, 90000.0]
    """
    modes = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, emulate)]
    start = nodes.made()
    for mode in modes:
        mode._regions += 1
    try:
        yield
    finally:
        for mode in modes:
            mode._regions -= 1
            mode._seen = nodes.made()
            mode._kept.add(start, mode._seen)


def _widened(value: Any, dtype: torch.dtype) -> Any:
    """Make FP32 of the tensors of a dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.float32) if value.dtype is dtype else value
    if isinstance(value, (list, tuple)):
        return type(value)(_widened(part, dtype) for part in value)
    return value
