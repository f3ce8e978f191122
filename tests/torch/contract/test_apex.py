"""Scripts written for apex.amp run after changing one line: the import."""

import copy
import logging
import math
from pathlib import Path

import pytest
import torch
from nets import batch, net

from buoy.integrations.apex import amp
from buoy.torch import CallOrderError, OptionError

SCRIPTS = Path(__file__).parent / "apex_scripts"
LEVELS = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])


def run(name, *arguments):
    """Run a script with Buoy's module in the place of apex's, and nothing else."""
    source = (SCRIPTS / f"{name}.py").read_text()
    assert source.count("\nfrom apex import amp\n") == 1
    source = source.replace(
        "from apex import amp", "from buoy.integrations.apex import amp"
    )
    space = {"__name__": name}
    exec(compile(source, name, "exec"), space)  # noqa: S102
    return space["main"]([*map(str, arguments)])


def weights(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


@LEVELS
def test_the_classifier_learns_at_every_level(level):
    """Without a GPU, O1 included, to the loss of FP32."""
    model, _, losses = run("classify", "--opt-level", level)
    _, _, wide = run("classify", "--opt-level", "O0")

    assert abs(sum(losses[-10:]) - sum(wide[-10:])) < 0.1 * sum(wide[-10:])
    halves = {"O0": False, "O1": False, "O2": True, "O3": True}[level]
    assert (model[0].weight.dtype == torch.float16) is halves
    norm = torch.float16 if level == "O3" else torch.float32
    assert model[1].weight.dtype == norm


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "extra", [["--loss-scale", "128.0"], ["--loss-scale", "dynamic"], []]
)
def test_overflows_are_skipped(level, extra):
    """The first step and one in the middle; with a static scale, too."""
    model, optimizer, losses = run(
        "classify", "--opt-level", level, "--spoil", 0, 7, "--steps", 12, *extra
    )
    assert math.isinf(losses[7])
    assert torch.isfinite(weights(model)).all()
    assert math.isfinite(losses[11])
    (scaler,) = amp.scalers()
    expected = 128.0 if "128.0" in extra else 2.0**14
    assert scaler.get_scale() == expected
    assert scaler._log.watch.skips == 2
    step = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
    assert step


def test_a_skipped_step_leaves_weights_and_momentum_alone():
    """`step` does nothing once, then everything is as before."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    method = optimizer.step
    x, _ = batch(0)
    for factor, moves in ((1.0, True), (math.inf, False), (1.0, True)):
        before = weights(model)
        state = copy.deepcopy(optimizer.state_dict()["state"])
        optimizer.zero_grad()
        loss = model(x).square().mean() * factor
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert torch.equal(before, weights(model)) is not moves
        if not moves:
            now = optimizer.state_dict()["state"]
            assert torch.equal(state[0]["momentum_buffer"], now[0]["momentum_buffer"])
            assert amp.scalers()[0].last_step.verdict == "forward_nonfinite"
            assert "0.weight" in amp.scalers()[0].last_step.offenders
        assert optimizer.step == method


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accumulation_with_and_without_delay(level):
    """Gradients of earlier passes are not unscaled again; both ways agree."""
    ends = [
        run("classify", "--opt-level", level, "--accumulate", 3, "--steps", 8, *extra)
        for extra in ([], ["--delay"])
    ]
    torch.testing.assert_close(
        weights(ends[0][0]), weights(ends[1][0]), rtol=0.02, atol=2e-3
    )
    wide = run("classify", "--opt-level", "O0", "--accumulate", 3, "--steps", 8)
    torch.testing.assert_close(
        weights(ends[0][0]), weights(wide[0]), rtol=0.1, atol=0.02
    )


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resume_is_exact(level, tmp_path):
    """Model, optimizer and amp are saved and loaded as apex documents it."""
    whole, _, losses = run("classify", "--opt-level", level, "--spoil", 2)
    first = ["classify", "--opt-level", level, "--spoil", 2, "--steps", 17]
    run(*first, "--save", tmp_path / "half.pt")
    saved = torch.load(tmp_path / "half.pt", weights_only=True)
    assert saved["amp"]["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 14}
    assert {v.dtype for v in saved["model"].values()} <= {torch.float32, torch.int64}
    again, _, rest = run(
        "classify", "--opt-level", level, "--resume", tmp_path / "half.pt"
    )
    assert rest == losses[17:]
    assert torch.equal(weights(whole), weights(again))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])  # Adam's eps is 0 in FP16
def test_the_gan_trains_with_three_losses(level):
    """Each loss has a scale of its own."""
    *_, history = run("gan", "--opt-level", level)
    assert all(math.isfinite(a) and math.isfinite(b) for a, b in history)
    wide = run("gan", "--opt-level", "O0")[-1]
    assert abs(history[-1][1] - wide[-1][1]) < 0.05 * wide[-1][1]
    assert list(amp.state_dict()) == [f"loss_scaler{i}" for i in range(3)]


def test_one_bad_loss_skips_the_step_and_lowers_only_its_scale():
    """The other loss of the same optimizer was clean."""
    *_, optimizer, history = run("gan", "--opt-level", "O2", "--spoil", 5)
    assert math.isnan(history[5][0])
    assert all(math.isfinite(value) for value, _ in history[6:])
    scales = [state["loss_scale"] for state in amp.state_dict().values()]
    assert scales == [2.0**15, 2.0**16, 2.0**16]
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == {29}


def test_master_params_are_what_the_optimizer_updates():
    """FP32 with unscaled gradients; clipping them clips the step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=64.0)
    with amp.scale_loss(model(batch(0)[0]).square().sum(), optimizer) as scaled:
        scaled.backward()
    before = [m.detach().clone() for m in amp.master_params(optimizer)]
    assert {m.dtype for m in before} == {torch.float32}
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
    assert 0.5 < norm < 1e3
    optimizer.step()
    after = list(amp.master_params(optimizer))
    moved = torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)])
    assert abs(moved.norm().item() - 0.5) < 1e-3
    plain = net()
    bare = torch.optim.SGD(plain.parameters(), lr=1.0)
    assert list(amp.master_params(bare)) == list(plain.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_gradients_are_unscaled_in_place(fused):
    """Without masters too, by a scale that FP16 does not hold, in every optimizer."""
    models = [net(), net(seed=1)]
    held = [torch.optim.SGD(m.parameters(), lr=0.5, fused=fused) for m in models]
    amp.initialize(models, held, opt_level="O3", loss_scale=2.0**17)
    x = batch(0)[0]
    for factor in (2.0**-12, math.inf):
        before = [weights(model) for model in models]
        loss = sum(model(x).sum() for model in models) * factor
        with amp.scale_loss(loss, held) as scaled:
            scaled.backward()
        grads = [p.grad for model in models for p in model.parameters()]
        assert {grad.dtype for grad in grads} == {torch.float16}
        for optimizer in held:
            optimizer.step()
            optimizer.zero_grad()
        moved = [
            not torch.equal(a, weights(m)) for a, m in zip(before, models, strict=True)
        ]
        assert moved == [factor < 1.0] * 2
        if factor < 1.0:
            assert grads[-1].tolist() == [len(x) * factor] * len(grads[-1])


def test_a_block_without_a_backward_pass_is_refused():
    """It would leave the step to gradients that nobody has looked at."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1")
    with (
        pytest.raises(CallOrderError, match="had a gradient"),
        amp.scale_loss(model(batch(0)[0]).sum(), optimizer),
    ):
        pass


def test_disabled_it_is_not_there():
    """`enabled=False` leaves everything as it was."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same = amp.initialize(model, optimizer, enabled=False, opt_level="O2")
    assert same == (model, optimizer)
    loss = model(batch(0)[0]).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    optimizer.step()
    assert amp.state_dict() == {}
    assert model[0].weight.dtype == torch.float32


def test_outputs_overrides_and_inference():
    """Outputs come back in FP32, or in what was asked for; optimizers are optional."""
    x, _ = batch(0)
    for level in ("O1", "O2", "O3"):
        assert amp.initialize(net(), opt_level=level)(x).dtype == torch.float32
    half = amp.initialize(net(), opt_level="O2", cast_model_outputs=torch.float16)
    assert half(x).dtype == torch.float16
    kept = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    amp.initialize(kept, opt_level="O2", keep_batchnorm_fp32="False")
    assert kept[0].weight.dtype == torch.float16
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O3", master_weights=True)
    assert next(amp.master_params(optimizer)).dtype == torch.float32
    amp.initialize(net(), opt_level="O1", min_loss_scale=4.0, max_loss_scale=2.0**10)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**10


def test_decorated_functions_run_in_their_precision():
    """Inside and outside of autocast."""
    x, y = torch.ones(2, 2), torch.ones(2, 2).half()
    for enabled in (True, False):
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            assert amp.float_function(torch.mm)(y, y).dtype == torch.float32
            assert amp.half_function(torch.mm)(x, other := x).dtype == torch.float16
            assert amp.promote_function(torch.add)(x, y).dtype == torch.float32
            with amp.disable_casts():
                assert torch.mm(x, other).dtype == torch.float32

    class Module:
        mm = staticmethod(torch.mm)

    amp.register_float_function(Module, "mm")
    assert Module.mm(y, y).dtype == torch.float32


def test_initialize_logs_what_it_does(caplog):
    """In the log, unless `verbosity` is 0."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.INFO, "buoy.integrations.apex"):
        amp.initialize(model, optimizer, opt_level="O1")
        with amp.scale_loss(model(batch(0)[0]).sum() * math.inf, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert "level O1" in caplog.text
    assert "loss scaler 0 reducing loss scale to 32768" in caplog.text


def test_another_number_of_losses_loads_what_is_common(caplog):
    """As apex does, with a word about it."""
    amp.initialize(net(), opt_level="O1", num_losses=2)
    state = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}}
    amp.load_state_dict(state)
    assert amp.state_dict()["loss_scaler0"] == state["loss_scaler0"]
    assert amp.state_dict()["loss_scaler1"]["loss_scale"] == 2.0**16
    assert "1 loss scalers, this run has 2" in caplog.text


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"opt_level": "02"}, "letter O"),
        ({"opt_level": "O1", "master_weights": True}, "O1.*weights in FP32"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True"),
        ({"opt_level": "O1", "cast_model_type": torch.float16}, "O2"),
        ({"opt_level": "O2", "patch_torch_functions": True}, "belongs to.*O1"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, "'True' or 'False'"),
    ],
)
def test_what_apex_refuses_is_refused(options, match):
    """As an `OptionError`, with the way out."""
    model = net()
    with pytest.raises(OptionError, match=match):
        amp.initialize(model, **options)
    assert model[0].weight.dtype == torch.float32


def test_bad_use_has_its_own_error(monkeypatch):
    """Before `initialize`, an unknown loss, a stranger, a closure."""
    monkeypatch.setattr(amp._now, "begun", False)
    monkeypatch.setattr(amp._now, "level", None)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(batch(0)[0]).sum()
    with pytest.raises(CallOrderError, match="not been initialized"):
        amp.scale_loss(loss, optimizer)
    amp.initialize(model, optimizer, opt_level="O1")
    with (
        pytest.raises(OptionError, match="num_losses"),
        amp.scale_loss(loss, optimizer, loss_id=1),
    ):
        pass
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match="not passed"), amp.scale_loss(loss, other):
        pass
    with amp.scale_loss(loss * math.nan, optimizer) as scaled:
        scaled.backward()
    with pytest.raises(CallOrderError, match="closure"):
        optimizer.step(lambda: loss)
