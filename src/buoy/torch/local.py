"""Scales of single blocks, for networks that no one scale fits.

Where the gradient grows or fades by a factor per block, what fits one end of FP16's
40 binades leaves the other.  Here the gradient is multiplied by a power of two where it
enters a block and by another where it leaves: exact, and each block works where FP16
is good.  Parameters of a block divide their gradients by the block's factor before
anything sees them, so `.grad` holds what it always held and clipping, groups, windows
and ranks need not know.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from buoy._backends import torch as backend
from buoy.torch.blocks import check, chosen
from buoy.torch.levels import Levels

if TYPE_CHECKING:
    from buoy.torch.scaler import GradScaler

__all__ = ["Blocks", "LocalScales", "local_scales"]

Blocks = str | type[torch.nn.Module] | Iterable[str | torch.nn.Module]
_OUTSIDE = -1  # of all blocks: the factor is 1
_ENTRY = "_buoy_entered"  # on a block's input: its version at the time
_TAG = "_buoy_left"  # on a block's output: (block, tensor before, version, graph node)


def local_scales(
    model: torch.nn.Module, blocks: Blocks, *, scaler: "GradScaler | None" = None
) -> "LocalScales":
    """Give each block of a model a power-of-two scale that follows its gradients.

    Call it once, before training; everything else stays as it is.  `blocks` are in the
    order of the forward pass: modules, their names, the name of what holds them, or
    their class.  With `scaler` the state is part of the scaler's, and factors follow
    its scale at once.

    Example:
        >>> import buoy.torch
        >>> layers = [torch.nn.Linear(4, 4) for _ in range(3)]
        >>> model = torch.nn.Sequential(*layers)
        >>> local = buoy.torch.local_scales(model, torch.nn.Linear)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> len(local.factors)
        3
    """
    return LocalScales(model, chosen(model, blocks), scaler)


class _Rescaled(torch.autograd.Function):
    """The same values, with another scale on the way back.

    The result shares memory, and is no view: whoever writes into it in place goes on
    with this node in its history, where writing into a view would cut it out.
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


class LocalScales:
    """The factors of a model's blocks; made by `local_scales`."""

    def __init__(
        self,
        model: torch.nn.Module,
        blocks: list[tuple[str, torch.nn.Module]],
        scaler: Any = None,
    ) -> None:
        check(model, blocks)
        self._blocks = [block for _, block in blocks]
        self.names = tuple(name for name, _ in blocks)
        self._levels = Levels(len(blocks), _device_of(self._blocks))
        self._scaler = scaler
        self._pending = False
        self._handles: list[Any] = []
        for index, block in enumerate(self._blocks):
            self._hook(index, block)
        if scaler is not None and scaler._enabled:
            scaler._attach("local_scales", self)

    @property
    def factors(self) -> tuple[float, ...]:
        """What each block's gradients are multiplied by.  Waits for the device."""
        self._follow()
        return tuple(backend.read(list(self._levels.factors)))

    def outside(self) -> torch.Tensor | None:
        """Give the largest gradient of the last backward pass outside of all blocks.

        What a policy that looks at sizes has to go by: inside, the factors decide.
        """
        return self._levels.outside()

    def remove(self) -> None:
        """Take the hooks away; the model is what it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def state_dict(self) -> dict[str, Any]:
        """Give levels and exponents as plain numbers."""
        self._follow()
        return {"names": list(self.names), **self._levels.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        check_names(state["names"], self.names)
        self._pending = False
        self._levels.load_state_dict(state)

    # -- hooks ------------------------------------------------------------------------

    def _hook(self, index: int, block: torch.nn.Module) -> None:
        def enter(module: Any, args: Any, kwargs: Any) -> Any:
            del module
            self._follow()
            return self._each((args, kwargs), lambda x: self._entered(x, index))

        def leave(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            del module
            self._each((args, kwargs), lambda x: _check_unwritten(x, self.names[index]))
            return self._each(output, lambda x: self._left(x, index))

        def undo(grad: torch.Tensor) -> torch.Tensor:
            self._levels.leaving(index, grad)
            return grad / self._levels.factors[index]

        self._handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(block.register_forward_hook(leave, with_kwargs=True))
        for param in block.parameters():
            if param.requires_grad:
                handle: Any = param.register_hook(undo)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _each(self, tree: Any, function: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, function, tree)

    def _entered(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Let the gradient that leaves a block go on at the scale of what comes next.

        That is the block whose output this is, in one multiplication: between two
        blocks there may be no third scale, least of all the one that does not fit.
        """
        if not _differentiable(x):
            return x
        before, source = _tag_of(x)
        inside = self._rescaled(x if source is None else source, index, before)
        setattr(inside, _ENTRY, inside._version)
        return inside

    def _left(self, y: torch.Tensor, index: int) -> torch.Tensor:
        """Let the gradient that comes from outside enter a block at its scale."""
        if not _differentiable(y):
            return y
        out = self._rescaled(y, _OUTSIDE, index)
        setattr(out, _TAG, (index, y, out._version, out.grad_fn))
        return out

    def _rescaled(self, x: torch.Tensor, origin: int, target: int) -> torch.Tensor:
        out: torch.Tensor = _Rescaled.apply(x, self, origin, target)  # type: ignore[no-untyped-call]
        return out

    def rescale(self, grad: torch.Tensor, origin: int, target: int) -> torch.Tensor:
        """Rescale a gradient on its way back."""
        self._before_backward()
        return self._levels.passing(grad, origin, target)

    # -- following --------------------------------------------------------------------

    def _before_backward(self) -> None:
        if not self._pending:
            self._pending = True
            self._levels.begin(self._scale())

    def _follow(self) -> None:
        """Take in what the last backward pass showed, unless one is under way.

        A forward pass inside a backward pass (checkpointing) must find the factors
        that the pass began with.
        """
        if self._pending and torch._C._current_graph_task_id() == -1:
            self._pending = False
            self._levels.follow(self._scale())

    def _scale(self) -> torch.Tensor | None:
        scale: torch.Tensor | None = getattr(self._scaler, "_scale", None)
        return scale


def check_names(saved: list[str], names: tuple[str, ...]) -> None:
    """Refuse the state of other blocks."""
    if tuple(saved) != names:
        from buoy.torch.words_beyond import other_blocks  # noqa: PLC0415

        raise other_blocks(saved, names)


def _check_unwritten(x: torch.Tensor, name: str) -> torch.Tensor:
    """Refuse a block that writes into its input: outside nobody would know of it."""
    version = getattr(x, _ENTRY, None)
    if version is not None and version != x._version:
        from buoy.torch.words_beyond import written_input  # noqa: PLC0415

        raise written_input(name)
    return x


def _tag_of(x: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    """Tell which block a tensor has just left, if nothing was done to it since."""
    tag = getattr(x, _TAG, None)
    if tag is None or tag[2] != x._version or tag[3] is not x.grad_fn:
        return _OUTSIDE, None
    return tag[0], tag[1]


def _differentiable(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _device_of(blocks: list[torch.nn.Module]) -> torch.device:
    for block in blocks:
        for param in block.parameters():
            return param.device
    return torch.device("cpu")
