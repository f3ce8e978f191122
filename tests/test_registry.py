"""Policies by name: suggestions, presets' own parameters, third parties."""

import math
import subprocess
import sys
import textwrap

import pytest

import buoy
from buoy._core.policies.presets import PRESETS
from buoy._core.policies.registry import CLASSES, listed, saved_classes


def test_unknown_name_suggests_and_lists():
    """A typing error is answered with the nearest name and all the others."""
    with pytest.raises(buoy.UnknownPolicyError) as caught:
        buoy.policy("backof")

    assert "Did you mean 'backoff'?" in str(caught.value)
    assert "headroom" in str(caught.value)
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("name", [*CLASSES, *PRESETS])
def test_every_name_makes_a_policy_with_its_defaults(name):
    """Each built-in name works without a parameter and starts at a sane scale."""
    state = buoy.policy(name).init()

    assert 0 < state.scale <= 2.0**32


@pytest.mark.parametrize("annotation", [None, "BackoffState"])
def test_a_policy_in_the_table_says_the_class_of_its_state(annotation, monkeypatch):
    """Who adds one without an annotation, or with a string, reads what to write."""

    class Tide(buoy.Backoff):
        def init(self, *, scale=None):
            return super().init(scale=scale)

    if annotation is not None:
        Tide.init.__annotations__["return"] = annotation
    monkeypatch.setitem(CLASSES, "tide", Tide)
    with pytest.raises(buoy.PolicyError, match=r"`Tide\.init` must be annotated"):
        saved_classes()


def test_presets_take_the_peers_own_names():
    """DeepSpeed's arguments and its configuration keys make the same policy."""
    by_argument = buoy.policy("deepspeed", scale_window=500, delayed_shift=4)
    by_config = buoy.policy("deepspeed", loss_scale_window=500, hysteresis=4)

    assert by_argument == by_config
    assert 4 == by_argument.hysteresis


def test_unknown_parameter_lists_the_known_ones():
    """A parameter that the policy does not have is named, with those it has."""
    with pytest.raises(buoy.PolicyError, match="no parameter `windw`.*scale_window"):
        buoy.policy("apex", windw=3)
    with pytest.raises(buoy.PolicyError, match="windw"):
        buoy.policy("deepspeed", windw=3)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_bad_preset_parameters_are_policy_errors(preset):
    """A word, NaN or zero for any number is refused as a bad configuration."""
    for name, default in PRESETS[preset].parameters.items():
        if isinstance(default, bool) or not isinstance(default, (int, float)):
            continue
        if (preset, name) == ("apex", "scale_factor"):
            continue  # the peer ignores it, whatever it is
        for bad in ("many", float("nan")):
            with pytest.raises(buoy.PolicyError):
                buoy.policy(preset, **{name: bad})


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        ("deepspeed", "scale_window", 0),
        ("jaxamp", "patience", -5),
        ("chainer", "interval", -1),
        ("tf", "multiplier", 0),
        ("cerebras", "steps_per_increase", "x"),
        ("mmcv", "mode", "statc"),
        ("fairscale", "protocol", "typo"),
        ("keras", "api", "typo"),
        ("jmp", "jit", "no"),
        ("tf_keras", "dynamic", "False"),
        ("apex", "scale_factor", "abc"),
        ("colossalai", "hysteresis", -1),
        ("flax", "growth_interval", True),
        ("guided_diffusion", "fp16_scale_growth", None),
        ("mindspore_amp", "scale_value", 0.5),
    ],
)
def test_preset_errors_speak_the_users_language(name, parameter, value):
    """The parameter that was typed is named, with its value."""
    with pytest.raises(buoy.PolicyError) as caught:
        buoy.policy(name, **{parameter: value})

    assert parameter in str(caught.value)
    assert repr(value) in str(caught.value)


def test_deepspeeds_whole_fp16_section_is_understood():
    """A configuration's `fp16` section can be passed as it is."""
    section = {"enabled": True, "loss_scale": 0, "loss_scale_window": 7}

    assert 7 == buoy.policy("deepspeed", **section).growth_interval
    assert 4.0 == buoy.policy("deepspeed", loss_scale=4.0).init().scale
    assert 1.0 == buoy.policy("deepspeed", enabled=False).init().scale


def test_policy_objects_pass_through():
    """Where a name is taken, an object is too; parameters beside it are refused."""
    policy = buoy.Static(init_scale=4.0)

    assert policy is buoy.policy(policy)
    with pytest.raises(buoy.PolicyError, match="`init_scale` was given together"):
        buoy.policy(policy, init_scale=3.0)
    with pytest.raises(buoy.PolicyError, match="must be a policy"):
        buoy.policy(3.0)


def test_the_list_describes_every_policy():
    """Each row has a summary, and presets name their peer."""
    rows = {row.name: row for row in listed()}

    assert set(buoy.policies()) == set(rows)
    assert all(row.summary for row in rows.values())
    assert "0.16.1" in rows["megatron"].source
    assert 2000 == rows["torch"].parameters["growth_interval"]


PLUGIN = """
import dataclasses, buoy
@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed(buoy.Static):
    pass
raise_at_import = False
"""


def installed(tmp_path, name, entry, module=PLUGIN):
    """Lay a distribution with one entry point into a folder."""
    (tmp_path / f"{name}.py").write_text(module)
    info = tmp_path / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[buoy.policies]\n{entry}\n")


def python(tmp_path, code):
    """Run code with the folder on the path."""
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + textwrap.dedent(
        code
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )


def test_third_party_policies_are_found_and_loaded_lazily(tmp_path):
    """An entry point is listed without being imported, and made when asked for."""
    installed(tmp_path, "plugin_a", "fixed = plugin_a:Fixed")

    result = python(
        tmp_path,
        """
        import buoy
        assert "fixed" in buoy.policies()
        assert "plugin_a" not in sys.modules
        print(buoy.policy("fixed", init_scale=4.0).init().scale)
        """,
    )

    assert ("4.0\n", 0) == (result.stdout, result.returncode), result.stderr


def test_a_broken_plugin_fails_only_when_asked_for(tmp_path):
    """Others go on; the error names the distribution and the reason."""
    installed(tmp_path, "plugin_b", "broken = plugin_b:Fixed", "1/0")

    result = python(
        tmp_path,
        """
        import buoy
        buoy.policy("torch")
        try:
            buoy.policy("broken")
        except buoy.UnknownPolicyError as error:
            print(error)
        """,
    )

    assert "plugin_b" in result.stdout
    assert "ZeroDivisionError" in result.stdout


def test_clashes_are_errors_and_built_in_names_cannot_be_taken(tmp_path):
    """Two owners of one name are both named; 'torch' stays ours."""
    installed(tmp_path, "plugin_c", "same = plugin_c:Fixed\ntorch = plugin_c:Fixed")
    installed(tmp_path, "plugin_d", "same = plugin_d:Fixed")

    result = python(
        tmp_path,
        """
        import buoy
        print(type(buoy.policy("torch")).__name__)
        try:
            buoy.policy("same")
        except buoy.UnknownPolicyError as error:
            print(error)
        """,
    )

    assert result.stdout.startswith("TorchRule\n"), result.stderr
    assert "plugin_c, plugin_d" in result.stdout


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("mmcv", {"mode": "static", "init_scale": 64.0}, buoy.Static(init_scale=64.0)),
        ("cerebras", {"loss_scale": 64.0}, buoy.Static(init_scale=64.0)),
        ("chainer", {"scale": 64.0}, buoy.Static(init_scale=64.0)),
        ("bmtrain", {"loss_scale": None}, buoy.NoScaling()),
        ("bmtrain", {"max_loss_scale": math.inf}, buoy.policy("bmtrain")),
    ],
)
def test_a_preset_whose_peer_may_be_static_or_off_is_so_too(name, parameters, expected):
    """By the peer's own parameters."""
    assert expected == buoy.policy(name, **parameters)
