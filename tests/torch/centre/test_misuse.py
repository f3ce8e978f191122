"""Each mistake has its own error or one-time warning; a correct loop has none.

Warnings are errors in this suite, so every other test shows the second half.
"""

import copy
import pickle
import warnings

import pytest
import torch
from against import expect
from nets import OPTIMIZERS, batch, loss_of, net, train

from buoy import Verdict
from buoy.torch import (
    BuoyWarning,
    CallOrderError,
    Fp16ParametersError,
    GradScaler,
    OptionError,
    StateError,
)


@pytest.fixture
def begun(loop):
    """Make a loop, with the gradients of a first loss."""
    made = loop(lr=0.1)
    made.scaler.scale(loss_of(made.model, 0)).backward()
    return made


def test_methods_before_the_first_scale(loop):
    """There is no scale to divide by yet."""
    scaler, _, optimizer = loop(lr=0.1)
    for call in (
        lambda: scaler.step(optimizer),
        lambda: scaler.unscale_(optimizer),
        lambda: scaler.clip_grad_norm_(optimizer, 1.0),
        scaler.update,
    ):
        with expect(CallOrderError, AssertionError, "_scale is None", "scale.loss"):
            call()


def test_step_twice_and_update_missing(begun):
    """The second step names the missing `update`."""
    scaler, _, optimizer = begun
    scaler.step(optimizer)
    with expect(CallOrderError, RuntimeError, "already been called", "update"):
        scaler.step(optimizer)


def test_update_without_a_step(begun):
    """Nothing says which way the scale should move."""
    with expect(CallOrderError, AssertionError, "No inf checks", "step"):
        begun.scaler.update()


def test_unscale_twice(begun):
    """Dividing twice would make the gradients far too small."""
    scaler, _, optimizer = begun
    scaler.unscale_(optimizer)
    with expect(CallOrderError, RuntimeError, "already been called", "once"):
        scaler.unscale_(optimizer)


def test_unscale_after_clipping_in_one_pass(begun):
    """Our clipping unscales too; doing it again is the same mistake."""
    scaler, _, optimizer = begun
    scaler.clip_grad_norm_(optimizer, 1.0)
    with expect(CallOrderError, RuntimeError, "already"):
        scaler.unscale_(optimizer)


def test_unscaling_through_a_wrapper_and_stepping_what_it_wraps(begun):
    """Two objects for one optimizer: torch would divide by the scale twice."""
    scaler, _, optimizer = begun

    class Wrapper:
        param_groups = optimizer.param_groups

    scaler.unscale_(Wrapper())
    for method in (scaler.step, scaler.unscale_):
        with expect(CallOrderError, RuntimeError, "another object", "same object"):
            method(optimizer)


def test_unscale_after_step(begun):
    """Too late."""
    scaler, _, optimizer = begun
    scaler.step(optimizer)
    with expect(CallOrderError, RuntimeError, "after step"):
        scaler.unscale_(optimizer)


def test_no_gradients_because_the_loss_was_detached(loop):
    """The graph ended before it reached a parameter."""
    scaler, model, optimizer = loop(lr=0.1)
    with pytest.warns(BuoyWarning, match="does not require grad"):
        scaler.scale(loss_of(model, 0).detach())
    with expect(CallOrderError, AssertionError, "No inf checks", "detached"):
        scaler.step(optimizer)


def test_no_gradients_because_the_model_was_replaced():
    """The optimizer holds the parameters of a model that is no longer trained."""
    old = net()
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
    model = copy.deepcopy(old)
    scaler = GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with expect(CallOrderError, AssertionError, "moved", "Build the optimizer"):
        scaler.step(optimizer)


def test_a_model_moved_after_its_optimizer_was_built_is_noticed():
    """Even where stale gradients hide it, given the model."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", model=model)
    old = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to(torch.float64).to(torch.float32)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(old)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.zeros_like(param)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.scale(loss_of(model, 1)).backward()
    with pytest.warns(BuoyWarning, match="moved"):
        scaler.step(optimizer)
    scaler.update()
    scaler.scale(loss_of(model, 2)).backward()
    scaler.step(optimizer)


def test_an_optimizer_of_another_model_is_not_taken_for_a_moved_one():
    """A discriminator of other shapes, and a twin of the same."""
    for other in (torch.nn.Linear(6, 3), net(5)):
        model = net()
        scaler = GradScaler("cpu", model=model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (other, model)]
        for step in range(4):
            for one, optimizer in zip((other, model), optimizers, strict=True):
                optimizer.zero_grad()
                scaler.scale(loss_of(one, step)).backward()
                scaler.step(optimizer)
            scaler.update()


def test_a_discriminator_alone_is_not_taken_for_the_model():
    """The generator that `model` names may come later, or never."""
    scaler = GradScaler("cpu", model=net())
    other = torch.nn.Linear(6, 3)
    train(scaler, other, torch.optim.SGD(other.parameters(), lr=0.1), ["ok"] * 4)


def test_no_gradients_because_nothing_requires_grad(loop):
    """All parameters of the optimizer are frozen."""
    model = net()
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    scaler, _, optimizer = loop("sgd", frozen, lr=0.1)
    scaler.scale(loss_of(model, 0)).backward()
    with expect(CallOrderError, AssertionError, "requires grad"):
        scaler.step(optimizer)


def test_no_gradients_because_backward_was_not_called(begun):
    """Or because they were cleared too early."""
    scaler, _, optimizer = begun
    optimizer.zero_grad()
    with expect(CallOrderError, AssertionError, "backward", "zero_grad"):
        scaler.step(optimizer)


def test_no_gradients_with_a_fused_optimizer_is_an_error_at_update(loop):
    """As in torch: the step does nothing, the update has nothing to go by."""
    scaler, model, optimizer = loop("fused adamw", lr=1e-3)
    scaler.scale(loss_of(model, 0))
    scaler.step(optimizer)
    with expect(CallOrderError, AssertionError, "No inf"):
        scaler.update()


@pytest.mark.parametrize("thing", ["sgd", 3, object()])
def test_what_is_not_an_optimizer(thing, begun):
    """The scaler would not know whose gradients to check."""
    with expect(OptionError, AttributeError, "param_groups", "optimizer"):
        begun.scaler.step(thing)


@pytest.mark.parametrize("loss", [1.5, None, "loss", {"loss": torch.ones(())}])
def test_a_loss_that_is_no_tensor(loss):
    """A number, a string, a dict: nothing to run backward through."""
    with expect(OptionError, ValueError, "Tensor", "item"):
        GradScaler("cpu").scale(loss)


def test_a_loss_without_a_graph_is_told_once():
    """Not at every step, and not where gradients are off on purpose."""
    scaler = GradScaler("cpu")
    with torch.no_grad():
        scaler.scale(torch.ones(()))
    with pytest.warns(BuoyWarning, match="does not require grad") as caught:
        scaler.scale(torch.ones(()))
    assert len(caught) == 1
    scaler.scale(torch.ones(()))


@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
@pytest.mark.parametrize("sync", ["auto", "never"])
@pytest.mark.parametrize("warm_up", [0, 3])
def test_clipping_scaled_gradients_by_hand_is_noticed(kind, sync, warm_up, loop):
    """Torch's clipping without `unscale_`: a threshold 65536 times too low."""
    scaler, model, optimizer = loop(kind, sync=sync)
    with pytest.warns(BuoyWarning, match="clip") as caught:
        train(
            scaler,
            model,
            optimizer,
            ["inf"] * warm_up + ["ok"] * 5,
            before_step=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        )
    assert len(caught) == 1
    assert "scaler.clip_grad_norm_" in str(caught[0].message)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro", [1, 3])
def test_scaling_gradients_or_accumulating_is_not_mistaken_for_clipping(
    set_to_none, micro, loop
):
    """Averaging by hand and accumulating leave large gradients: no warning."""
    scaler, model, optimizer = loop(lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            for part in range(micro):
                scaler.scale(loss_of(model, step + part) / micro).backward()
            for param in model.parameters():
                param.grad.mul_(0.5)
            scaler.step(optimizer)
            scaler.update()

    assert [] == [str(warning.message) for warning in caught]


def test_clamping_scaled_gradients_by_hand_is_noticed():
    """The same with a threshold for values."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(BuoyWarning, match="clip") as caught:
        train(
            GradScaler("cpu", init_scale=1024.0),
            model,
            optimizer,
            ["ok"] * 5,
            before_step=lambda: torch.nn.utils.clip_grad_value_(
                model.parameters(), 5.0
            ),
        )
    assert len(caught) == 1


def mask(params):
    """Leave every other row out."""
    for param in params:
        param.grad[::2] = 0.0


def divide(params):
    """Average by hand."""
    for param in params:
        param.grad.div_(8)


def nothing(params):
    """Leave them as they are."""


@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
@pytest.mark.parametrize("change", [nothing, divide, mask])
def test_small_or_round_gradients_are_not_mistaken_for_clipped_ones(kind, change, loop):
    """One magnitude everywhere, masks, averages: over many seeds."""
    for seed in range(60):
        scaler, model, optimizer = loop(kind, net(seed))
        for step in range(4):
            optimizer.zero_grad()
            loss = sum(p.sum() for p in model.parameters()) * 2.0**-16
            scaler.scale(loss if seed % 2 else loss_of(model, step) * 1e-4).backward()
            change(list(model.parameters()))
            scaler.step(optimizer)
            scaler.update()


def test_bf16_needs_no_scaling_and_is_told_once():
    """BF16 autocast has FP32's range; FP16 autocast is not warned of."""
    x, y = batch(0)
    for dtype, told in ((torch.bfloat16, 1), (torch.float16, 0)):
        model = net()
        scaler = GradScaler("cpu")
        with torch.autocast("cpu", dtype):
            loss = torch.nn.functional.mse_loss(model(x), y)
        if told:
            with pytest.warns(BuoyWarning, match="BF16.*not needed"):
                scaler.scale(loss)
        scaler.scale(loss)


def test_fp16_parameters_are_listed(loop):
    """How many, which shapes, why not, and what to do."""
    model = net().half()
    scaler, _, optimizer = loop("sgd", model, lr=0.1)
    x, y = batch(0)
    scaler.scale((model(x.half()) - y.half()).float().pow(2).mean()).backward()
    with expect(Fp16ParametersError, ValueError, "FP16 gradients", "8x6", "float"):
        scaler.step(optimizer)


def test_copying_between_step_and_update(begun):
    """Half an iteration cannot be saved."""
    scaler, _, optimizer = begun
    scaler.step(optimizer)
    for copied in (pickle.dumps, copy.deepcopy):
        with expect(CallOrderError, AssertionError, "beginning"):
            copied(scaler)


def test_an_empty_state_cannot_be_loaded():
    """It came from a scaler that was off."""
    with expect(StateError, RuntimeError, "empty", "disabled"):
        GradScaler("cpu").load_state_dict({})
    with pytest.raises(KeyError):
        GradScaler("cpu").load_state_dict({"scale": 2.0})


@pytest.mark.parametrize(
    "value",
    [torch.ones(2), torch.ones(1, requires_grad=True), 0.0, -1.0, float("nan")],
)
def test_a_new_scale_that_cannot_be_used(value, begun):
    """Two numbers, one with a graph, or none that is positive."""
    with expect(OptionError, AssertionError, "new_scale"):
        begun.scaler.update(value)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("way", ["plain", "unscale", "clip", "value", "accumulate"])
def test_a_correct_loop_is_told_nothing(kind, way):
    """Warnings are errors here: the documented loops pass without one."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler("cpu", model=model)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if way == "accumulate":
            scaler.scale(loss_of(model, step + 50)).backward()
        if way == "unscale":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if way == "clip":
            scaler.clip_grad_norm_(optimizer, 0.1)
        if way == "value":
            scaler.clip_grad_value_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.last_step.applied


def test_order_errors_share_a_class():
    """One `except` catches every wrong order."""
    for error in (CallOrderError, CallOrderError, CallOrderError, CallOrderError):
        assert issubclass(error, CallOrderError)


def test_a_loss_without_a_graph_among_others_is_told_nothing():
    """A validation loss, or a frozen branch, after training has begun."""
    model = net()
    scaler = GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        train(scaler, model, optimizer, ["ok"], start=step)
        scaler.scale(torch.ones(()))


def test_clipping_by_hand_is_noticed_for_an_optimizer_that_comes_later():
    """Checks of the first optimizer have ended by then."""
    scaler, models = GradScaler("cpu"), (net(), net(1))
    first, later = (torch.optim.SGD(one.parameters(), lr=0.1) for one in models)
    train(scaler, models[0], first, ["ok"] * 20)

    with pytest.warns(BuoyWarning, match="clip"):
        train(
            scaler,
            models[1],
            later,
            ["ok"] * 5,
            before_step=lambda: torch.nn.utils.clip_grad_norm_(
                models[1].parameters(), 1.0
            ),
        )


def test_gradients_left_after_a_late_skip_are_stale(loop):
    """A skip is looked at again, however long training went well."""
    scaler, model, optimizer = loop(lr=0.1)
    train(scaler, model, optimizer, ["ok"] * 20 + ["inf"])

    scaler.scale(loss_of(model, 0)).backward()  # without `zero_grad`
    scaler.step(optimizer)

    assert Verdict.STALE_GRADS is scaler.last_step.verdict
