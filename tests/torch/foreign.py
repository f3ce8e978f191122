"""Optimizers as other libraries write them: wrappers, and one that unscales itself."""

import torch


class Noting(torch.optim.Optimizer):
    """An SGD that declares support, notes what it is given and returns a number."""

    _step_supports_amp_scaling = True

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "fused": True, "momentum": 0.9})
        self.given = []

    @torch.no_grad()
    def step(self, closure=None):
        scale, found = self.grad_scale, self.found_inf
        self.given.append((None if scale is None else float(scale), float(found)))
        for param in self.param_groups[0]["params"]:
            if param.grad is not None and not found:
                divisor = 1.0 if scale is None else scale
                param.sub_(param.grad / divisor, alpha=0.1)
        return 7


class Forwarding:
    """Passes on whatever it does not have."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def step(self, *args, **kwargs):
        return self.optimizer.step(*args, **kwargs)

    def zero_grad(self):
        self.optimizer.zero_grad()


class ForwardingAll:
    """Has not even a `step` of its own, and hides whom it asks."""

    def __init__(self, optimizer):
        self.ask = lambda name: getattr(optimizer, name)

    def __getattr__(self, name):
        if name == "ask":
            raise AttributeError(name)
        return self.ask(name)
