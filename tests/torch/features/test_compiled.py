"""A step traces as one graph, and does what the eager one does."""

import pytest
import torch
from nets import OPTIMIZERS, batch, loss_of, net, spoil, train

from buoy import Verdict
from buoy.torch import DeviceModeError, GradScaler

EVENTS = ["ok", "inf", "ok", "ok", "nan", "ok"]


def compiled(scaler, model, optimizer, *, clip, backend="eager"):
    """Compile both halves of a step, each as one whole graph."""

    @torch.compile(fullgraph=True, backend=backend)
    def forward(x, y):
        return scaler.scale(torch.nn.functional.mse_loss(model(x), y))

    @torch.compile(fullgraph=True, backend=backend)
    def finish():
        norm = scaler.clip_grad_norm_(optimizer, 0.5) if clip else None
        scaler.step(optimizer)
        scaler.update()
        return norm

    return forward, finish


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy", "clip", "backend"),
    [
        ("sgd", None, True, "eager"),
        ("sgd", None, False, "aot_eager"),
        ("momentum", None, True, "aot_eager"),
        ("adamw", None, False, "eager"),
        ("adamw", "backoff", True, "eager"),
        ("adam", "lognormal", True, "eager"),
    ],
)
def test_a_compiled_step_equals_the_eager_one(kind, policy, clip, backend):
    """Scale, clip, step and update in one graph, overflows included."""
    torch._dynamo.reset()
    models = net(), net()
    made = [OPTIMIZERS[kind](model.parameters()) for model in models]
    options = {"policy": policy}
    if policy is None:
        options = {"init_scale": 64.0, "growth_interval": 2}
    traced, eager = (
        GradScaler("cpu", sync="never", **options),
        GradScaler("cpu", **options),
    )
    for three in zip((traced, eager), models, made, strict=True):
        train(*three, ["ok"])
    forward, finish = compiled(traced, models[0], made[0], clip=clip, backend=backend)
    for step, event in enumerate(EVENTS):
        made[0].zero_grad()
        forward(*batch(step)).backward()
        spoil(models[0], event)
        finish()
        made[1].zero_grad()
        eager.scale(loss_of(models[1], step)).backward()
        spoil(models[1], event)
        if clip:
            eager.clip_grad_norm_(made[1], 0.5)
        eager.step(made[1])
        eager.update()
        assert traced._scale.item() == pytest.approx(eager.get_scale(), rel=1e-3)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def whole_step(scaler, model, optimizer, backend):
    """Compile forward, backward, clipping, step and update as one graph."""

    @torch.compile(fullgraph=True, backend=backend)
    def step(x, y):
        loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        norm = scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
        return norm

    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy", "backend"),
    [
        ("sgd", None, "aot_eager"),
        ("momentum", None, "aot_eager"),
        ("adamw", None, "eager"),
        ("adamw", "headroom", "aot_eager"),
    ],
)
@torch._dynamo.config.patch(trace_autograd_ops=True, error_on_recompile=True)
def test_a_whole_step_with_its_backward_pass_is_one_graph(kind, policy, backend):
    """Forward, backward, clip, step, update: no break, no second compilation."""
    torch._dynamo.reset()
    models = net(), net()
    made = [OPTIMIZERS[kind](model.parameters()) for model in models]
    options = {"policy": policy}
    if policy is None:
        options = {"init_scale": 64.0, "growth_interval": 2}
    scalers = [GradScaler("cpu", sync="never", **options) for _ in models]
    for three in zip(scalers, models, made, strict=True):
        train(*three, ["ok"])
    step = whole_step(scalers[0], models[0], made[0], backend)
    for turn in range(6):
        x, y = batch(turn)
        if turn in {2, 3}:
            x[0, 0] = float("inf")
        for optimizer in made:
            optimizer.zero_grad()
        norm = step(x, y)
        loss = torch.nn.functional.mse_loss(models[1](x), y)
        scalers[1].scale(loss).backward()
        expected = scalers[1].clip_grad_norm_(made[1], 0.5)
        scalers[1].step(made[1])
        scalers[1].update()
        torch.testing.assert_close(norm, expected, equal_nan=True)
        told, known = scalers[0].last_step, scalers[1].last_step
        assert known.applied == told.applied == (turn not in {2, 3})
        assert (known.scale, known.next_scale) == (told.scale, told.next_scale)
        assert known.verdict == told.verdict
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_compiled_step_can_be_asked_about():
    """What became of it is read from the tensors that the graph left."""
    torch._dynamo.reset()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=64.0, model=model)
    forward, finish = compiled(scaler, model, optimizer, clip=True)
    assert scaler.last_step is None
    forward(*batch(0)).backward()
    finish()
    assert scaler.last_step.applied
    assert (64.0, 64.0) == (scaler.last_step.scale, scaler.last_step.next_scale)
    optimizer.zero_grad()
    forward(*batch(1)).backward()
    spoil(model, "inf")
    finish()
    assert scaler.last_step.verdict is Verdict.SCALE_TOO_HIGH
    assert ("2.bias",) == scaler.last_step.offenders
    assert scaler.last_step_of(optimizer).next_scale == 32.0


def test_plain_sgd_needs_no_step_before_it_is_compiled(loop):
    """Without state there is nothing that a first step would have to make."""
    torch._dynamo.reset()
    scaler, model, optimizer = loop(lr=0.1, init_scale=64.0)
    forward, finish = compiled(scaler, model, optimizer, clip=True)
    forward(*batch(0)).backward()
    finish()
    assert scaler.state_dict()["_growth_tracker"] == 1


def test_a_policy_follows_a_scale_that_was_written_before_a_compiled_step(loop):
    """The tensor's scale is the one that the loss has: the next is half of it."""
    torch._dynamo.reset()
    scaler, model, optimizer = loop(lr=0.1, policy="backoff", sync="never")
    train(scaler, model, optimizer, ["ok"])
    forward, finish = compiled(scaler, model, optimizer, clip=False)
    scaler._scale.fill_(64.0)
    optimizer.zero_grad()
    forward(*batch(0)).backward()
    spoil(model, "inf")
    finish()
    assert (scaler.last_step.scale, scaler.get_scale()) == (64.0, 32.0)


@pytest.mark.parametrize("kind", ["adamw", "fused adamw"])
def test_what_cannot_be_traced_is_refused_with_the_cure(kind, loop):
    """State that does not exist yet, and kernels that torch does not trace."""
    torch._dynamo.reset()
    scaler, model, optimizer = loop(kind)
    forward, finish = compiled(scaler, model, optimizer, clip=False)
    forward(*batch(0)).backward()
    with pytest.raises(
        (DeviceModeError, torch._dynamo.exc.TorchDynamoException),
        match=r"fused=False|without torch\.compile",
    ):
        finish()


def test_what_was_unscaled_outside_is_not_unscaled_again_inside(loop):
    """Half of a step outside of the graph and half inside is refused."""
    torch._dynamo.reset()
    scaler, model, optimizer = loop(lr=0.1, sync="never", init_scale=64.0)
    _, finish = compiled(scaler, model, optimizer, clip=False)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(
        (DeviceModeError, torch._dynamo.exc.TorchDynamoException),
        match="divided by the scale twice",
    ):
        finish()


def test_what_was_clipped_inside_is_not_stepped_outside(loop):
    """An eager step would divide by the scale, and forget that it was clipped."""
    torch._dynamo.reset()
    scaler, model, optimizer = loop(lr=0.1, init_scale=64.0)
    before = [param.detach().clone() for param in model.parameters()]

    @torch.compile(fullgraph=True, backend="eager")
    def clip():
        return scaler.clip_grad_norm_(optimizer, 1e-3)

    scaler.scale(loss_of(model, 0)).backward()
    clip()
    with pytest.raises(DeviceModeError, match="ignore the graph's clipping"):
        scaler.step(optimizer)

    assert all(map(torch.equal, model.parameters(), before))


class Spread:
    """A loss whose gradients span 8 factors of two: none underflows."""

    def __init__(self):
        self.sizes = torch.exp2(torch.linspace(-8.0, 0.0, 512))
        self.weight = torch.nn.Parameter(torch.ones(512))
        self.optimizer = torch.optim.SGD([self.weight], lr=1e-3)
        self.scaler = GradScaler("cpu", policy="headroom", sync="never")
        graph = torch.compile(fullgraph=True, backend="aot_eager")
        self.compiled = graph(self.step)
        self.halves = graph(self.forward), graph(self.finish)

    def forward(self, height):
        """Compute the scaled loss."""
        return self.scaler.scale((self.weight * self.sizes).sum() * height)

    def finish(self):
        """Apply the gradients."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self, height):
        """Take one step; torch.compile does not trace `zero_grad`."""
        self.forward(height).backward()
        self.finish()


HEIGHTS = [1.0 + 0.5 * (step % 5) for step in range(50)]


@pytest.mark.slow
@torch._dynamo.config.patch(trace_autograd_ops=True, error_on_recompile=True)
def test_small_gradients_are_counted_at_the_same_turns():
    """A graph that is compiled once follows the schedule; saving does not disturb."""
    torch._dynamo.reset()
    traced, eager = Spread(), Spread()
    for one in (traced, eager):
        one.step(torch.ones(()))
    scales = set()
    for height in HEIGHTS:
        for one in (traced, eager):
            one.optimizer.zero_grad()
        traced.compiled(torch.tensor(height))
        eager.step(torch.tensor(height))
        scales.add(eager.scaler.get_scale())
        saved, expected = (one.scaler.state_dict()["buoy"] for one in (traced, eager))
        assert saved["turn"] == expected["turn"]
        assert saved["state"].keys() == expected["state"].keys()
        for name, number in expected["state"].items():
            if isinstance(number, float):
                assert number == pytest.approx(saved["state"][name], abs=1e-5), name
    assert len(scales) >= 2


def test_eager_and_compiled_steps_may_alternate():
    """Turns, state and the last step are those of one run."""
    torch._dynamo.reset()
    mixed, eager = Spread(), Spread()
    for turn, height in enumerate(HEIGHTS):
        value = torch.tensor(float("inf") if turn == 30 else height)
        for one in (mixed, eager):
            one.optimizer.zero_grad()
        if turn % 16 in (0, 15):  # small gradients are counted in both ways
            mixed.step(value)
        else:
            forward, finish = mixed.halves
            forward(value).backward()
            finish()
        eager.step(value)
        steps = [one.scaler.last_step for one in (mixed, eager)]
        assert steps[0].applied == steps[1].applied == (turn != 30)
        assert steps[0].scale == pytest.approx(steps[1].scale)
        assert steps[0].next_scale == pytest.approx(steps[1].next_scale)
        states = [one.scaler.state_dict()["buoy"]["state"] for one in (mixed, eager)]
        assert states[0]["margin"] == states[1]["margin"]
    saved = [one.scaler.state_dict() for one in (mixed, eager)]
    assert [one["buoy"]["turn"] for one in saved] == [len(HEIGHTS)] * 2
    mixed.scaler.load_state_dict(saved[1])
    assert mixed.scaler.state_dict() == saved[1]


@torch._dynamo.config.patch(trace_autograd_ops=True)
def test_several_optimizers_in_one_graph():
    """Each has its own clipping and its own outcome; the scale follows all."""
    torch._dynamo.reset()
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    scaler = GradScaler("cpu", init_scale=8.0)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, y):
        scaler.scale(weights[0].sum() * x + weights[1].sum() * y).backward()
        norms = [scaler.clip_grad_norm_(one, 1.0) for one in optimizers]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return norms

    norms = step(torch.tensor(3.0), torch.tensor(float("inf")))
    assert norms[0].item() == 6.0
    assert scaler.last_step_of(optimizers[0]).applied
    assert not scaler.last_step_of(optimizers[1]).applied
    assert scaler.get_scale() == 4.0
    torch.testing.assert_close(weights[0].detach(), torch.full((4,), 0.75))
    assert torch.equal(weights[1].detach(), torch.ones(4))


@torch._dynamo.config.patch(error_on_recompile=True)
def test_the_gradients_of_every_backward_pass_fit_one_graph(loop):
    """They are other tensors each time, here of two dtypes."""
    torch._dynamo.reset()
    weights = [
        torch.nn.Parameter(torch.ones(2, dtype=dtype))
        for dtype in (torch.float32, torch.float64)
    ]
    scaler, _, optimizer = loop("sgd", weights, lr=0.5, init_scale=8.0)
    scaler.scale(weights[0].sum()).backward()
    scaler.step(optimizer)
    scaler.update()

    @torch.compile(fullgraph=True, backend="eager")
    def forward(height):
        return scaler.scale(sum(weight.sum() for weight in weights) * height)

    @torch.compile(fullgraph=True, backend="eager")
    def finish():
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        return norm

    norms = []
    for height in (3.0, float("inf"), 4.0):
        optimizer.zero_grad()
        forward(torch.tensor(height)).backward()
        norms.append(finish())
    assert [norm.item() for norm in norms] == [6.0, float("inf"), 8.0]
    assert scaler.get_scale() == 4.0
    assert scaler.last_step.applied


def test_the_scale_does_not_move_between_an_eager_and_a_compiled_loss(loop):
    """A policy that looks ahead looks at the first one."""
    scaler, weight, optimizer = loop("sgd", torch.ones(2), lr=0.0, policy="headroom")
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    before = scaler.get_scale()

    @torch.compile(backend="eager", fullgraph=True)
    def scaled(weight):
        return scaler.scale((weight + 1e5).sum())

    scaler.scale(weight.sum())
    scaled(weight)
    assert scaler.get_scale() == before


@pytest.mark.parametrize("order", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_compiled_norm_of_any_order_is_the_eager_one(order, dtype, loop):
    """Order 0 counts, which the scale does not change; a complex number has a size."""
    torch._dynamo.reset()
    norms = []
    for mode in ("eager", "compiled"):
        scaler, weight, optimizer = loop(
            "sgd", torch.tensor([3.0, 4.0], dtype=dtype), lr=0.0, init_scale=4.0
        )
        scaler.scale((weight * (2 + 1j * (dtype.is_complex))).abs().sum()).backward()

        def clip(scaler=scaler, optimizer=optimizer):
            return scaler.clip_grad_norm_(optimizer, 0.1, order)

        traced = torch.compile(clip, fullgraph=True, backend="eager")
        norms.append((clip if mode == "eager" else traced)().item())
    assert norms[0] == pytest.approx(norms[1])


def test_a_second_clipping_in_a_graph_is_refused(loop):
    """It would replace the first one."""
    torch._dynamo.reset()
    scaler, weight, optimizer = loop("sgd", torch.tensor([3.0, 4.0]), lr=0.0)
    scaler.scale((weight**2).sum()).backward()

    @torch.compile(fullgraph=True, backend="eager")
    def clip_twice():
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.clip_grad_norm_(optimizer, 5.0)

    with pytest.raises(Exception, match="a second clipping of the same gradients"):
        clip_twice()
