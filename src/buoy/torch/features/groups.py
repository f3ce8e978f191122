"""Scale groups: several losses with a scale each, under one scaler.

A scale group is a scaler of the same class, created by another scaler, its parent.  It
scales, clips and steps as any other; the parent's `update` moves its scale.
"""

from dataclasses import replace
from typing import Any

import torch

from buoy._core.errors import BuoyError, OptionError
from buoy.torch import errors
from buoy.torch.features.joint import Joint
from buoy.torch.hooks import Extension, Scaler
from buoy.torch.options import TORCH_DEFAULTS, Options
from buoy.torch.pending import Pending

__all__ = ["Groups", "Member", "group", "options_of", "restore"]

_OWN = (*TORCH_DEFAULTS, "policy", "min_scale", "max_scale", "trace")


def group(scaler: Scaler, name: str, options: dict[str, Any]) -> Any:
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
    if scaler._hooks.find(Member) is not None:
        raise OptionError(
            "A scale group cannot have scale groups: one `update` updates all scales. "
            f"Call `scaler.group({name!r})` on the scaler itself."
        )
    groups = scaler._hooks.find(Groups)
    made: Any = None if groups is None else groups.members.get(name)
    if made is None:
        trace = options.pop("trace", None)
        made = restore(scaler, name, _own_options(scaler._options, name, options))
        if trace is not None and made.is_enabled():
            from buoy.torch.features.record import record  # noqa: PLC0415 - seldom used

            record(made, trace)
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


def restore(scaler: Scaler, name: str, options: Options) -> Any:
    """Create a scale group with these options, also for a copy of a scaler."""
    groups = scaler._hooks.find(Groups)
    if groups is None:
        groups = Groups()
        scaler._hooks.add(groups)
    made: Any = object.__new__(type(scaler))
    made._assemble(options, scaler._names, scaler._sharing)
    made.__dict__.update(scaler._extra())
    made._hooks.add(Member(name, scaler), first=True)
    joint = scaler._hooks.find(Joint)
    own_joint = made._hooks.find(Joint)
    if joint is not None and own_joint is not None:
        own_joint.taken = joint.taken  # one list for all
    groups.add(name, made)
    scaler._family.append(made)
    made._family = scaler._family
    return made


def options_of(scaler: Scaler) -> dict[str, Options]:
    """Return the options of a scaler's scale groups, for a copy of it."""
    groups = scaler._hooks.find(Groups)
    return {} if groups is None else groups.options()


class _OfFamily(Extension):
    """What a parent scaler and its scale groups have in common."""

    def loss_scaled(
        self,
        scaler: Scaler,
        loss: torch.Tensor,  # noqa: ARG002
        scaled: torch.Tensor,  # noqa: ARG002
    ) -> None:
        """Detect a backward pass into gradients that another of them inspected."""
        for one in scaler._family:
            one._expect_backward()


class Member(_OfFamily):
    """Makes a scaler a scale group; holds its name and its parent."""

    def __init__(self, name: str, parent: Scaler) -> None:
        self.name = name
        self.parent = parent

    def stepped(self, scaler: Scaler, pending: Pending) -> None:  # noqa: ARG002
        """Add the step to the parent's log, too."""
        if pending.outcome is not None:
            self.parent._log.keep(pending.optimizer, pending.outcome)

    def before_update(self, scaler: Scaler) -> None:  # noqa: ARG002
        """Raise: only the parent's `update` may be called."""
        raise OptionError(
            f"`update` was called on scale group {self.name!r}, but it updates all "
            "scales. Call `scaler.update()` once, after every optimizer has stepped."
        )


class Groups(_OfFamily):
    """The scale groups of a scaler, and loaded states of those not created yet."""

    key = "groups"

    def __init__(self) -> None:
        self.members: dict[str, Scaler] = {}
        self._waiting: dict[str, Any] = {}

    def add(self, name: str, made: Scaler) -> None:
        """Add a scale group; restore its state if one was loaded before."""
        if name in self._waiting:
            _load(name, made, self._waiting[name])
            del self._waiting[name]
        self.members[name] = made

    def options(self) -> dict[str, Options]:
        """Return the scale groups' options, for a copy; raise in mid-iteration."""
        if any(
            one._enabled and one._per_optimizer_states for one in self.members.values()
        ):
            raise errors.mid_iteration()
        return {name: one._options for name, one in self.members.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all scale groups, by name."""
        return self._waiting | {k: one.state_dict() for k, one in self.members.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved states; keep those of scale groups that are created later."""
        for name in state.keys() & self.members.keys():
            _load(name, self.members[name], state[name])
        later = state.keys() - self.members.keys()
        self._waiting = {name: {**state[name]} for name in later}  # dicts, or it raises


def _load(name: str, member: Scaler, state: Any) -> None:
    try:
        member.load_state_dict(state)
    except BuoyError as error:
        raise errors.StateError(f"Scale group {name!r}: {error}") from error
