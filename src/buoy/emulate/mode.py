"""The context manager under which a float32 model computes as if in a narrow format.

Three kinds of float32 tensors meet inside.  Those that an operator made there are
*narrow*: on the format's grid.  Those that a kept operator made are *wide*: FP32 on
purpose.  All others came from outside, weights and data, and are rounded on entry,
like a cast.  A mark on the tensor tells them apart; a lost mark costs time, no bits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute one operator, in FP32 or narrow."""
        del types
        call = _Call(func, plan_of(func), args, kwargs or {})
        start = self._seen
        self._seen = nodes.made()
        if call.plan.view:
            return self._viewed(call.run(), args)
        inputs = list(floats((*args, *call.kwargs.values())))
        if not inputs:  # counts, masks, and what is made from nothing
            return call.run()
        if self._is_kept(call.plan, inputs):
            self._kept.add(start, self._seen)
            return self._marked(call.run(), self._wide, call.plan)
        return self._narrowed(call, inputs)

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
        return any(map(self._is_wide_number, inputs))

    def _is_wide_number(self, x: torch.Tensor) -> bool:
        """Return whether a number makes FP32 of others: so does one from outside."""
        mark = getattr(x, _MARK, 0)
        if mark == self._wide:
            return True
        is_parameter = x.requires_grad
        return mark != self._narrow and not is_parameter

    def _is_narrow(self, x: torch.Tensor) -> bool:
        return getattr(x, _MARK, 0) == self._narrow

    def _narrowed(self, call: "_Call", inputs: list[torch.Tensor]) -> Any:
        """Cast what comes in, compute, and round what goes out."""
        plan = call.plan
        # Gradients of one number are numbers of the format; others may be FP32.
        backward = nodes.now() is not None
        numbers = backward or not any(x.dim() for x in inputs)
        dtype = self._dtype
        if dtype is not None and has_own_kernel(plan, call.args, call.kwargs):
            done, result = self._by_own_kernel(call, dtype, numbers=numbers)
            if done:
                return self._marked(result, self._narrow, plan)

        alike = all(map(self._is_narrow, inputs))
        if not alike:
            call = self._cast(call, self._round, numbers=numbers)
        result = call.run()
        if plan.written or plan.out:
            for x in self._changed(call):
                x.copy_(self._round(x))
            return result
        if not (plan.moving and alike):
            result = mapped(self._round, result)
        return self._marked(result, self._narrow, plan)

    def _by_own_kernel(
        self, call: "_Call", dtype: torch.dtype, *, numbers: bool
    ) -> tuple[bool, Any]:
        """Compute with torch's kernel of the format: the same bits on every CPU.

        Returns whether there is such a kernel, and its result.
        """
        plan = call.plan
        if call.func in self._lacking or plan.out:
            return False, None
        changed = [call.args[place] for place in sorted(plan.written)]
        if not all(map(self._is_narrow, changed)):
            return False, None

        def convert(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype)

        half = self._cast(call, convert, numbers=numbers, every=True)
        try:
            result = half.run()
        except (RuntimeError, NotImplementedError):
            # Should the arguments be wrong, FP32 will say so.
            self._lacking.add(call.func)
            return False, None
        for place in plan.written:
            call.args[place].copy_(half.args[place])
        return True, changed[0] if changed else _widened(result, dtype)

    def _cast(
        self,
        call: "_Call",
        to: Callable[[torch.Tensor], torch.Tensor],
        *,
        numbers: bool,
        every: bool = False,
    ) -> "_Call":
        """Convert the arguments that come from outside, or with `every` all of them.

        Without `numbers`, a lone number beside tensors is left FP32.
        """
        plan = call.plan

        def cast(x: torch.Tensor) -> torch.Tensor:
            if self._is_narrow(x) and not every:
                return x
            return to(x) if numbers or x.dim() or x.requires_grad else x

        args = [
            arg if place in plan.left_alone and not every else mapped(cast, arg)
            for place, arg in enumerate(call.args)
        ]
        kwargs = {
            name: arg if name in plan.out else mapped(cast, arg)
            for name, arg in call.kwargs.items()
        }
        return _Call(call.func, plan, args, kwargs)

    def _changed(self, call: "_Call") -> Iterator[torch.Tensor]:
        """Yield what was written to: `out=` always, in place only what was narrow."""
        plan = call.plan
        given = call.kwargs
        yield from floats(given[name] for name in plan.out if name in given)
        args = call.args
        in_place = (args[place] for place in plan.written if place < len(args))
        yield from filter(self._is_narrow, floats(in_place))

    def _marked(self, result: Any, mark: int, plan: Plan) -> Any:
        if not plan.written and not plan.out:
            for x in floats((result,)):
                setattr(x, _MARK, mark)
        return result

    def _viewed(self, result: Any, args: Sequence[Any]) -> Any:
        """Let a view be what its base is; a parameter's gradient is FP32."""
        mark = getattr(args[0], _MARK, 0)
        if not mark:
            return result
        node = nodes.now()
        if node is None or not nodes.is_leaf(node):
            for x in floats((result,)):
                setattr(x, _MARK, mark)
        return result


@dataclass(slots=True)
class _Call:
    """An operator, what is known of it, and its arguments."""

    func: OpOverload
    plan: Plan
    args: Sequence[Any]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)


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
