"""Run one history on plain numbers and on a backend, and say where they differ."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from buoy._core.ops import PLAIN, Ops
from buoy._core.state import map_state, parts

__all__ = ["differs"]


def differs(
    policy: Any,
    backend: str,
    histories: Iterable[list[Any]],
    seen_of: Callable[[Any, Any], Any],
) -> str | None:
    """Compare the scales of each history; None where they are the same, bit for bit."""
    module = import_module(f"buoy._backends.{backend}")
    with _setting(backend, policy):
        ops: Ops = module.ops()

        def lift(value: Any) -> Any:
            return module.lift(value, policy.precision)

        step = _jitted(policy, ops, module) if backend == "jax" else _eager(policy, ops)
        for history in histories:
            state = map_state(lift, policy.init())
            plain = policy.init()
            for index, event in enumerate(history):
                seen = seen_of(policy, event)
                plain = policy.foresee(plain, event[3], ops=PLAIN)
                plain = policy.update(plain, seen, ops=PLAIN)
                state = step(state, lift(event[3]), map_state(lift, seen))
                if float(state.scale) != plain.scale:
                    return (
                        f"step {index}: the scale is {float(state.scale)!r}, "
                        f"on plain numbers {plain.scale!r}"
                    )
    return None


def _eager(policy: Any, ops: Ops) -> Callable[[Any, Any, Any], Any]:
    def step(state: Any, loss: Any, seen: Any) -> Any:
        return policy.update(policy.foresee(state, loss, ops=ops), seen, ops=ops)

    return step


def _jitted(policy: Any, ops: Ops, module: Any) -> Callable[[Any, Any, Any], Any]:
    import jax  # noqa: PLC0415

    for part in parts(policy.init()):
        module.register(type(part))
    run = _eager(policy, ops)

    def step(state: Any, loss: Any, seen: Any) -> Any:
        module.register(type(seen))
        return compiled(state, loss, seen)

    compiled = jax.jit(run)
    return step


def _setting(backend: str, policy: Any) -> AbstractContextManager[Any]:
    if backend != "jax" or policy.precision != "float64":
        return nullcontext()
    import jax  # noqa: PLC0415

    context: AbstractContextManager[Any] = jax.enable_x64(True)
    return context
