"""Several losses and optimizers: groups with scales of their own, skipped alone or all.

A group is a scaler of the same class that its parent made: it scales, clips and steps
as any other, and moves when its parent's `update` is called.
"""

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from buoy._backends import torch as backend
from buoy.torch import apply, survey, words
from buoy.torch import words_beyond as said
from buoy.torch.errors import OptionError
from buoy.torch.gather import Gathered, parameters_of
from buoy.torch.joint import Joint
from buoy.torch.options import DEFAULTS
from buoy.torch.origins import Origins
from buoy.torch.spikes import Spiking
from buoy.torch.step import LastStep
from buoy.torch.takers import hands_over

__all__ = ["Grouping", "Skip", "joint"]

Skip = Literal["independent", "joint"]
_MOVABLE = (
    "init_scale", "growth_factor", "backoff_factor", "growth_interval", "policy",
    "min_scale", "max_scale", "trace",
)  # fmt: skip


def joint(skip: str) -> bool:
    """Read the `skip` option."""
    if skip not in ("independent", "joint"):
        message = (
            "`skip` must be 'independent' (each optimizer is skipped for its own "
            "gradients) or 'joint' (if one must not step, none does), got "
            f"{skip!r}."
        )
        raise OptionError(message)
    return skip == "joint"


class Grouping(Spiking):
    """Make groups, keep them in step, and combine their gradients."""

    _made_with: dict[str, Any]
    _groups: dict[str, Self]
    _waiting: dict[str, Any]  # states that were loaded before their group was made
    _parent: "weakref.ref[Grouping] | None"
    _name: str
    _joint: Joint | None  # one for the whole family
    _origins: Origins | None
    _extended: bool  # `step` has to prepare
    _parts: dict[str, Any]  # what else belongs into the state, by name
    _unclaimed: dict[str, Any]  # loaded states of parts that are not there yet

    def group(self, name: str, **options: Any) -> Self:
        """Give the group of this name, with a scale of its own; make it if need be.

        It has the methods of a scaler: `scale`, `unscale_`, `clip_grad_norm_`, `step`,
        `last_step`.  Only `update` is the parent's: once per iteration it moves every
        group that stepped.  Options (`init_scale`, `growth_interval`, `policy`, ...)
        are the parent's unless given with the first call.

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
        made = self._groups.get(name)
        if self._parent is not None:
            raise said.group_of_group(self._name, name)
        if made is not None and options:
            raise said.group_made_before(name, options)
        if made is None:
            made = self._groups[name] = self._make_group(name, options)
        return made

    def backward(
        self,
        losses: Mapping[str, torch.Tensor],
        *optimizers: Any,
        retain_graph: bool = False,
    ) -> None:
        """Run the losses of several groups back into one set of gradients.

        Each is scaled by its own group's scale, checked and unscaled before it is
        added: sums of gradients with different scales would be none.  Afterwards clip
        and step with this scaler, not with a group.

        Example:
            >>> import buoy.torch
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.SGD([weight], lr=0.1)
            >>> scaler = buoy.torch.GradScaler("cpu")
            >>> losses = {"policy": weight.sum(), "value": (weight**2).sum()}
            >>> scaler.backward(losses, optimizer)
            >>> weight.grad
            tensor([3., 3.])
            >>> scaler.step(optimizer)
            >>> scaler.update()
        """
        if not losses or not optimizers:
            raise said.nothing_to_combine()
        if not self._enabled:
            whole: torch.Tensor = sum(losses.values())  # type: ignore[assignment]
            whole.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            return
        some = next(iter(losses.values()))
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(some.device)
        params = [p for one in optimizers for p in parameters_of(one)]
        sums = {id(param): param.grad for param in params}
        for left, (name, loss) in zip(
            reversed(range(len(losses))), losses.items(), strict=True
        ):
            self._refuse_stepped(optimizers)
            for param in params:
                param.grad = None
            scaled: Any = self.group(name).scale(loss)
            scaled.backward(retain_graph=retain_graph or left > 0)
            for optimizer in optimizers:
                self._take_in(self.group(name), optimizer)
            _add(params, sums)
        for param in params:
            param.grad = sums[id(param)]

    def _refuse_stepped(self, optimizers: tuple[Any, ...]) -> None:
        for optimizer in optimizers:
            record = self._per_optimizer_states[id(optimizer)]
            if record["stage"] is OptState.STEPPED:
                raise words.step_twice()

    def _take_in(self, member: "Grouping", optimizer: Any) -> None:
        """Check and unscale one group's gradients; note what each must know of them."""
        scale, _ = member._check_scale_growth_tracker("backward")
        theirs = member._per_optimizer_states[id(optimizer)]
        before = theirs["found_inf_per_device"]
        found = member._unscale_grads_(
            optimizer, backend.reciprocal(scale), torch.zeros_like(scale), False
        )
        member._agree(theirs, found)
        member._settle(theirs)
        home = self._home()
        flag = apply.combined(theirs["found_inf_per_device"], home)
        if flag is None:
            return
        earlier = apply.combined(before, home)
        theirs["own"] = theirs["found_inf_per_device"] = {
            home: flag if earlier is None else torch.maximum(earlier, flag)
        }
        ours = self._per_optimizer_states[id(optimizer)]
        ours["stage"], ours["own"] = OptState.UNSCALED, {}
        ours["combined"] = True
        held = apply.combined(ours["found_inf_per_device"], home)
        ours["found_inf_per_device"] = {
            home: flag if held is None else torch.maximum(held, flag)
        }

    def _make_group(self, name: str, options: dict[str, Any]) -> Self:
        wrong = sorted(set(options) - set(_MOVABLE))
        if wrong:
            raise said.group_option(name, wrong, _MOVABLE)
        inherited = dict(self._made_with)
        if "policy" in options:  # the parent's numbers are those of its own rule
            inherited |= {**DEFAULTS, "min_scale": None, "max_scale": None}
        made = type(self)(**{**inherited, **options})
        made._name, made._ranks = name, self._ranks
        made._parent = weakref.ref(self)
        self._adopt(made)
        if name in self._waiting and self._enabled:
            made.load_state_dict(self._waiting.pop(name))
        return made

    def _adopt(self, made: Self) -> None:
        """Share what belongs to the family, not to one scale."""
        if not self._enabled:
            return
        made._names = self._names
        made._joint = self._joint
        self._origins = self._origins or Origins()
        made._origins = self._origins
        self._extended = made._extended = True

    def _root(self) -> "Grouping":
        parent = None if self._parent is None else self._parent()
        return self if parent is None else parent

    def _prepare(self, optimizer: Any, record: dict[str, Any]) -> None:
        if self._origins is not None and "combined" not in record:
            held = parameters_of(optimizer)
            others = self._origins.of(held) - {self._name}
            if others:
                mixed = self._name in self._origins.of(held)
                raise said.other_group(self._name, sorted(others), mixed=mixed)
        if self._joint is not None or self._spikes is not None:
            super()._prepare(optimizer, record)
        if self._joint is not None:
            super()._settle(record)
            self._joint.before(optimizer, record, self._home())

    def _report(
        self, optimizer: Any, record: dict[str, Any], scale: float | torch.Tensor
    ) -> LastStep:
        report = super()._report(optimizer, record, scale)
        if self._parent is not None:
            root = self._root()
            root._last = root._reports[id(optimizer)] = report
        if self._joint is not None:
            self._joint.after(record, report)
        return report

    def _stepped(self) -> list[LastStep]:
        """Give what was said of this iteration's steps, of all groups."""
        return [
            record["report"]
            for member in self._members()
            for record in member._per_optimizer_states.values()
            if "report" in record
        ]

    def _decide_together(self) -> None:
        """Decide what all optimizers of the iteration decide together."""
        if self._joint is not None and self._parent is None:
            may_ask = not self._never_sync and not _all_hand_over(self._stepped())
            home = next(m._scale for m in self._members() if m._scale is not None)
            self._joint.settle(home.device, may_ask=may_ask)

    def _members(self) -> "list[Grouping]":
        return [self, *self._groups.values()]

    def _update_family(self, new_scale: float | torch.Tensor | None) -> None:
        """Move every group that has something to learn from."""
        members = [m for m in self._members() if m._per_optimizer_states]
        moving = [
            m for m in members if any(map(apply.own, m._per_optimizer_states.values()))
        ]
        if new_scale is not None and self not in moving:
            self._set_scale(new_scale)
        elif not moving:
            raise words.nothing_recorded()
        stepped = self._stepped()
        gates, self._gates = self._gates, []
        errors: list[Exception] = []
        for member in members:
            try:
                if member in moving:
                    member._update_alone(new_scale if member is self else None)
                else:
                    member._conclude(None)
            except Exception as error:  # noqa: BLE001 - the others move all the same
                errors.append(error)
            member._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._gates = gates
        self._open_gates(stepped)
        if errors:
            raise errors[0]

    def _update_alone(self, new_scale: float | torch.Tensor | None) -> None:
        raise NotImplementedError  # the scaler's own update, without its groups

    def _measure(
        self, record: dict[str, Any], gathered: Gathered, inverse: torch.Tensor
    ) -> survey.Survey:
        seen = super()._measure(record, gathered, inverse)
        local = self._parts.get("local_scales")
        if local is not None and (size := local.outside()) is not None:
            record["amax"] = size.to(inverse.device)
        return seen

    def _attach(self, name: str, part: Any) -> None:
        """Let a part's state be saved and loaded with this one's."""
        self._parts[name] = part
        if name in self._unclaimed:
            part.load_state_dict(self._unclaimed.pop(name))

    def _save_groups(self) -> dict[str, Any]:
        states = {name: made.state_dict() for name, made in self._groups.items()}
        return {**self._waiting, **states}

    def _load_groups(self, saved: dict[str, Any]) -> None:
        self._waiting = {}
        for name, state in saved.items():
            if name in self._groups:
                self._groups[name].load_state_dict(state)
            else:
                self._waiting[name] = state


def _all_hand_over(reports: list[LastStep]) -> bool:
    return all(hands_over(report._optimizer()) for report in reports)


@torch.no_grad()
def _add(params: list[torch.Tensor], sums: dict[int, torch.Tensor | None]) -> None:
    for param in params:
        held = sums[id(param)]
        if param.grad is not None:
            sums[id(param)] = param.grad if held is None else held + param.grad
