"""A `LossScaleOptimizer` with any policy, that cannot destroy the weights."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, Self

import keras
from keras import ops as kops

from buoy._core.codec import decode, encode
from buoy._core.errors import CallOrderError, OptionError
from buoy._core.policies.backoff import Backoff
from buoy._core.policies.policy import Policy
from buoy._core.policies.registry import policy as policy_of
from buoy._core.step import Row
from buoy._core.verdicts import Verdict
from buoy.keras.backend import (
    as_written,
    backend,
    in_stateless_scope,
    is_half,
    is_traced,
    itself_as_written,
)
from buoy.keras.scaling import Grads, Scaling

__all__ = ["LossScaleOptimizer"]

# Keras' own defaults
_SCALE = 2.0**15
_STEPS = 2000
_OWN = 4  # variables of Keras' own optimizer, before those of the inner one


@keras.saving.register_keras_serializable(package="buoy")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scale the loss, skip steps that overflow, and move the scale by a policy.

    A `keras.optimizers.LossScaleOptimizer`, with its arguments, on every backend.
    Without `policy` the rule is Keras' own, within finite bounds.

    Args:
        inner_optimizer: an optimizer, or its name.
        initial_scale: the first scale, for Keras' own rule.
        dynamic_growth_steps: finite steps until the scale doubles, for Keras' own rule.
        name: the optimizer's name.
        policy: a policy or its name, e.g. "headroom", in place of Keras' own rule.
        kwargs: passed on to Keras' class.

    Example:
        >>> optimizer = LossScaleOptimizer("sgd", policy="headroom")
        >>> optimizer.build([keras.Variable([1.0])])
        >>> float(optimizer.scale_loss(2.0)), optimizer.scale
        (512.0, 256.0)
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float = _SCALE,
        dynamic_growth_steps: int = _STEPS,
        name: str | None = None,
        *,
        policy: str | Policy | None = None,
        **kwargs: Any,
    ) -> None:
        rule = _rule(initial_scale, dynamic_growth_steps, policy)
        super().__init__(
            keras.optimizers.get(inner_optimizer),
            initial_scale if policy is None else rule.init().scale,
            dynamic_growth_steps,
            name,
            **kwargs,
        )
        self._policy_given = policy is not None
        self._scaling = Scaling(rule, self.inner_optimizer)
        self._places: dict[int, int] = {}  # of the model's variables, by id
        self._unscaled_from: tuple[Any, ...] = ()  # see `get_unscaled_gradients`

    @property
    def policy(self) -> Policy:
        """The policy that moves the scale."""
        return self._scaling.policy

    def build(self, var_list: Sequence[Any]) -> None:
        """Create the variables of the optimizer."""
        halves = [_name(variable) for variable in var_list if is_half(variable)]
        if halves:
            raise OptionError(
                f"{len(halves)} variables are float16, the first is `{halves[0]}`: "
                "small updates would be rounded away, and unscaled gradients do not "
                'fit. Use the dtype policy "mixed_float16", which computes in float16 '
                'and keeps variables in float32, in place of "float16".'
            )
        super().build(var_list)
        self._places = {id(variable): i for i, variable in enumerate(var_list)}
        elements = sum(prod(variable.shape) for variable in var_list)
        self._scaling.build(self, [_name(v) for v in var_list], elements)

    # --- the outcomes of steps

    @property
    def scale(self) -> float:
        """The scale of the next loss."""
        return float(kops.convert_to_numpy(self._scaling.scale()))

    @property
    def last_step(self) -> Row:
        """The outcome of the last step, and its reason."""
        rows = self.rows()
        if not rows:
            raise CallOrderError(
                "No step has been taken yet. Read `last_step` after `apply` or `fit`."
            )
        if rows[-1].applied or not self.is_poisoned():
            return rows[-1]
        return rows[-1]._replace(verdict=Verdict.POISONED)

    def rows(self) -> list[Row]:
        """Return the outcomes of the last 64 steps, oldest first."""
        variables = self._scaling.variables
        return [] if variables is None else variables.rows()

    def is_poisoned(self) -> bool:
        """Return whether weights or the inner optimizer's state are not finite."""
        held = [*self._trainable_variables, *self.inner_optimizer.variables]
        finite = [
            kops.all(kops.isfinite(variable))
            for variable in held
            if "float" in keras.backend.standardize_dtype(variable.dtype)
        ]
        return not all(bool(kops.convert_to_numpy(flag)) for flag in finite)

    # --- the loss

    @as_written
    def scale_loss(self, loss: Any) -> Any:
        """Return the loss times the scale; a policy that looks ahead sees it first."""
        self._scaling.half_loss = is_half(loss)
        loss = self._scaling.told(loss)
        if self.built and self._may_store():
            self._scaling.foresee(kops.convert_to_tensor(loss))
        return kops.multiply(loss, self._scaling.scale())

    @as_written
    def get_scaled_loss(self, loss: Any) -> Any:
        """Return the loss times the scale, as in tf.keras 2; also takes a function."""
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self.scale_loss(loss)

    @staticmethod
    def _may_store() -> bool:
        """Return whether the loss can be stored now.

        JAX differentiates pure functions, and a replica may not write alone.
        """
        if backend().name == "tensorflow":
            from buoy.keras.replicas import are_replicas  # noqa: PLC0415

            return not are_replicas()
        return backend().name == "torch" and not in_stateless_scope()

    # --- the gradients

    @as_written
    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Return the gradients divided by the scale, as in tf.keras 2.

        The next `apply` treats its gradients as unscaled, unless one of them was
        passed here.
        """
        self._unscaled_from = tuple(grads)  # the tensors: Python uses ids again
        inverse = 1.0 / self._scaling.scale()
        return [g if g is None else kops.multiply(g, inverse) for g in grads]

    @itself_as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Apply the gradients if they are finite, and move the scale."""
        given = None if trainable_variables is None else list(trainable_variables)
        if not self.built and given is not None:
            with keras.name_scope(self.name, caller=self):
                self.build(given)
        if not self.built or all(grad is None for grad in grads):
            self.inner_optimizer.apply(grads, given)  # raises, or has nothing to do
            return
        taken = self._taken(grads, given)
        if backend().name == "tensorflow":
            from buoy.keras.replicas import apply_together, are_replicas  # noqa: PLC0415

            if are_replicas():
                apply_together(
                    self._scaling, taken, lambda g, f: self._apply_inner(g, f, given)
                )
                return
        if is_traced([g for g in grads if g is not None]):
            self._apply_traced(taken)
            return
        applied, factor = self._decide(taken)
        if backend().name == "tensorflow":
            kops.cond(
                applied, lambda: self._apply_inner(taken, factor, given), lambda: None
            )
        elif applied:  # JAX's `cond` would trace the assignments
            self._apply_inner(taken, factor, given)

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Return the next values of the model's and of the optimizer's variables."""
        if not self.built:
            raise OptionError(
                "To call `stateless_apply`, the optimizer must be built: call "
                "`optimizer.build(model.trainable_variables)` first."
            )
        if backend().name == "tensorflow":
            raise OptionError(
                "Keras has no `stateless_apply` on TensorFlow. Call `apply`, which "
                "changes the variables."
            )
        taken = self._taken(grads, None)
        mine = len(self.variables) - len(self.inner_optimizer.variables)
        own = self.variables[:mine]
        inner = _values(optimizer_variables[mine:])
        before = _values(trainable_variables)
        mapping = list(zip(own, optimizer_variables, strict=False))
        with keras.StatelessScope(mapping) as scope:
            applied, factor = self._decide(taken)
        weights, inner = kops.cond(
            applied,
            lambda: self.inner_optimizer.stateless_apply(
                inner, taken.times(factor), before
            ),
            lambda: (before, inner),
        )
        return weights, [scope.get_current_value(v) for v in own] + inner

    @as_written
    def _taken(self, grads: Sequence[Any], given: Sequence[Any] | None) -> Grads:
        """Return the gradients with their places and kinds."""
        variables = self._trainable_variables if given is None else given
        were = self._unscaled_from
        self._unscaled_from = ()
        return Grads(
            tensors=list(grads),
            places=[self._places.get(id(v), i) for i, v in enumerate(variables)],
            values=[getattr(v, "overwrite_with_gradient", False) for v in variables],
            scaled=not were or any(g is one for g in grads for one in were),
        )

    @as_written
    def _decide(self, grads: Grads) -> tuple[Any, Any]:
        looked = self._scaling.look(grads)
        return self._scaling.conclude(looked, scaled=grads.scaled)

    def _apply_inner(self, grads: Grads, factor: Any, given: Any) -> None:
        self.inner_optimizer.apply(grads.times(factor), given)

    def _apply_traced(self, grads: Grads) -> None:
        """Apply traced gradients: no branch of Python is possible."""
        everyone: list[Any] = [None] * len(self._trainable_variables)
        for grad, place in zip(grads.tensors, grads.places, strict=True):
            everyone[place] = grad
        variables = [*self._trainable_variables, *self.variables]
        weights, own = self.stateless_apply(
            self.variables, everyone, self._trainable_variables
        )
        for variable, value in zip(variables, [*weights, *own], strict=True):
            variable.assign(value)

    # --- in place of another optimizer

    @classmethod
    def adopt(cls, model: Any, policy: str | Policy | None = None) -> Self:
        """Give a compiled model this optimizer in place of its own, and return it.

        The inner optimizer with its state, the scale and the count of clean steps stay
        as they are.  An optimizer without loss scaling is wrapped.

        Example:
            >>> model = keras.Sequential([keras.layers.Dense(1)])
            >>> model.compile("sgd", "mse")
            >>> LossScaleOptimizer.adopt(model, "headroom") is model.optimizer
            True
        """
        old = getattr(model, "optimizer", None)
        if isinstance(old, cls):
            return old
        if not isinstance(old, keras.optimizers.Optimizer):
            raise OptionError(
                f"The model has no optimizer to adopt, got {old!r}. Call "
                "`model.compile` first, or load a model saved with its optimizer."
            )
        stock = isinstance(old, keras.optimizers.LossScaleOptimizer)
        options: dict[str, Any] = {} if policy is None else {"policy": policy}
        if stock and policy is None:
            options["initial_scale"] = old.initial_scale
            options["dynamic_growth_steps"] = old.dynamic_growth_steps
        made = cls(old.inner_optimizer if stock else old, **options)
        if old.built:
            made.build(model.trainable_variables)
        if old.built and stock:
            made.step_counter.assign(old.step_counter)
            made.start_at(float(kops.convert_to_numpy(old.dynamic_scale)))
        model.optimizer = made
        model.train_function = None  # was traced with the old one
        return made

    # --- saving

    def get_config(self) -> dict[str, Any]:
        """Return Keras' own configuration, and the policy if one was given."""
        config: dict[str, Any] = super().get_config()
        return (
            config | {"policy": encode(self.policy)} if self._policy_given else config
        )

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> Self:
        """Make an optimizer from its configuration, or from that of Keras' own."""
        config = dict(config)
        if "policy" in config:
            config["policy"] = decode(config["policy"])
            config.pop("initial_scale", None)
            config.pop("dynamic_growth_steps", None)
        made: Self = super().from_config(config, custom_objects)
        return made

    def load_own_variables(self, store: Any) -> None:
        """Load the variables, also from a file saved with Keras' own optimizer."""
        inner = self.inner_optimizer.variables
        saved = len(store.keys())
        if not self.built or saved != _OWN + len(inner) or saved == len(self.variables):
            super().load_own_variables(store)
            return
        for index, variable in enumerate([*self.variables[:_OWN], *inner]):
            variable.assign(store[str(index)])
        self.start_at(self.scale)

    def start_at(self, scale: float) -> None:
        """Restart the policy at this scale; the count of clean steps is kept."""
        if self._scaling.variables is None:
            raise CallOrderError(
                "The optimizer has no variables yet. Call "
                "`optimizer.build(model.trainable_variables)` first."
            )
        state = self.policy.init(scale=scale)
        if hasattr(state, "clean_steps"):
            clean = int(kops.convert_to_numpy(self.step_counter))
            state = replace(state, clean_steps=clean)
        self._scaling.variables.write(state)


def _rule(scale: float, steps: int, policy: str | Policy | None) -> Policy:
    if policy is None:
        return Backoff(init_scale=scale, growth_interval=steps)
    if (scale, steps) != (_SCALE, _STEPS):
        raise OptionError(
            "`initial_scale` and `dynamic_growth_steps` belong to Keras' own rule, "
            "which `policy` replaces. Set them where the policy is made, e.g. "
            'policy=buoy.policy("headroom", init_scale=1024.0).'
        )
    return policy_of(policy)


def _name(variable: Any) -> str:
    name: str = getattr(variable, "path", None) or variable.name
    return name


def _values(variables: Sequence[Any]) -> list[Any]:
    """Return tensors; variables are accepted as well."""
    return [getattr(variable, "value", variable) for variable in variables]
