"""Extension points of a scaler: a feature is an `Extension` that overrides some.

The overridden methods are collected into tuples once, so that a feature that is off
costs nothing.  `Scaler` is what the centre and the features know of a scaler.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from buoy._backends.torch.gradients import Flags
from buoy._backends.torch.names import Names
from buoy._core.policies.policy import Policy
from buoy.torch.distributed import Sharing
from buoy.torch.errors import StateError
from buoy.torch.iteration import Iteration
from buoy.torch.options import Options
from buoy.torch.pending import Pending
from buoy.torch.ranks import Ranks
from buoy.torch.scale import Plan, Scale
from buoy.torch.step_log import StepLog

if TYPE_CHECKING:
    from buoy.trace import Recorder

__all__ = ["Extension", "Fp16", "Hooks", "Scaler"]

_E = TypeVar("_E", bound="Extension")


class Fp16(Protocol):
    """The option `fp16_params`: see `features.masters.Fp16Parameters`."""

    def prepare(self, optimizer: Any, names: Names) -> None:
        """Make master weights if they are wanted."""

    def check(self, optimizer: Any, names: Names, *, allow: bool) -> None:
        """Raise for FP16 gradients, unless `allow`."""

    def stepping(self, optimizer: Any) -> AbstractContextManager[None]:
        """Replace the parameters by their masters while an optimizer steps."""


class Scaler(Protocol):
    """A `GradScaler`, as the centre and the features know it."""

    _options: Options
    _names: Names
    _sharing: Sharing
    _loss_scale: Plan | Scale
    _init_scale: float
    _init_growth_tracker: int
    _iteration: Iteration
    _log: StepLog
    _hooks: "Hooks"
    _fp16: Fp16
    _family: "list[Scaler]"  # a scaler and its scale groups
    _per_optimizer_states: dict[int, Pending]
    _device: str
    _enabled: bool

    @property
    def _ranks(self) -> Ranks: ...

    @property
    def policy(self) -> Policy:
        """The policy that moves the scale."""

    @property
    def trace(self) -> "Recorder | None":
        """The recorder; None if the run is not recorded."""

    def is_enabled(self) -> bool:
        """Return whether it scales losses."""

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale."""

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients by the scale, and check them."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the step, or skip it."""

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale."""

    def get_scale(self) -> float:
        """Return the scale."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state."""

    def attach(self, extension: "Extension") -> None:
        """Attach an extension."""

    # Torch's private methods, which others override
    def _unscale_grads_(
        self,
        optimizer: Any,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> Flags: ...

    def _check_inf_per_device(self, optimizer: Any) -> dict[str, Any]: ...

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any: ...

    def _get_scale_async(self) -> torch.Tensor | None: ...

    # Our own
    def _placed(self, method: str) -> Scale: ...

    def _pending(self, optimizer: Any, method: str) -> Pending: ...

    def _foresee(self, loss: torch.Tensor | None) -> None: ...

    def _expect_backward(self) -> None: ...

    def _flush(self) -> None: ...

    def _update(self, new_scale: float | torch.Tensor | None = None) -> None: ...

    def _is_overridden(self, method: str) -> bool: ...

    def _warn_once(self, topic: str, message: str) -> None: ...

    def _why_no_gradients(self, optimizer: Any) -> str: ...

    def _extra(self) -> dict[str, Any]: ...


class Extension:
    """Base class of features: override the methods to call at points of an iteration.

    `pending` is the state of one optimizer's gradients (`buoy.torch.pending.Pending`).
    By default every method does nothing.  Compiled steps call none of them.  With scale
    groups, each scaler calls its own; `before_update` is that of the parent.

    Example:
        >>> import buoy.torch
        >>> class Print(Extension):
        ...     def updated(self, scaler, pendings):
        ...         print("scale:", scaler.get_scale())
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler = buoy.torch.GradScaler("cpu", init_scale=4.0)
        >>> scaler.attach(Print())
        >>> scaler.scale(weight.sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        scale: 4.0
    """

    key = ""  # the name of its state in a checkpoint; empty: it has no state

    def loss_scaled(
        self, scaler: Scaler, loss: torch.Tensor, scaled: torch.Tensor
    ) -> None:
        """Called after a loss was multiplied by the scale."""

    def before_inspect(self, scaler: Scaler, pending: Pending) -> None:
        """Called before the gradients of `pending.optimizer` are inspected."""

    def inspected(self, scaler: Scaler, pending: Pending) -> None:
        """Called after inspection: `pending.gathered` is still scaled.

        With such a hook gradients that are not clipped are read once more.
        """

    def norm_measured(self, scaler: Scaler, pending: Pending) -> None:
        """Called with the norm of all ranks: `pending.norm`; may change `factor`."""

    def before_step(self, scaler: Scaler, pending: Pending) -> None:
        """Called before an optimizer steps; may call `pending.skip_where`."""

    def stepped(self, scaler: Scaler, pending: Pending) -> None:
        """Called after it stepped or was skipped: see `pending.outcome`.

        `skip="joint"` may still undo the step, in `update`.
        """

    def skipped(self, scaler: Scaler, pending: Pending) -> None:
        """Called after a skipped step, if the host knows the outcome."""

    def before_update(self, scaler: Scaler) -> None:
        """Called by `update`, before the scale moves."""

    def updated(self, scaler: Scaler, pendings: list[Pending]) -> None:
        """Called by `update`, after the scale has moved."""

    def state_dict(self) -> Any:
        """Return the state to save with the scaler, as plain values."""

    def load_state_dict(self, state: Any) -> None:
        """Restore a saved state."""


Hook = Callable[..., None]


class Hooks:
    """The extensions of one scaler, and the overridden methods per hook."""

    # These annotations are the list of hooks.
    loss_scaled: tuple[Hook, ...]
    before_inspect: tuple[Hook, ...]
    inspected: tuple[Hook, ...]
    norm_measured: tuple[Hook, ...]
    before_step: tuple[Hook, ...]
    stepped: tuple[Hook, ...]
    skipped: tuple[Hook, ...]
    before_update: tuple[Hook, ...]
    updated: tuple[Hook, ...]

    def __init__(self, scaler: Scaler, *extensions: Extension) -> None:
        self.extensions = list(extensions)
        self._scaler = scaler
        self._unclaimed: dict[str, Any] = {}  # loaded, of extensions not attached yet
        self._collect()

    def _collect(self) -> None:
        """Collect the overridden methods."""
        for point in Hooks.__annotations__:
            found = tuple(
                partial(getattr(one, point), self._scaler)
                for one in self.extensions
                if getattr(type(one), point) is not getattr(Extension, point)
            )
            setattr(self, point, found)

    def add(self, extension: Extension, *, first: bool = False) -> None:
        """Attach an extension, and restore its state if one was loaded before."""
        if extension.key in self._unclaimed:
            self._load({extension: extension.state_dict()}, self._unclaimed)
            del self._unclaimed[extension.key]
        self.extensions.insert(0 if first else len(self.extensions), extension)
        self._collect()

    def find(self, kind: type[_E]) -> _E | None:
        """Return the extension of this class; None if there is none."""
        found = (one for one in self.extensions if isinstance(one, kind))
        return next(found, None)

    def before_step_without(self, kind: type[Extension], pending: Pending) -> None:
        """Call `before_step` of every extension but those of one class."""
        for one in self.extensions:
            if not isinstance(one, kind):
                one.before_step(self._scaler, pending)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all extensions that have one, by key."""
        kept = dict(self._unclaimed)
        for one in self.extensions:
            state = one.state_dict() if one.key else None
            if state:
                kept[one.key] = state
        return kept

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restore each extension, or none; keep the rest for those attached later."""
        before = {x: x.state_dict() for x in self.extensions if x.key in states}
        self._load(before, states)
        keys = {one.key for one in self.extensions}
        self._unclaimed = {k: v for k, v in states.items() if k not in keys}

    @staticmethod
    def _load(before: dict[Extension, Any], states: dict[str, Any]) -> None:
        """Restore extensions; if one raises, give all of them back what they had."""
        for one in before:
            try:
                one.load_state_dict(states[one.key])
            except Exception as error:
                for each, state in before.items():
                    each.load_state_dict(state)
                raise StateError(
                    f"The state of {one.key!r} is damaged, and nothing was loaded: "
                    f"{error}. It is {states[one.key]!r:.120}."
                ) from error
