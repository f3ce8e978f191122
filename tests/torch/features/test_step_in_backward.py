"""Optimizers inside the backward pass are refused, and leave no partial update."""

from functools import partial

import pytest
import torch
from nets import loss_of, net, train
from torch.distributed.optim import _apply_optimizer_in_backward

from buoy.torch import CallOrderError, GradScaler


def optimizers_of(model):
    """Give each parameter an optimizer of its own."""
    return {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}


def on_each(model, hook):
    """Register a hook on every parameter."""
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)


def tutorial(model):
    """Step each parameter in a hook, as PyTorch's tutorial shows."""
    optimizers = optimizers_of(model)

    def hook(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    on_each(model, hook)


def list_of_optimizers(model):
    """Reach them through a list."""
    optimizers = list(optimizers_of(model).values())

    def hook(_):
        for optimizer in optimizers:
            optimizer.step()

    on_each(model, hook)


def default_argument(model):
    """Hold the bound method itself."""
    step = torch.optim.SGD(model.parameters(), lr=0.1).step
    on_each(model, lambda _, step=step: step())


def a_partial(model):
    """Bind the optimizer beforehand."""

    def hook(optimizer, _):
        optimizer.step()

    on_each(model, partial(hook, torch.optim.SGD(model.parameters(), lr=0.1)))


def marked(model):
    """Use torch's own function, which marks the parameters."""
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


def bound_step(model):
    """Register the bound method itself."""
    on_each(model, torch.optim.SGD(model.parameters(), lr=0.1).step)


PLAIN = [marked, bound_step]


def one_function_deeper(model):
    """Call a function that steps."""
    optimizers = optimizers_of(model)

    def apply(param):
        optimizers[param].step()

    on_each(model, lambda param: apply(param))  # noqa: PLW0108


class Trainer:
    """Keeps its optimizer in an attribute, behind two methods."""

    def __init__(self, model):
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        on_each(model, self.hook)

    def hook(self, param):
        """Call another method."""
        self.update(param)

    def update(self, _):
        """Step in the backward pass."""
        self.optimizer.step()


class Hook:
    """An object that is called and steps."""

    def __init__(self, model):
        self.optimizers = {"all": torch.optim.SGD(model.parameters(), lr=0.1)}
        on_each(model, self)

    def __call__(self, param):
        """Step in the backward pass."""
        self.optimizers["all"].step()


def by_hand(model):
    """Update without any optimizer, as LOMO does."""

    @torch.no_grad()
    def hook(param):
        param.sub_(0.1 * param.grad)
        param.grad = None

    on_each(model, hook)


def through_data(model):
    """Update in a way that torch does not count."""

    def hook(param):
        param.data.sub_(0.1 * param.grad)

    on_each(model, hook)


def tensor_hooks(model):
    """Use the older kind of hook."""

    def hook(param, grad):
        with torch.no_grad():
            param.sub_(0.1 * grad)

    for param in model.parameters():
        param.register_hook(partial(hook, param))


HIDDEN = [
    tutorial, list_of_optimizers, default_argument, a_partial, one_function_deeper,
    Trainer, Hook, by_hand, through_data, tensor_hooks,
]  # fmt: skip


def refused(scaler, model, words):
    """Expect the error from `scale` or `backward`, and untouched weights."""
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(CallOrderError, match=words) as error:
        scaler.scale(loss_of(model, 0)).backward()
    assert isinstance(error.value, RuntimeError)
    assert all(
        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    )


@pytest.mark.parametrize("install", PLAIN)
def test_what_is_plain_to_see_is_refused_before_the_pass(install):
    """Nothing runs at all."""
    model = net()
    install(model)
    refused(GradScaler("cpu", model=model), model, r"0\.weight.*hook.*scaler\.step")
    assert all(p.grad is None for p in model.parameters())
    scaler = GradScaler("cpu")
    with pytest.raises(CallOrderError):
        scaler.scale(loss_of(model, 0))


@pytest.mark.parametrize("install", HIDDEN)
@pytest.mark.parametrize("seen", [0, 3, 40])
def test_what_is_hidden_is_put_back(install, seen):
    """The weights are what they were, also of a model that comes later."""
    scaler = GradScaler("cpu")
    other = net(7)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    train(scaler, other, optimizer, ["ok"] * seen)
    model = net()
    install(model)
    if seen == 40:  # looked at again from time to time: after 64 steps at the latest
        train(scaler, other, optimizer, ["ok"] * 24)
    refused(scaler, model, r"changed.*restored.*scaler\.step")


def test_hooks_installed_later_are_found_when_the_optimizer_steps():
    """The second place to look is an optimizer's first step."""
    model = net()
    scaler = GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    bound_step(model)
    with pytest.raises(CallOrderError):
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


class Logger:
    """Counts steps, has an optimizer, and touches nothing."""

    def __init__(self, optimizer):
        self.optimizer, self.step, self.seen = optimizer, 0, []

    def hook(self, param):
        """Note the step and the norm."""
        self.seen.append((self.step, param.grad.norm()))


def test_harmless_hooks_are_left_alone():
    """Those that log `self.step` beside an optimizer, and those that scale."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logger = Logger(optimizer)
    on_each(model, logger.hook)
    on_each(model, lambda param: logger.seen.append(logger.step))
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    train(GradScaler("cpu"), model, optimizer, ["ok"] * 5)
    assert len(logger.seen) == 40


def test_poisoned_weights_are_not_mistaken_for_changed_ones(loop):
    """NaN is not equal to itself, and not a change either."""
    model = net()
    on_each(model, Logger(None).hook)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    scaler, _, optimizer = loop("sgd", model, lr=0.1)
    train(scaler, model, optimizer, ["ok"])
    assert scaler.last_step.verdict == "poisoned"
