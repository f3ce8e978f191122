"""Local scales of blocks, for networks that no single scale fits.

If the gradient grows or shrinks by a factor per block, a scale that fits one end of the
network exceeds FP16's range of 2^40 at the other.  This module multiplies the gradient
by a power of two where it enters a block and by another where it leaves.  That is
exact, and each block computes where FP16 is accurate.  Hooks divide the gradients of a
block's parameters by the block's factor before anything reads them, so that `.grad` and
the rest of training do not depend on the factors.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from buoy._backends import torch as backend
from buoy._backends.torch.levels import OUTSIDE, Levels
from buoy._core.errors import OptionError
from buoy.torch.hooks import Extension
from buoy.torch.iteration import Work

if TYPE_CHECKING:
    from buoy.torch.scaler import GradScaler

__all__ = ["Blocks", "LocalScales", "local_scales"]

Blocks = str | type[torch.nn.Module] | Iterable[str | torch.nn.Module]
Named = list[tuple[str, torch.nn.Module]]
_ENTRY = "_buoy_entered"  # on a block's input: its `_version` on entry
_TAG = "_buoy_left"  # on a block's output: (block, tensor before, version, graph node)


def local_scales(
    model: torch.nn.Module, blocks: Blocks, *, scaler: "GradScaler | None" = None
) -> "LocalScales":
    """Add a power-of-two scale to each block of a model, which follows its gradients.

    Call it once, before training; the rest of the loop does not change.  `blocks` are
    in the order of the forward pass: modules, their names, the name of the module that
    contains them, or their class.  With `scaler` the state is saved with the scaler,
    and the factors follow its scale at once.

    Example:
        >>> import buoy.torch
        >>> layers = [torch.nn.Linear(4, 4) for _ in range(3)]
        >>> model = torch.nn.Sequential(*layers)
        >>> local = buoy.torch.local_scales(model, torch.nn.Linear)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> len(local.factors)
        3
    """
    found = _with_rest(model, _chosen(model, blocks))
    _check(model, found)
    return LocalScales(found, scaler)


class _Rescale(torch.autograd.Function):
    """Identity in the forward pass; rescales the gradient in the backward pass.

    The result shares memory but is not a view: an in-place write keeps this node in the
    graph; a write into a view would remove it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, local: "LocalScales", origin: int, target: int
    ) -> torch.Tensor:
        ctx.local, ctx.way = local, (origin, target)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.local.rescale(grad, *ctx.way), None, None, None


class LocalScales(Extension):
    """The factors of a model's blocks; created by `local_scales`."""

    key = "local_scales"

    def __init__(self, blocks: Named, scaler: "GradScaler | None" = None) -> None:
        self.names = tuple(name for name, _ in blocks)
        params = [param for _, block in blocks for param in block.parameters()]
        device = params[0].device if params else torch.device("cpu")
        self._levels = Levels(len(blocks), device)
        self._scaler = scaler
        self._pending = False  # a backward pass whose measurements are not used yet
        self._handles: list[Any] = []
        for index, (_, block) in enumerate(blocks):
            self._hook(index, block)
        if scaler is not None and scaler.is_enabled():
            scaler.attach(self)

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors of the blocks' gradients.  Waits for the device."""
        self._follow()
        return tuple(backend.read(list(self._levels.factors)))

    def looked(self, scaler: Any, work: Work) -> None:  # noqa: ARG002
        """Replace `amax_log2` by that of the gradients outside of all blocks.

        Inside, the factors keep them in range.
        """
        outside = self._levels.outside()
        if outside is not None and "amax_log2" in work.measured:
            work.measured["amax_log2"] = outside

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return levels and exponents as plain numbers."""
        self._follow()
        return {"names": list(self.names), **self._levels.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        saved, names = state["names"], self.names
        if tuple(saved) != names:
            raise OptionError(
                f"The loaded state is for {len(saved)} other blocks "
                f"({saved[:3]!r:.60}; these are {len(names)}: {names[:3]!r:.60}). Load "
                "it for the same blocks, or start without: the scales are found in a "
                "few steps."
            )
        self._pending = False
        self._levels.load_state_dict(state)

    # -- hooks ------------------------------------------------------------------------

    def _hook(self, index: int, block: torch.nn.Module) -> None:
        def enter(_: Any, args: Any, kwargs: Any) -> Any:
            self._follow()
            return _map(self._enter, index, (args, kwargs))

        def leave(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
            _map(self._check_unwritten, index, (args, kwargs))
            return _map(self._leave, index, output)

        def unscale(grad: torch.Tensor) -> torch.Tensor:
            self._levels.measure(index, grad)
            return grad / self._levels.factors[index]

        self._handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(block.register_forward_hook(leave, with_kwargs=True))
        for param in block.parameters():
            if param.requires_grad:
                self._handles.append(param.register_hook(unscale))  # type: ignore[no-untyped-call]

    def _enter(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Rescale the gradient that leaves a block through its input.

        If the input is another block's output, rescale to that block's factor in one
        multiplication: the global scale between them may not fit.
        """
        previous, source = OUTSIDE, x
        tag = getattr(x, _TAG, None)
        if tag is not None and tag[2] == x._version and tag[3] is x.grad_fn:
            previous, source = tag[:2]  # that output was not changed since
        inside: torch.Tensor = _Rescale.apply(source, self, index, previous)  # type: ignore[no-untyped-call]
        setattr(inside, _ENTRY, inside._version)
        return inside

    def _leave(self, y: torch.Tensor, index: int) -> torch.Tensor:
        """Rescale the gradient that enters a block through its output."""
        out: torch.Tensor = _Rescale.apply(y, self, OUTSIDE, index)  # type: ignore[no-untyped-call]
        setattr(out, _TAG, (index, y, out._version, out.grad_fn))
        return out

    def _check_unwritten(self, x: torch.Tensor, index: int) -> None:
        """Raise if a block wrote into its input: autograd would not detect it."""
        if getattr(x, _ENTRY, x._version) != x._version:
            raise OptionError(
                f"Block `{self.names[index]}` changes its input in place (an "
                "activation with `inplace=True`, or `x += ...`). A block with its own "
                "scale gets another tensor with the memory of its input: outside, the "
                "new values would be used with the old gradient. Set `inplace=False`."
            )

    def rescale(self, grad: torch.Tensor, origin: int, target: int) -> torch.Tensor:
        """Rescale a gradient, from one block's factor to another's.

        The first call of a backward pass stores the loss scale.
        """
        if not self._pending:
            self._pending = True
            self._levels.begin(self._scale())
        return self._levels.rescale(grad, origin, target)

    def _follow(self) -> None:
        """Update the factors from the last backward pass, unless one is running.

        A forward pass inside a backward pass (checkpointing) must use the same factors
        as that backward pass.
        """
        if self._pending and torch._C._current_graph_task_id() == -1:
            self._pending = False
            self._levels.follow(self._scale())

    def _scale(self) -> torch.Tensor | None:
        return None if self._scaler is None else self._scaler._scale


def _map(function: Callable[[torch.Tensor, int], Any], index: int, tree: Any) -> Any:
    """Apply a function to every tensor of a pytree that requires grad."""

    def apply(x: torch.Tensor) -> Any:
        return function(x, index) if x.requires_grad else x

    return tree_map_only(torch.Tensor, apply, tree) if torch.is_grad_enabled() else tree


# -- which blocks ---------------------------------------------------------------------


def _chosen(model: Any, blocks: Any) -> Named:
    """Return the blocks with their names, in the given order or that of modules."""
    try:
        get = model.get_submodule
        if isinstance(blocks, str):
            found = list(get(blocks).children())
        elif isinstance(blocks, type):
            found = [one for one in model.modules() if isinstance(one, blocks)]
        else:
            found = [get(one) if isinstance(one, str) else one for one in blocks]
        names = {id(module): name for name, module in model.named_modules()}
        named = [(names[id(block)], block) for block in found]
    except (AttributeError, KeyError, TypeError):  # no such name, no such module, ...
        named = []
    if not named:
        raise OptionError(
            f"`blocks={blocks!r:.80}` are not blocks of this {type(model).__name__}. "
            "`model` must be a torch.nn.Module. Pass modules of the model as it is now "
            "(not of one that was copied or wrapped since), in the order of the "
            "forward pass, their names, the name of the ModuleList that holds them "
            "('layers'), or their class."
        )
    return named


def _with_rest(model: torch.nn.Module, blocks: Named) -> Named:
    """Add the modules before and after the blocks that have parameters.

    Outside of all blocks the gradient has the global scale, which may not fit: a stem
    or a head becomes a block as well.
    """
    inside = {id(m) for _, block in blocks for m in block.modules()}
    rest: Named = []
    first = 0  # of the rest that comes after the blocks
    for name, module in model.named_modules():
        if module is blocks[0][1]:
            first = len(rest)
        parts = set(map(id, module.modules()))
        if parts.isdisjoint(inside) and any(True for _ in module.parameters(False)):
            inside |= parts
            rest.append((name, module))
    return [*rest[:first], *blocks, *rest[first:]]


def _check(model: torch.nn.Module, blocks: Named) -> None:
    """Raise for blocks within blocks, and for parameters of several blocks."""
    owner: dict[int, str] = {}  # of modules and parameters inside blocks
    for name, block in blocks:
        params = list(block.named_parameters(name))
        for label, part in (*block.named_modules(prefix=name), *params):
            _check_apart(label, part, owner)
            owner[id(part)] = label
        for label, param in params:
            _check_parameter(label, param)
    for name, module in model.named_modules():
        if id(module) not in owner:
            for label, param in module.named_parameters(name, recurse=False):
                _check_apart(label, param, owner)


def _check_apart(name: str, part: object, owner: dict[int, str]) -> None:
    if id(part) in owner:
        raise OptionError(
            f"`{name}` and `{owner[id(part)]}` are the same, in two blocks or inside "
            "and outside of a block: the gradient would be a sum of parts with "
            "different factors, which cannot be divided out. Untie them, or pass "
            "blocks that are not nested."
        )


def _check_parameter(name: str, param: torch.Tensor) -> None:
    if param.dtype is torch.float16:
        raise OptionError(
            f"`{name}` is torch.float16: its gradient, divided by the block's factor, "
            "would leave FP16's range again. Keep parameters in float32 and use "
            "`torch.autocast(..., torch.float16)`."
        )
    if hasattr(param, "to_local"):
        raise OptionError(
            f"`{name}` is a DTensor: sharded layers compute with other tensors than "
            "their parameters, whose gradients a hook on the parameter does not see. "
            "Use plain or DistributedDataParallel models with local scales."
        )
