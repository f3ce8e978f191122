"""Find the layer that turned non-finite."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
from keras import ops as kops

__all__ = ["first_nonfinite", "layer_of", "nonfinite_weights"]


def layer_of(path: str) -> str:
    """Return the layer of a variable's path.

    Example:
        >>> layer_of("sequential/dense_1/kernel")
        'sequential/dense_1'
    """
    return path.rpartition("/")[0] or path


def nonfinite_weights(model: Any) -> list[str]:
    """Return the paths of weights that are not finite."""
    return [v.path for v in model.variables if not _is_finite(v)]


def first_nonfinite(model: Any, inputs: Any, **kwargs: Any) -> str | None:
    """Run a model on a batch, eagerly; return the first layer that turns non-finite.

    A layer is named if its output is not finite while its inputs are; None if every
    output is finite.  `kwargs` are passed to the model, e.g. `training=True`.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
        >>> model.build((None, 2))
        >>> model.layers[0].bias.assign([0.0, float("inf")]) is None
        False
        >>> first_nonfinite(model, kops.ones((1, 2))) == model.layers[0].name
        True
    """
    found: list[str] = []
    with ExitStack() as stack:
        for layer in _leaves(model):
            stack.enter_context(_watched(layer, found))
        model(kops.convert_to_tensor(inputs) if _is_plain(inputs) else inputs, **kwargs)
    return found[0] if found else None


def _is_plain(inputs: Any) -> bool:
    return not isinstance(inputs, (dict, list, tuple))


def _leaves(layer: Any) -> Iterator[Any]:
    """Yield the layers that contain no further ones, in the order of the model."""
    inner: Sequence[Any] = getattr(layer, "layers", ())
    if not inner:
        yield layer
    for one in inner:
        yield from _leaves(one)


@contextmanager
def _watched(layer: Any, found: list[str]) -> Iterator[None]:
    call: Callable[..., Any] = layer.call

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        if not found and not all(map(_is_finite, keras.tree.flatten(output))):
            found.append(layer.name)
        return output

    layer.call = watched
    try:
        yield
    finally:
        del layer.call


def _is_finite(tensor: Any) -> bool:
    if "float" not in keras.backend.standardize_dtype(tensor.dtype):
        return True
    return bool(kops.convert_to_numpy(kops.all(kops.isfinite(tensor))))
