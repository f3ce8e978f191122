"""FP16 parameters: raise an error, or update them through FP32 master weights.

The model and `param_groups` keep their parameters.  Only while the optimizer steps, an
FP32 master with an FP32 gradient replaces each one, so the update and the optimizer's
state are FP32.  After the step the masters are rounded into the parameters.
Schedulers, `zero_grad`, `add_param_group`, `state[param]` and checkpoints work as
without masters; a checkpoint has one more entry per parameter.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import parameters_of
from buoy._backends.torch.names import Names
from buoy._backends.torch.rounding import HALVES, Rounding, nearest, write
from buoy._core.errors import OptionError
from buoy.torch.errors import Fp16ParametersError

__all__ = ["Fp16Parameters", "MasterWeights", "masters_of"]

_KEY = "master_param"  # in an optimizer's saved state, beside `exp_avg` and the like
_COUNT = "rounded_steps"  # in the first parameter group: seeds stochastic rounding
# For each optimizer, the ids of its parameters that were FP32 when last checked.
_FP32: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


class Fp16Parameters:
    """Implements the option `fp16_params`."""

    def __init__(self, wanted: Literal["error", "master"] | None) -> None:
        self.wanted = wanted

    def prepare(self, optimizer: Any, names: Names) -> None:
        """Create masters if they are wanted; with masters, make the gradients FP32.

        Call it before the gradients of an optimizer are inspected.
        """
        if optimizer not in _FP32:
            _check_drift(optimizer, names, parameters_of(optimizer))
        masters = getattr(optimizer, "_buoy_masters", None)
        if masters is None and self.wanted == "master":
            halves = any(one.dtype in HALVES for one in parameters_of(optimizer))
            masters = MasterWeights(optimizer, names=names) if halves else None
        if masters is not None:
            masters.widen()

    def stepping(self, optimizer: Any) -> AbstractContextManager[None]:
        """Replace the parameters by their masters while an optimizer steps."""
        masters = masters_of(optimizer)
        return nullcontext() if masters is None else masters.swapped()

    def check(self, optimizer: Any, names: Names, *, allow: bool) -> None:
        """Raise for FP16 gradients, unless `allow`; call it if there are some."""
        params = parameters_of(optimizer)
        halves = [p for p in params if getattr(p.grad, "dtype", None) is torch.float16]
        _check_drift(optimizer, names, halves)
        if self.wanted == "error" or not allow:
            raise Fp16ParametersError(
                f"Attempting to unscale FP16 gradients. {len(halves)} parameters of "
                f"this optimizer are FP16: {_listed(names, optimizer, halves)}. Their "
                "gradients would underflow when unscaled, and updates smaller than "
                "1/2048 of a weight would be lost. Use float32 (`model.float()`) and "
                "`torch.autocast(..., torch.float16)`, or let Buoy keep FP32 copies: "
                "`GradScaler(..., fp16_params='master')`."
            )


class MasterWeights:
    """Update FP16 and BF16 parameters in FP32, with any optimizer.

    Args:
        optimizer: any optimizer; it is used as before.
        rounding: None keeps FP32 masters between steps.  "nearest" and "stochastic"
            keep none: each step computes in FP32 and rounds the result.
        model: the source of parameter names in messages.
        seed: for "stochastic"; must be the same on every replica.

    Call it before `optimizer.load_state_dict`.

    Example:
        >>> layer = torch.nn.Linear(2, 1).bfloat16()
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
        >>> masters = MasterWeights(optimizer)
        >>> layer(torch.ones(4, 2).bfloat16()).sum().backward()
        >>> optimizer.step()
        >>> masters.of(layer.weight).dtype
        torch.float32
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rounding: Rounding | None = None,
        *,
        model: torch.nn.Module | None = None,
        seed: int = 0,
        names: Names | None = None,
    ) -> None:
        if rounding not in (None, "nearest", "stochastic"):
            raise OptionError(
                f"`rounding` must be None, 'nearest' or 'stochastic', got {rounding!r}."
            )
        self.optimizer = optimizer
        self.rounding = rounding
        self._names = names or Names(model)
        self._seed = seed
        self._pairs: dict[int, _Pair] = {}  # by the parameter's id
        self._swapped: list[_Pair] | None = None  # while masters are in place
        self._stepped = False
        _check_state(optimizer, self._names)
        if rounding is None:
            self._pair_all()
        optimizer.__dict__["_buoy_masters"] = self
        optimizer.register_state_dict_post_hook(self._add_masters)
        self._replace("step", self._step)
        self._replace("load_state_dict", self._load)
        self._replace("zero_grad", self._zero_grad)

    def of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the master of a parameter; None if it has none."""
        pair = self._pairs.get(id(param))
        return None if pair is None else pair.master

    @property
    def masters(self) -> list[torch.Tensor]:
        """The FP32 masters that are kept, in the order of the parameters."""
        return [pair.master for pair in self._pairs.values()]

    def reread(self) -> None:
        """Copy parameters that were changed through `.data` into their masters.

        Any other change is detected at the next step.
        """
        for pair in self._pairs.values():
            pair.reconcile()

    def widen(self) -> None:
        """Make the parameters' gradients FP32, so that they can be unscaled."""
        for param in parameters_of(self.optimizer):
            if param.grad is not None and param.grad.dtype in HALVES:
                _widen_gradient(param)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace the parameters by their masters; at the end, round them back.

        Nested blocks do nothing.
        """
        if self._swapped is not None:
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    # -- replacing parameters by masters ----------------------------------------------

    def _pair_all(self) -> list["_Pair"]:
        """Pair every parameter that needs a master; raise if one was cast."""
        params = parameters_of(self.optimizer)
        new = [one for one in params if id(one) not in self._pairs]
        _check_drift(self.optimizer, self._names, new)
        for one in new:
            if one.dtype in HALVES and (one.requires_grad or one.grad is not None):
                self._pairs[id(one)] = _Pair(one)
        return [self._pairs[id(one)] for one in params if id(one) in self._pairs]

    @torch.no_grad()
    def _enter(self) -> None:
        self._swapped = pairs = self._pair_all()
        for pair in pairs:
            pair.begin()
        self._exchange([(pair.param, pair.master) for pair in pairs])

    @torch.no_grad()
    def _leave(self) -> None:
        pairs = self._swapped or []
        self._swapped = None
        self._exchange([(pair.master, pair.param) for pair in pairs])
        # The same random numbers on every rank, and after a resume.
        seed = (self._seed << 32) + self.optimizer.param_groups[0].get(_COUNT, 0)
        write([(one.param, one.master) for one in pairs], self.rounding, seed)
        for pair in pairs:
            pair.end()
        if self.rounding:
            self._pairs.clear()

    def _exchange(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Replace tensors in the parameter groups, in place: LBFGS shares the list."""
        others = {id(old): new for old, new in pairs}
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            group["params"][:] = [others.get(id(one), one) for one in group["params"]]
        for old, new in pairs:
            if old in state:
                state[new] = state.pop(old)

    # -- replacements of the optimizer's methods --------------------------------------

    def _replace(self, name: str, method: Callable[..., Any]) -> None:
        """Replace a method; the new one takes the old one as its first argument."""
        old = getattr(self.optimizer, name)

        @wraps(getattr(old, "__func__", old))
        def bound(_: Any, *args: Any, **kwargs: Any) -> Any:
            return method(old, *args, **kwargs)

        self.optimizer.__dict__[name] = MethodType(bound, self.optimizer)

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(self._on_parameters, args))
        kwargs = {name: self._on_parameters(one) for name, one in kwargs.items()}
        with self.swapped():
            result = step(*args, **kwargs)
            found = getattr(self.optimizer, "found_inf", None)
            skipped = isinstance(found, torch.Tensor) and backend.known(found)
            if self.rounding == "stochastic" and not skipped:
                group = self.optimizer.param_groups[0]
                group[_COUNT] = group.get(_COUNT, 0) + 1
        self._stepped = True
        return result

    def _on_parameters(self, closure: Any) -> Any:
        """Wrap a closure so that it runs with the parameters, not the masters."""
        if not callable(closure):
            return closure

        @wraps(closure)
        def evaluated() -> Any:
            self._leave()
            result = closure()
            self._enter()
            return result

        return evaluated

    def _zero_grad(self, zero: Callable[..., None], set_to_none: bool = True) -> None:
        zero(set_to_none=set_to_none)
        for param in parameters_of(self.optimizer):
            if param.grad is not None and param.grad.dtype is not param.dtype:
                param.grad = torch.zeros_like(param)  # as backward passes make them

    def _add_masters(self, _: Any, saved: dict[str, Any]) -> None:
        """Save the masters that differ from their parameters.

        An equal one is not saved: alone it would look like optimizer state of a
        parameter that has none yet.
        """
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        for key, param in zip(keys, parameters_of(self.optimizer), strict=True):
            pair = self._pairs.get(id(param))
            if self._stepped and pair and not torch.equal(pair.master, param.float()):
                state = saved["state"].get(key, {})
                saved["state"][key] = {**state, _KEY: pair.master.detach()}

    def _load(self, load: Callable[..., None], state_dict: dict[str, Any]) -> None:
        """Load while masters replace the parameters; torch casts to their dtype."""
        with self.swapped():
            load(state_dict)
        for param in parameters_of(self.optimizer):
            saved = self.optimizer.state.get(param, {}).pop(_KEY, None)
            if id(param) in self._pairs:
                self._pairs[id(param)].load(saved)
                self._stepped = True


class _Pair:
    """A parameter and its master."""

    def __init__(self, param: torch.Tensor) -> None:
        self.param = param
        wide = param.detach().float()
        self.master = torch.nn.Parameter(wide, requires_grad=param.requires_grad)
        # The parameter's version when both were last equal; None if unknown.
        self.seen: tuple[int, int, torch.dtype] | None = self._now()

    def _now(self) -> tuple[int, int, torch.dtype]:
        local = backend.local(self.param)
        return self.param._version, local.data_ptr(), self.param.dtype

    def begin(self) -> None:
        """Prepare the master for a step: copy new values and the gradient."""
        if self.seen != self._now():
            self.reconcile()
        grad = self.param.grad
        self.master.grad = None if grad is None else grad.to(self.master.dtype)

    def end(self) -> None:
        """Clear the master's gradient; the parameter now equals the master."""
        if self.master.grad is None:
            self.param.grad = None  # the optimizer cleared it within its step
        self.master.grad = None
        self.seen = self._now()

    @torch.no_grad()
    def reconcile(self) -> None:
        """Keep the master where it rounds to the parameter, else copy the parameter.

        Called after a write to the parameter, e.g. by a checkpoint or weight clipping.
        """
        now = self.param.detach()
        self.master.data = self.master.data.to(now.device)
        rounded = nearest(self.master, self.seen[2] if self.seen else now.dtype)
        same = rounded.to(now.dtype) == now
        self.master.copy_(torch.where(same, self.master, now.float()))
        self.seen = self._now()

    @torch.no_grad()
    def load(self, saved: torch.Tensor | None) -> None:
        """Restore a saved master; the parameter is loaded before or after it.

        `saved` is None if it was equal to its parameter, or did not exist.
        """
        self.master.copy_(self.param if saved is None else saved)
        self.seen = None


def masters_of(optimizer: Any) -> MasterWeights | None:
    """Return an optimizer's master weights, if it has any."""
    return getattr(optimizer, "_buoy_masters", None)


def _widen_gradient(param: Any) -> None:
    """Cast a half-precision gradient to FP32."""
    if not hasattr(param, "grad_dtype"):
        raise Fp16ParametersError(
            f"torch {torch.__version__} cannot hold an FP32 gradient of an FP16 "
            "parameter, so it could not be unscaled without loss. Use torch 2.10 or "
            "newer, or float32 parameters and `torch.autocast(..., torch.float16)`."
        )
    # None: any dtype; backward passes still compute what DDP expects.
    param.grad_dtype = None
    param.grad = param.grad.float()


def _check_drift(optimizer: Any, names: Names, params: list[torch.Tensor]) -> None:
    """Record which parameters are FP32; raise for those that were cast since."""
    try:
        known = _FP32.setdefault(optimizer, set())
    except TypeError:  # no weak references: casts are not detected
        return
    cast = [one for one in params if one.dtype in HALVES and id(one) in known]
    if cast:
        raise Fp16ParametersError(
            f"Attempting to unscale FP16 gradients. {len(cast)} parameters of this "
            "optimizer were float32 and are half precision now: "
            f"{_listed(names, optimizer, cast)}. Something cast them between two "
            "steps (`model.half()` for a validation?), and FP32's low bits are lost. "
            "Go back to a checkpoint, and cast a copy: `copy.deepcopy(model).half()`. "
            "If the cast was meant, build a new optimizer."
        )
    known.update(id(one) for one in params if one.dtype not in HALVES)


def _check_state(optimizer: Any, names: Names) -> None:
    """Raise for a second set of masters, and for state in half precision."""
    if masters_of(optimizer) is not None:
        raise Fp16ParametersError(
            "This optimizer has master weights already; a second set would never be "
            "updated. Use the `MasterWeights` that was made first."
        )
    for param, state in optimizer.state.items():
        held = state.items() if isinstance(state, dict) else ()
        halves = {n: x for n, x in held if torch.is_tensor(x) and x.dtype in HALVES}
        if halves and state.get("step") == 0:  # Adagrad makes its state when built
            state.update({name: value.float() for name, value in halves.items()})
        elif halves:
            raise Fp16ParametersError(
                f"The optimizer's state for {names.described(optimizer, [param])[0]} "
                "is in half precision already: it stepped, or loaded a state that "
                "torch cast, before it had masters. Call `MasterWeights(optimizer)` "
                "before its first step and `optimizer.load_state_dict`."
            )


def _listed(names: Names, optimizer: Any, params: list[torch.Tensor]) -> str:
    """Return the names of up to eight parameters, and the number of the rest."""
    described = names.described(optimizer, params)
    more = len(params) - 8
    return ", ".join(described[:8]) + (f" and {more} more" if more > 0 else "")
