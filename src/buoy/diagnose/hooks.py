"""Follow one forward and backward pass through the modules of a model.

Every call of a module is a `Span`.  What enters and leaves it is inspected on the way
forward; on the way back, what arrives at its outputs and what it passes on to its
inputs and parameters.  Inputs and outputs are replaced by views of themselves, so that
a gradient belongs to one module even where a tensor is used in several places.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

__all__ = [
    "Followed",
    "Size",
    "Span",
    "Spot",
    "base_of",
    "float_tensors",
    "parameter_spot",
    "size_of",
]

Where = Literal["input", "output", "grad_input", "grad_output", "grad_parameter"]
Key = tuple[str, int, str]  # a module's name, the number of its call, the place


@dataclass(frozen=True, slots=True)
class Size:
    """How large a set of tensors is."""

    amax: float  # of the finite values
    finite: bool


@dataclass(eq=False, slots=True)
class Span:
    """One call of a module."""

    name: str
    call: int
    parent: "Span | None"
    began: int = 0  # spots noted before it
    after: "Span | None" = None  # the sibling that ran before it
    first: "Span | None" = None  # the child that ran first
    last: "Span | None" = None  # the child that ran last
    bases: set[int] = field(default_factory=set)  # of its inputs
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where something was not finite."""

    where: Where
    span: Span
    parameter: str = ""


@dataclass(slots=True)
class Followed:
    """What was seen of one pass, in order of time."""

    model: torch.nn.Module
    forward: list[Spot] = field(default_factory=list)
    backward: list[Spot] = field(default_factory=list)
    sizes: dict[Key, Size] = field(default_factory=dict)
    dtypes: dict[Key, str] = field(default_factory=dict)
    _stack: list[Span] = field(default_factory=list)
    _outside: Span | None = None  # the last call that nothing of the model encloses
    _calls: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Install the hooks, and remove them in any case."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                # After others' pre-hooks, which may change the inputs; the view that
                # leaves must be the last word.
                enter = partial(self._enter, name)
                entering = module.register_forward_pre_hook(enter, with_kwargs=True)
                leaving = module.register_forward_hook(partial(self._leave, name))
                stack.callback(entering.remove)
                stack.callback(leaving.remove)
            for name, param in self.model.named_parameters():
                if param.requires_grad:
                    arriving = _hook(param, partial(self._arrived, name))
                    stack.callback(arriving.remove)
            yield

    def size(self, spot: Spot) -> Size | None:
        """Return how large it was there."""
        return self.sizes.get(_key(spot.span, spot.where + spot.parameter))

    def dtype(self, spot: Spot) -> str:
        """Return the dtype that it had there."""
        return self.dtypes.get(_key(spot.span, spot.where + spot.parameter), "")

    def amax_of(self, span: Span | None, where: Where) -> float | None:
        """Return the size of what went into, or arrived at, a call."""
        found = None if span is None else self.sizes.get(_key(span, where))
        return None if found is None else found.amax

    @property
    def ran(self) -> bool:
        """Whether any module of the model was called."""
        return bool(self._calls)

    # -- forward ----------------------------------------------------------------------

    def _enter(
        self,
        name: str,
        module: torch.nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Any:
        call = self._calls.get(name, -1) + 1
        self._calls[name] = call
        parent = self._stack[-1] if self._stack else None
        span = Span(name, call, parent, began=len(self.forward))
        span.after = self._outside if parent is None else parent.last
        self._stack.append(span)

        if not self._note(span, "input", (args, kwargs)).finite:
            self.forward.append(Spot("input", span))
        inplace = getattr(module, "inplace", False) is True
        take = partial(self._take, span, inplace=inplace)
        return pytree.tree_map_only(torch.Tensor, take, (args, kwargs))

    def _leave(
        self, name: str, module: torch.nn.Module, args: object, output: object
    ) -> Any:
        del module, args
        while self._stack and self._stack[-1].name != name:
            self._stack.pop()  # left by an exception that the model caught
        span = self._stack.pop()
        if span.parent is None:
            self._outside = span
        else:
            span.parent.first = span.parent.first or span
            span.parent.last = span

        if self._note(span, "output", output).finite:
            # Non-finite values inside did not get out: a mask, most likely.
            del self.forward[span.began :]
        else:
            self.forward.append(Spot("output", span))

        for tensor, copy in span.copies:
            tensor.data.copy_(copy.data)  # what it changed in place stays changed
        span.copies.clear()
        give = partial(self._give, span)
        return pytree.tree_map_only(torch.Tensor, give, output)

    def _note(self, span: Span, where: Where, values: object) -> Size:
        """Measure the tensors of a call's inputs or outputs."""
        key = _key(span, where)
        floats = float_tensors(values)
        found = size_of(floats, masks=where == "input")
        self.sizes[key] = found
        if floats:
            self.dtypes[key] = _short_name(floats[0].dtype)
        return found

    # -- backward ---------------------------------------------------------------------

    def _take(self, span: Span, tensor: torch.Tensor, *, inplace: bool) -> torch.Tensor:
        """Make an input the module's own, so that its gradient is."""
        if not _watchable(tensor):
            return tensor
        span.bases.add(id(base_of(tensor)))
        own = tensor.clone() if inplace else _view(tensor)
        if inplace:  # a view that is changed in place forgets its hooks
            span.copies.append((tensor, own))
        _hook(own, partial(self._passed, Spot("grad_input", span)))
        return own

    def _give(self, span: Span, tensor: torch.Tensor) -> torch.Tensor:
        """Watch the gradient that arrives at an output, in all that it may be."""
        if not _watchable(tensor):
            return tensor
        arrived = partial(self._passed, Spot("grad_output", span))
        base = base_of(tensor)
        own = _view(tensor)
        _hook(own, arrived)
        # Where the view is changed in place, the tensor itself or its base still tell.
        for other in {id(tensor): tensor, id(base): base}.values():
            if other is not own and not other.is_leaf and id(other) not in span.bases:
                _hook(other, arrived)
        return own

    def _passed(self, spot: Spot, grad: torch.Tensor) -> None:
        key = _key(spot.span, spot.where + spot.parameter)
        seen = size_of([grad])
        before = self.sizes.get(key)
        if before is not None:
            seen = Size(max(seen.amax, before.amax), seen.finite and before.finite)
        self.sizes[key] = seen
        self.dtypes[key] = _short_name(grad.dtype)
        if not seen.finite:
            self.backward.append(spot)

    def _arrived(self, name: str, grad: torch.Tensor) -> None:
        self._passed(parameter_spot(name), grad)


def parameter_spot(name: str) -> Spot:
    """Make the spot of a parameter's gradient."""
    owner, _, short = name.rpartition(".")
    return Spot("grad_parameter", Span(owner, call=0, parent=None), short)


def _watchable(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Find the tensor that this one is a view of, or itself."""
    base = tensor._base
    return tensor if base is None or not base.requires_grad else base


def _view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor) if tensor.layout is torch.strided else tensor


def _hook(
    tensor: torch.Tensor, call: Callable[[torch.Tensor], None]
) -> RemovableHandle:
    handle: RemovableHandle = tensor.register_hook(call)  # type: ignore[no-untyped-call]
    return handle


def _key(span: Span, where: str) -> Key:
    return (span.name, span.call, where)


def _short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def float_tensors(values: object) -> list[torch.Tensor]:
    """List the tensors of floating-point numbers in nested values."""
    leaves = pytree.tree_leaves(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


@torch.no_grad()
def size_of(tensors: list[torch.Tensor], *, masks: bool = False) -> Size:
    """Measure the largest finite magnitude.

    With `masks`, a tensor of 0 and -inf counts as finite: an attention mask.
    """
    amax = 0.0
    finite = True
    for tensor in tensors:
        values = (tensor._values() if tensor.is_sparse else tensor).detach()
        if not values.numel():
            continue
        largest = values.abs().max().item()
        if not math.isfinite(largest):
            finite = finite and masks and _is_mask(values)
            values = values[torch.isfinite(values)]
            largest = values.abs().max().item() if values.numel() else 0.0
        amax = max(amax, largest)
    return Size(amax, finite)


def _is_mask(values: torch.Tensor) -> bool:
    known = (values == 0) | (values == -math.inf)
    return bool(known.all().item() and (values == 0).any().item())
