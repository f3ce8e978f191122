"""The scale and one step of it: look at the gradients, decide, write the state.

Variables are read and written by `value` and `assign` alone, so that a step is
stateless inside a `keras.StatelessScope`, as JAX needs it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from keras import ops as kops

from buoy._core.advance import Found, advance, capped, foreseen, single
from buoy._core.bounds import initial
from buoy._core.errors import CallOrderError
from buoy._core.formats import FLOAT32_MAX
from buoy._core.loss_flag import LossFlag
from buoy._core.ops import PLAIN, Ops, Scalar
from buoy._core.policies.policy import Policy
from buoy._core.state import State
from buoy._core.step import MEASUREMENTS
from buoy.keras.backend import backend, in_stateless_scope, replica_now
from buoy.keras.variables import Variables

__all__ = ["Grads", "Looked", "Scaling"]


class Grads(NamedTuple):
    """The gradients of one step."""

    tensors: Sequence[Any]  # None where a variable has none
    places: Sequence[int]  # of their variables among those of the optimizer
    values: Sequence[bool]  # not a gradient, but the variable's next value, as in FP8
    scaled: bool  # whether they carry the scale

    def chosen(self, *, values: bool) -> tuple[list[Any], list[int]]:
        """Return those that are not None, and their places."""
        there = [
            (grad, place)
            for grad, place, value in zip(*self[:3], strict=True)
            if grad is not None and value is values
        ]
        return [grad for grad, _ in there], [place for _, place in there]

    def times(self, factor: Scalar) -> list[Any]:
        """Return the gradients times a factor; those of float16 become float32."""
        return [
            grad if grad is None or value else kops.multiply(grad, factor)
            for grad, value in zip(self.tensors, self.values, strict=True)
        ]


class Looked(NamedTuple):
    """The findings about the gradients, and what else the policy wants."""

    found: Found
    measured: dict[str, Scalar]
    loss_finite: Scalar = None  # bool []: no loss was inf or NaN before it was scaled


class Scaling:
    """The policy, and its state in variables once the optimizer is built."""

    def __init__(self, policy: Policy, inner: Any) -> None:
        backend().check(policy)
        self.policy = policy
        self._inner = inner  # the optimizer that takes the steps, and may clip
        self._elements = 0
        self.variables: Variables | None = None
        self.half_loss = False  # known as soon as a loss is scaled, or traced
        self._loss_flag = LossFlag()

    def build(self, optimizer: Any, names: Sequence[str], elements: int) -> None:
        """Make the variables of an optimizer, for model variables of these names.

        `elements` is the number of elements of all of them.
        """
        self._elements = elements
        self.variables = Variables(
            optimizer, initial(self.policy), self.policy.precision, names
        )

    def state(self) -> State:
        """Return the policy's state for this step."""
        variables = self.variables
        state = initial(self.policy) if variables is None else variables.read()
        if self.half_loss:
            state = capped(
                self.policy, state, PLAIN if variables is None else backend().ops
            )
        return state

    def scale(self) -> Scalar:
        """Return the scale of this step's loss.  float32 []."""
        return single(self.state().scale, self._ops)

    @property
    def _ops(self) -> Ops:
        return PLAIN if self.variables is None else backend().ops

    def told(self, loss: Any) -> Any:
        """Return the loss; a policy that wants it is told whether it was finite."""
        if "loss_finite" not in self.policy.wants:
            return loss
        if backend().name == "jax":
            from buoy._backends.jax import told  # noqa: PLC0415

            return told(self._tell, loss)
        if backend().name == "tensorflow" or not in_stateless_scope():
            self._tell(kops.stop_gradient(kops.convert_to_tensor(loss)))
        return loss

    def _tell(self, loss: Any) -> None:
        finite = kops.all(kops.isfinite(loss))
        self._loss_flag.add(finite, backend().program_now(), replica_now())

    def foresee(self, loss: Any) -> None:
        """Let the policy see the loss, and keep it for the log."""
        variables = self._built
        number = kops.cast(kops.mean(kops.stop_gradient(loss)), "float32")
        before = variables.read()
        after = foreseen(
            self.policy,
            before,
            number,
            known=kops.convert_to_tensor(variables.has_loss),
            ops=backend().ops,
        )
        if after is not before:
            variables.write(after)
        variables.keep_loss(number)

    def look(self, grads: Grads, parts: int = 1) -> Looked:
        """Check and measure gradients of this replica, one of `parts` that add up."""
        scale = self.scale()
        carried = scale if grads.scaled else kops.ones_like(scale)
        bad = [kops.zeros((), "bool")] * self._built.width

        gradients, places = grads.chosen(values=False)
        if gradients:
            found = backend().look(gradients, parts / carried)
            measured = self._measured(gradients, scale / carried)
            _put(bad, places, found.bad)
        else:
            found = Found(bad=None, finite=None, amax=0.0 * scale, norm=0.0 * scale)
            measured = {}

        values, places = grads.chosen(values=True)
        if values:
            _put(bad, places, backend().look(values, kops.ones_like(scale)).bad)

        flags = kops.stack(bad) if bad else kops.zeros((0,), "bool")
        finite = kops.logical_not(kops.any(flags))
        if self._inner.clipnorm or self._inner.global_clipnorm:
            # Keras divides by the root of a sum of squares: by inf, all become NaN.
            top = found.amax * (parts / carried)
            fits = top * top * float(self._elements) <= FLOAT32_MAX
            finite = kops.logical_and(finite, fits)
        told = self._loss_flag.take(backend().program_now(), replica_now())
        return Looked(found._replace(bad=flags, finite=finite), measured, told)

    def _measured(self, tensors: list[Any], lowered: Scalar) -> dict[str, Scalar]:
        """Measure what the policy wants besides the largest gradient; NaN if not due.

        `lowered` is the scale / the scale that the gradients carry.
        """
        turn = kops.convert_to_tensor(self._built.turn)
        return {
            name: kops.cond(
                MEASUREMENTS[name].due(turn),
                lambda function=function: function(tensors, lowered),
                lambda: lowered * float("nan"),
            )
            for name, function in backend().measure.items()
            if name in self.policy.wants
        }

    def conclude(self, looked: Looked, *, scaled: bool) -> tuple[Scalar, Scalar]:
        """Decide about a step and write the state.

        Returns whether to apply the step, and the factor for its gradients.
        """
        state = self.state()
        scale = self.scale()
        made = advance(
            self.policy,
            state,
            looked.found,
            looked.measured,
            carried=scale if scaled else kops.ones_like(scale),
            loss=self._built.kept_loss(),
            loss_finite=looked.loss_finite,
            ops=backend().ops,
        )
        self._built.write(made.state)
        self._built.log(made.line, looked.found.bad)
        return made.applied, made.factor

    @property
    def _built(self) -> Variables:
        if self.variables is None:
            raise CallOrderError(
                "The optimizer is not built. Call "
                "`optimizer.build(model.trainable_variables)` first."
            )
        return self.variables


def _put(bad: list[Any], places: Sequence[int], flags: Any) -> None:
    for index, place in enumerate(places):
        bad[place] = flags[index]
