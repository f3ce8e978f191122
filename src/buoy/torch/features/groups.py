"""Scale groups: several losses with a scale each, under one scaler.

A scale group is a scaler of the same class, created by another scaler, its parent.  It
scales, clips and steps as any other; the parent's `update` moves its scale.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import parameters_of
from buoy._backends.torch.graph import graph_of
from buoy._core.errors import BuoyError, CallOrderError, OptionError
from buoy.torch import errors
from buoy.torch.hooks import Extension, feature
from buoy.torch.iteration import Work, evidence_of
from buoy.torch.options import TORCH_DEFAULTS, Options

__all__ = ["Groups", "Origins", "gradient_mark", "group", "restore", "wrong_scale"]

_OWN = (*TORCH_DEFAULTS, "policy", "min_scale", "max_scale", "trace")
_PROBES = 3  # losses of each scale group whose graph is walked for parameters


# -- creating scale groups -------------------------------------------------------------


def group(scaler: Any, name: str, options: dict[str, Any]) -> Any:
    """Return the scale group of this name; create it if there is none.

    Example:
        >>> import buoy.torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler = buoy.torch.GradScaler("cpu")
        >>> critic = scaler.group("critic", init_scale=2.0**8)
        >>> critic.scale(weight.sum()).backward()
        >>> critic.step(optimizer)
        >>> scaler.update()
        >>> critic.get_scale(), scaler.get_scale()
        (256.0, 65536.0)
    """
    if scaler._hooks.find("group") is not None:
        raise OptionError(
            "A scale group cannot have scale groups: one `update` updates all scales. "
            f"Call `scaler.group({name!r})` on the scaler itself."
        )
    groups = scaler._hooks.find("groups")
    made = None if groups is None else groups.members.get(name)
    if made is None:
        trace = options.pop("trace", None)
        made = restore(scaler, name, _own_options(scaler._options, name, options))
        if trace is not None and made.is_enabled():
            feature("record").record(made, trace)
    elif options:
        raise OptionError(
            f"Scale group {name!r} already exists and its scale is in use. Pass "
            f"{', '.join(options)} with the first `scaler.group({name!r}, ...)`."
        )
    return made


def _own_options(options: Options, name: str, changed: dict[str, Any]) -> Options:
    """Return a scaler's options with those of a scale group replaced."""
    wrong = sorted(set(changed) - set(_OWN))
    if wrong:
        raise OptionError(
            f"Scale group {name!r} cannot have its own {', '.join(wrong)}: it belongs "
            f"to the whole scaler. A group may have its own {', '.join(_OWN)}."
        )
    if "policy" in changed:  # the other numbers are those of the scaler's own rule
        changed = {**TORCH_DEFAULTS, "min_scale": None, "max_scale": None, **changed}
    return replace(options, **changed)


def restore(scaler: Any, name: str, options: Options) -> Any:
    """Create a scale group with these options, also for a copy of a scaler."""
    groups, joint = scaler._hooks.find("groups"), scaler._hooks.find("joint")
    if groups is None:
        groups = Groups(scaler)
        scaler._hooks.add(groups, first=True)
    made: Any = object.__new__(type(scaler))
    made._assemble(options, scaler._names, scaler._agreement)
    made.__dict__.update(scaler._extra())
    made._hooks.add(Member(name, groups.origins), first=True)
    if joint is not None:
        made._hooks.find("joint").taken = joint.taken  # one list for all
    groups.add(name, made)
    return made


# -- which scale group's loss a gradient came from -------------------------------------


class Origins:
    """Maps each parameter to the scale groups that have added to its gradient.

    The graphs of the first losses give the parameters.  From then on, a backward pass
    of a scale group's loss adds to those whose gradient differs after the pass.
    """

    def __init__(self, scaler: Any) -> None:
        self.parent = weakref.ref(scaler)
        self.scalers = weakref.WeakSet([scaler])  # the parent and its scale groups
        self._may_read = scaler._options.sync != "never"
        self._left: dict[str, int] = defaultdict(lambda: _PROBES)
        self._from: Any = WeakTensorKeyDictionary()
        self.late = scaler._iteration.scalings > 0  # losses were scaled before this

    def follow(self, name: str, loss: torch.Tensor) -> None:
        """Register a hook for the backward pass of this loss."""
        if not loss.requires_grad:
            return
        self._left[name] -= 1
        if self._left[name] >= 0:
            for param in graph_of(loss)[0]:
                self._from.setdefault(param, set())

        def begin(_: torch.Tensor) -> None:
            before = {param: gradient_mark(param) for param in self._from}
            for param, mark in before.items():
                others = self._from[param] - {name}
                if mark is None or (others and not self._is_kept(name, param)):
                    self._from[param] = set()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._end, name, before))

        loss.register_hook(begin)  # type: ignore[no-untyped-call]

    def _end(self, name: str, before: dict[torch.Tensor, Any]) -> None:
        for param, mark in before.items():
            if gradient_mark(param) != mark:
                self._from[param] = self._from[param] | {name}

    def _is_kept(self, name: str, param: Any) -> bool:
        """Return whether a gradient is not zero.  Reads a device at first only."""
        first = self._left[name] >= 0 or backend.in_host_memory(param.grad)
        return self._may_read and first and _holds_something(param)

    def of(self, params: Iterable[torch.Tensor]) -> set[str]:
        """Return the scale groups that these gradients came from."""
        held = (param for param in params if param.grad is not None)
        return {name for param in held for name in self._from.get(param, ())}

    def still_in(self, params: Iterable[torch.Tensor]) -> set[str]:
        """Return the same, without gradients that were set to zero since."""
        known = [x for x in params if self._from.get(x, self.late)]
        known = list(filter(_holds_something, known) if self._may_read else known)
        return self.of(known) | ({""} if self.late and known else set())

    def forget(self, params: Iterable[torch.Tensor]) -> None:
        """Clear the entries of gradients that are now unscaled."""
        self._from.update({param: set() for param in params if param in self._from})


def gradient_mark(param: torch.Tensor) -> tuple[int, int] | None:
    """Return a value that changes if a backward pass adds to a gradient; None: none."""
    return None if param.grad is None else (id(param.grad), param.grad._version)


def _holds_something(param: torch.Tensor) -> bool:
    """Return whether a gradient exists and is not zero.  Reads on the host."""
    return param.grad is not None and bool((param.grad != 0).any())


def wrong_scale(call: str, name: str, origins: Iterable[str]) -> CallOrderError:
    """Return the error for gradients with another scale than a call expects."""
    me, *whose = (
        f"group {one!r}" if one else "the scaler itself"
        for one in (name, *sorted(origins))
    )
    return CallOrderError(
        f"`{call}` was called on {me}, but the gradients come from losses of "
        f"{' and '.join(whose) or 'several groups'}: they would be divided by the "
        "wrong scale. Step with the group that scaled its loss, and clear the "
        "gradients between groups (`optimizer.zero_grad()`). To add up losses of "
        "several groups, run them by `scaler.backward({group: loss, ...}, optimizer)`, "
        "then call `scaler.step(optimizer)`."
    )


class _GroupBase(Extension):
    """What a parent scaler and its scale groups have in common."""

    def __init__(self, name: str, origins: Origins) -> None:
        self.name, self.origins, self.parent = name, origins, origins.parent

    def loss_scaled(self, scaler: Any, loss: Any, scaled: torch.Tensor) -> None:  # noqa: ARG002
        """Detect a backward pass into gradients that another of them inspected."""
        for one in self.origins.scalers:
            for work in one._per_optimizer_states.values():
                if work.freshness is not None:
                    work.freshness.expect_backward()
        self.origins.follow(self.name, scaled)

    def before_step(self, scaler: Any, work: Work) -> None:  # noqa: ARG002
        """Raise for gradients that have another scale, or are already unscaled."""
        found = self.origins.of(parameters_of(work.optimizer))
        if self.name if work.combined else found - {self.name}:
            raise wrong_scale("step", self.name, found)


class Member(_GroupBase):
    """Makes a scaler a scale group; holds its name and its parent."""

    key = "group"

    def stepped(self, scaler: Any, work: Work) -> None:  # noqa: ARG002
        """Add the step to the parent's log, too."""
        if (parent := self.parent()) is not None:
            log = parent._log
            log.last = log.by_optimizer[id(work.optimizer)] = work.outcome

    def before_update(self, scaler: Any) -> None:  # noqa: ARG002
        """Raise: only the parent's `update` may be called."""
        raise OptionError(
            f"`update` was called on scale group {self.name!r}, but it updates all "
            "scales. Call `scaler.update()` once, after every optimizer has stepped."
        )


class Groups(_GroupBase):
    """The scale groups of a scaler, and loaded states of those not created yet."""

    key = "groups"

    def __init__(self, scaler: Any) -> None:
        super().__init__("", Origins(scaler))
        self.members: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}

    def add(self, name: str, made: Any) -> None:
        """Add a scale group; restore its state if one was loaded before."""
        if name in self._waiting:
            _load(name, made, self._waiting[name])
            del self._waiting[name]
        self.members[name] = made
        self.origins.scalers.add(made)

    def options(self) -> dict[str, Options]:
        """Return the scale groups' options, for a copy; raise in mid-iteration."""
        return {k: one.__getstate__()["options"] for k, one in self.members.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all scale groups, by name."""
        return self._waiting | {k: one.state_dict() for k, one in self.members.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved states; keep those of scale groups that are created later."""
        for name in state.keys() & self.members.keys():
            _load(name, self.members[name], state[name])
        later = state.keys() - self.members.keys()
        self._waiting = {name: {**state[name]} for name in later}  # dicts, or it raises

    def update(self, scaler: Any, new_scale: float | torch.Tensor | None) -> None:
        """Update every scale that has findings; then advance the gated objects."""
        self.origins.late, family = False, [scaler, *self.members.values()]
        busy = [x for x in family if _works(x) and x._loss_scale.tensor is not None]
        learning = [one for one in busy if _learns(one)]
        if new_scale is None and not learning:
            raise errors.nothing_recorded()
        outcomes = [work.outcome for one in busy for work in _works(one)]
        with ExitStack() as ending:  # if one of them raises, the others still update
            if new_scale is not None:
                scaler._update(new_scale)
            ending.callback(scaler._log.open_gates, list(filter(None, outcomes)))
            for one in filter(_works, busy):
                if one not in learning:
                    one._iteration.losses.clear()  # the scale groups have their own
                    one._iteration.report_through(learning)
                ending.callback(one._update, idle=True)


def _load(name: str, member: Any, state: Any) -> None:
    try:
        member.load_state_dict(state)
    except BuoyError as error:
        raise errors.StateError(f"Scale group {name!r}: {error}") from error


def _works(scaler: Any) -> list[Work]:
    return list(scaler._per_optimizer_states.values())


def _learns(scaler: Any) -> bool:
    """Return whether there are findings for the policy."""
    home = scaler._loss_scale.now().device
    return evidence_of(_works(scaler), home) is not None
