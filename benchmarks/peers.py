"""Run torch's, flax' and jmp's scalers beside Buoy's, and print where they differ.

    python benchmarks/peers.py      # rows of docs/why/comparison.md

Every cell is what the installed version did just now, on a CPU.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jmp
import optax
import torch
from flax.training.dynamic_scale import DynamicScale
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode

import buoy.jax
import buoy.torch

State = TypeVar("State")
Scaler = type[torch.amp.GradScaler]
TORCH = torch.amp.GradScaler
BUOY = buoy.torch.GradScaler
INF = math.inf
NAN = math.nan


def power(scale: float) -> str:
    """Write a scale as a power of two."""
    return f"2^{math.log2(scale):.0f}" if scale > 0 else "0"


def train(
    scaler: torch.amp.GradScaler,
    factors: list[float],
    *,
    model: torch.nn.Module | None = None,
    prepare: Callable[[torch.nn.Module, LRScheduler], None] | None = None,
    inputs: float = 1.0,
    clip: bool = False,
    schedule: bool = False,
) -> torch.nn.Module:
    """Train as torch's documentation does; each loss is multiplied by a factor."""
    torch.manual_seed(0)
    if model is None:
        model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if prepare is not None:
        prepare(model, scheduler)
    for factor in factors:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4) * inputs).square().mean()
        scaler.scale(loss * factor).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if schedule:
            scheduler.step()
    return model


def collapsed_scale(kind: Scaler) -> str:
    """Return the scale after 200 NaN losses, and whether there was a word about it."""
    scaler = kind("cpu")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(scaler, [NAN] * 200)
    message = "a warning" if said else "no message"
    return f"{power(scaler.get_scale())}, {message}"


def weights_after(kind: Scaler) -> str:
    """Take a finite step where the scale has fallen as far as it goes."""
    scaler = kind("cpu", init_scale=2.0**-20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = train(scaler, [NAN] * 110 + [1.0])
    return "finite" if bool(model.weight.isfinite().all()) else "NaN"


def schedule(kind: Scaler) -> str:
    """Count how far a scheduler is ahead after one skipped step."""
    scaler = kind("cpu")
    gated = isinstance(scaler, BUOY)
    held: list[LRScheduler] = []

    def gate(_: torch.nn.Module, scheduler: LRScheduler) -> None:
        held.append(scheduler)
        if gated:
            scaler.gate(scheduler)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(scaler, [INF, 1.0], prepare=gate, schedule=not gated)
    ahead = held[0].last_epoch - 1
    how = " with `scaler.gate(...)`" if gated else ""
    steps = "1 step" if ahead == 1 else f"{ahead} steps"
    return f"{steps} ahead{how}"


def buffers(kind: Scaler) -> str:
    """Look at BatchNorm's running mean after a skipped batch that was inf."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    scaler = kind("cpu")

    def guard(net: torch.nn.Module, _: LRScheduler) -> None:
        if isinstance(scaler, BUOY):
            scaler.guard(net)

    train(scaler, [1.0], model=model, prepare=guard, inputs=INF)
    mean = model[0].running_mean
    found = "finite" if bool(mean.isfinite().all()) else "not finite"
    how = " with `scaler.guard(model)`" if isinstance(scaler, BUOY) else ""
    return f"{found}{how}"


def clipped_scaled(kind: Scaler) -> str:
    """Clip gradients that are still multiplied by the scale."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(kind("cpu"), [1.0] * 5, clip=True)
    return "a warning" if said else "no message"


def half_parameters(kind: Scaler) -> str:
    """Train FP16 parameters."""
    net = torch.nn.Linear(4, 1).half()
    scaler = kind("cpu") if kind is TORCH else kind("cpu", model=net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler.scale(net(torch.ones(1, 4).half()).float().sum()).backward()
    try:
        scaler.step(optimizer)
    except ValueError as error:
        named = "`weight`" in str(error)
        return "an error with the names" if named else "an error without the names"
    return "applied"


def closures(kind: Scaler) -> str:
    """Pass a closure to LBFGS by position: how large are its gradients?"""
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.LBFGS([weight], lr=0.1, max_iter=1)
    scaler = kind("cpu")
    seen: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        scaler.scale(loss).backward()
        return loss

    gather = optimizer._gather_flat_grad

    def look() -> torch.Tensor:
        seen.append(gather())
        return seen[-1]

    optimizer._gather_flat_grad = look
    if kind is TORCH:
        closure()
    scaler.step(optimizer, closure)
    factor = float(seen[-1][0]) / 2.0
    return "unscaled" if factor == 1.0 else f"multiplied by {factor:.0f}"


def complex_gradients(kind: Scaler) -> str:
    """Step with a complex parameter."""
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = kind("cpu")
    scaler.scale(weight.abs().sum()).backward()
    try:
        scaler.step(optimizer)
    except NotImplementedError as error:
        return f"`{type(error).__name__}`"
    return "supported"


def default_rule(kind: Scaler) -> str:
    """Return the scale after three finite steps, and after an overflow."""
    scaler = kind("cpu", growth_interval=3)
    train(scaler, [1.0] * 3)
    grown = power(scaler.get_scale())
    train(scaler, [INF])
    return f"{grown}, then {power(scaler.get_scale())}"


def outcome(kind: Scaler) -> str:
    """Skip a step: what does the caller learn about it?"""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = kind("cpu")
    returned = []
    for factor in (1.0, INF):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * factor).backward()
        returned.append(scaler.step(optimizer))
        scaler.update()
    if not isinstance(scaler, BUOY):
        return "`step` returns None either way" if returned == [None, None] else "?"
    step = scaler.last_step
    return f"`last_step.applied` is {step.applied}, the verdict `{step.verdict}`"


class Passes(TorchDispatchMode):
    """Count the operators that read a tensor, and those that write it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Watch this tensor."""
        super().__init__()
        self.place = tensor.data_ptr()
        self.reads = 0
        self.writes = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at the arguments of one operator."""
        del types
        for given, declared in zip(args, func._schema.arguments, strict=False):
            every = given if isinstance(given, (list, tuple)) else [given]
            tensors = [one for one in every if isinstance(one, torch.Tensor)]
            if any(one.data_ptr() == self.place for one in tensors):
                self.reads += 1
                alias = declared.alias_info
                self.writes += alias is not None and alias.is_write
        return func(*args, **(kwargs or {}))


def clipping_passes(kind: Scaler) -> str:
    """Check, unscale and clip before a fused step: count passes over the gradients."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], fused=True)
    scaler = kind("cpu")
    scaler.scale(weight.square().sum()).backward()
    with Passes(weight.grad) as passes:
        if isinstance(scaler, BUOY):
            scaler.clip_grad_norm_(optimizer, 1.0)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
    reads = "1 read" if passes.reads == 1 else f"{passes.reads} reads"
    return f"{reads}, {passes.writes} writes"


def masters(kind: Scaler) -> str:
    """Train FP16 parameters with FP32 master weights."""
    if "fp16_params" not in inspect.signature(kind).parameters:
        return "no option"
    weight = torch.nn.Parameter(torch.ones(2).half())
    scaler = kind("cpu", fp16_params="master", init_scale=16.0)
    scaler.scale(weight.float().sum()).backward()
    scaler.step(torch.optim.SGD([weight], lr=0.1))
    return '`fp16_params="master"`' if scaler.last_step.applied else "skipped"


PYTORCH: dict[str, Callable[[Scaler], str]] = {
    "the scale after 3 finite steps with `growth_interval=3`, and after an overflow": (
        default_rule
    ),
    "one skipped step: what the caller gets": outcome,
    "check, unscale and clip before a fused step: passes over the gradients": (
        clipping_passes
    ),
    "200 losses in a row are NaN: the scale": collapsed_scale,
    "the weights after the next finite step": weights_after,
    "one skipped step: the scheduler": schedule,
    "one skipped step: BatchNorm's running mean": buffers,
    "clipping gradients that are still scaled": clipped_scaled,
    "FP16 parameters": half_parameters,
    "FP32 master weights for FP16 parameters": masters,
    "gradients that LBFGS gets with a closure, by position": closures,
    "complex gradients": complex_gradients,
}


def after_overflows(
    update: Callable[[State], State], state: State, count: int = 200
) -> State:
    """Apply a jitted update many times."""
    for _ in range(count):
        state = update(state)
    return state


def flax_minimum() -> str:
    """Return flax' scale after 200 overflows."""

    @jax.jit
    def step(scaler: DynamicScale) -> DynamicScale:
        scaler, *_ = scaler.value_and_grad(lambda w: w * jnp.inf)(1.0)
        return scaler

    return power(float(after_overflows(step, DynamicScale()).scale))


def jmp_minimum() -> str:
    """Return jmp's scale after 200 overflows, with a minimum of 2^-10, under `jit`."""
    start = jmp.DynamicLossScale(
        jnp.float32(2.0**15), min_loss_scale=jnp.float32(2.0**-10)
    )
    step = jax.jit(lambda s: s.adjust(jnp.array(False)))
    return power(float(after_overflows(step, start).loss_scale))


def buoy_minimum() -> str:
    """Return the scale of `loss_scaled` after 200 overflows."""
    tx = buoy.jax.loss_scaled(optax.sgd(0.1), "backoff")
    weight = jnp.ones(1)
    grad_fn = buoy.jax.value_and_grad(lambda w: jnp.sum(w) * jnp.inf)

    @jax.jit
    def step(state: optax.OptState) -> optax.OptState:
        _, grads = grad_fn(state, weight)
        _, state = tx.update(grads, state)
        return state

    state = after_overflows(step, tx.init(weight))
    return power(float(buoy.jax.scale_of(state)))


def flax_overflow() -> tuple[str, str]:
    """Apply the gradients that flax returns after an overflow."""
    weight = jnp.zeros(1)
    _, finite, _, grad = DynamicScale().value_and_grad(overflowing)(weight)
    return state_of(weight - grad), f"`is_fin` is {bool(finite)}"


def jmp_overflow() -> tuple[str, str]:
    """Apply the gradients that jmp returns after an overflow."""
    weight = jnp.zeros(1)
    scale = jmp.DynamicLossScale(jnp.float32(2.0**15))
    scaled = jax.grad(lambda w: scale.scale(overflowing(w)))(weight)
    grad = scale.unscale(scaled)
    return state_of(weight - grad), f"`all_finite` is {bool(jmp.all_finite(grad))}"


def buoy_overflow() -> tuple[str, str]:
    """Apply the updates of `loss_scaled` after an overflow."""
    weight = jnp.zeros(1)
    tx = buoy.jax.loss_scaled(optax.sgd(1.0))
    state = tx.init(weight)
    loss, grad = buoy.jax.value_and_grad(overflowing)(state, weight)
    updates, state = tx.update(grad, state, weight, value=loss)
    verdict = buoy.jax.last_step(state).verdict
    return state_of(optax.apply_updates(weight, updates)), f"the verdict `{verdict}`"


def overflowing(weight: jax.Array) -> jax.Array:
    """Return a loss that is finite at 0, where its gradient is not."""
    return jnp.sum(weight**0.5)


def state_of(weight: jax.Array) -> str:
    """Return whether an update has changed a weight of 0."""
    if not bool(jnp.isfinite(weight).all()):
        return "not finite: you select the old values"
    return "unchanged" if bool((weight == 0).all()) else "changed"


def argument(name: str, *functions: Callable[..., Any]) -> str:
    """Say which argument does something; without one, it is up to the user."""
    for function in functions:
        if name in inspect.signature(function).parameters:
            return f"`{name}=`"
    return "no argument"


def jax_rows() -> list[str]:
    """List the rows about flax, jmp and Buoy."""
    found = flax_overflow(), jmp_overflow(), buoy_overflow()
    calls = (
        (DynamicScale, DynamicScale.value_and_grad),
        (jmp.DynamicLossScale, jmp.DynamicLossScale.adjust, jmp.all_finite),
        (buoy.jax.loss_scaled,),
    )
    table = {
        "200 overflows in a row: the scale": (
            flax_minimum(),
            f"{jmp_minimum()}, with a minimum of 2^-10 set",
            buoy_minimum(),
        ),
        "weights after an overflow, if you apply what you get": [x for x, _ in found],
        "what the caller learns about the overflow": [y for _, y in found],
        "clipping": [argument("max_norm", *one) for one in calls],
        "devices of `shard_map` decide together": [
            argument("axis_name", *one) for one in calls
        ],
    }
    return [f"| {row} | {' | '.join(cells)} |" for row, cells in table.items()]


def rows() -> list[str]:
    """List the rows of the page that are observed, in Markdown."""
    torch_rows = [
        f"| {row} | {look(TORCH)} | {look(BUOY)} |" for row, look in PYTORCH.items()
    ]
    return torch_rows + jax_rows()


def minima() -> dict[str, str]:
    """Map each scaler to its scale after 200 overflows."""
    return {"flax": flax_minimum(), "jmp": jmp_minimum(), "buoy": buoy_minimum()}


if __name__ == "__main__":
    print("\n".join(rows()))
