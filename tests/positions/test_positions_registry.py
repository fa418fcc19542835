"""Names, aliases, options: found without torch, refused with a readable reason."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatron_patches.positions as positions
from megatron_patches.positions import Geometry, PositionMethod, aliases, build, names, options

GEOMETRY = {"heads": 12, "head_dim": 8, "hidden_size": 96, "max_length": 64}
FOLDER = Path(positions.__file__).parent


def run_fresh(code: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_names_are_the_canonical_ones():
    kernels = ["log", "power", "log3", "weight", "power_weight", "weight1", "gauss2", "gauss3"]
    rivals = ["alibi", "rpe", "rotary", "sinusoidal", "learned", "none"]
    assert {*rivals, *(f"kerple_{kernel}" for kernel in kernels)} <= set(names())
    assert names() == sorted(names())


def test_aliases_are_the_authors_spellings():
    expected = {
        "kerple_power_ap_": "kerple_power",
        "kerple_power__ap": "kerple_weight",
        "kerple_power_ap_ap": "kerple_power_weight",
    }
    assert expected.items() <= aliases().items()
    for alias, name in aliases().items():
        assert build(alias, **GEOMETRY).name == name
        assert alias not in names()


def test_answers_do_not_belong_to_the_caller():
    names().clear()
    aliases().clear()
    assert "alibi" in names() and aliases()


def test_names_need_no_torch():
    code = (
        "import sys; from megatron_patches.positions import names, aliases, resolve; "
        "names(); aliases(); resolve('kerple_power_ap_'); "
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert run_fresh(code, FOLDER.parents[1]).split() == ["False", "False"]


def test_a_new_file_is_a_new_method(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "megatron_patches" / "positions")
    (tmp_path / "megatron_patches" / "__init__.py").write_text("")
    (tmp_path / "megatron_patches" / "positions" / "new_one.py").write_text(
        "from megatron_patches.positions._base import PositionMethod\n"
        "ALIASES: tuple[str, ...] = ('newer',)\n"
        "class Anything(PositionMethod):\n"
        "    def __init__(self, geometry, *, colour='red', **common):\n"
        "        super().__init__(geometry, **common)\n"
    )
    code = (
        "import sys; from megatron_patches.positions import names, aliases, options, build; "
        "print('new_one' in names(), aliases()['newer'], 'torch' in sys.modules); "
        "m = build('newer', heads=1, head_dim=2, hidden_size=2, colour='blue'); "
        "print(m.name, options('newer')['colour'])"
    )
    assert run_fresh(code, tmp_path).split() == ["True", "new_one", "False", "new_one", "red"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("kerple_lgo", "kerple_log"),
        ("kerple-log", "kerple_log"),
        ("kerple_power_ap", "kerple_power_ap_"),
        ("Alibi", "alibi"),
        ("sinusodal", "sinusoidal"),
        ("roatry", "rotary"),
    ],
)
def test_misspelt_names_are_refused_with_the_nearest(wrong, right):
    with pytest.raises(ValueError, match=rf"{wrong}.*did you mean .*\b{right}\b"):
        build(wrong, **GEOMETRY)


@pytest.mark.parametrize("wrong", ["", "_base", "_kerple", "__init__", "zzz"])
def test_names_of_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="unknown position method"):
        build(wrong, **GEOMETRY)


@pytest.mark.parametrize("name", names())
def test_unknown_options_are_refused(name):
    with pytest.raises(TypeError, match=rf"{name} has no option 'precison'.*mean precision"):
        build(name, **GEOMETRY, precison="exact")


def test_options_belong_to_their_method():
    assert options("rotary")["rotary_pct"] == 1.0
    assert options("kerple_power_ap_")["init"] == "published"
    with pytest.raises(TypeError, match="alibi has no option 'init'"):
        build("alibi", **GEOMETRY, init="alibi")
    with pytest.raises(TypeError, match="kerple_log has no option 'rotary_pct'"):
        build("kerple_log", **GEOMETRY, rotary_pct=1.0)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("kerple_log", {"init": "ones"}, "kerple_log: init='ones'"),
        ("kerple_log", {"precision": "fast"}, "kerple_log has no precision='fast'"),
        ("kerple_log", {"precision": "as_published"}, "needs model_dtype"),
        ("kerple_log", {"model_dtype": "int8"}, "model_dtype='int8'"),
        ("kerple_log", {"model_dtype": torch.int64}, "model_dtype"),
        ("rotary", {"precision": "as_published", "model_dtype": "bfloat16"}, "rotary has no prec"),
        ("sinusoidal", {"precision": "as_published"}, "sinusoidal has no precision"),
        ("learned", {"precision": "as_published"}, "learned has no precision"),
        ("learned", {"init_method_std": -1.0}, "init_method_std"),
        ("learned", {"max_length": None}, "learned needs max_length"),
        ("rotary", {"rotary_pct": 0.0}, "rotary_pct=0.0"),
        ("rotary", {"rotary_pct": 1.5}, "rotary_pct=1.5"),
        ("rotary", {"rotary_pct": 0.4}, "3 dimensions"),
        ("rotary", {"rotary_emb_base": 0}, "rotary_emb_base=0"),
        ("rpe", {"rpe_num_buckets": 7}, "rpe_num_buckets=7"),
        ("rpe", {"rpe_max_distance": 16}, "rpe_max_distance=16"),
        ("sinusoidal", {"hidden_size": 95}, "even hidden_size"),
        ("none", {"heads": 0}, "heads must be at least 1"),
        ("none", {"max_length": 0}, "max_length"),
        ("alibi", {"head_range": (0, 13)}, "within 12 heads"),
        ("alibi", {"head_range": (12, 1)}, "within 12 heads"),
        ("alibi", {"head_range": (0, 0)}, "within 12 heads"),
        ("alibi", {"head_range": (-1, 2)}, "within 12 heads"),
        ("alibi", {"head_range": (0, 1, 2)}, r"head_range must be .*, not \(0, 1, 2\)"),
        ("alibi", {"head_range": 1}, "head_range must be .* two integers, or None, not 1"),
        ("alibi", {"head_range": (0.0, 1.0)}, "head_range must be"),
        ("alibi", {"head_range": (0, True)}, "head_range must be"),
        ("learned", {"max_length": "512"}, "max_length must be an integer .*, not '512'"),
        ("learned", {"max_length": 512.0}, "max_length must be an integer .*, not 512.0"),
        ("learned", {"max_length": True}, "max_length must be an integer"),
        ("kerple_log", {"heads": True}, "heads must be an integer, not True"),
        ("kerple_log", {"seed": True}, "seed must be an integer, not True"),
        ("kerple_log", {"seed": 1 << 70}, "seed must lie in"),
        ("kerple_log", {"seed": -(1 << 63) - 1}, "seed must lie in"),
        ("rotary", {"scaling": ["yarn"]}, r"rotary: scaling=\['yarn'\] is none of"),
    ],
)
def test_impossible_values_are_refused(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        build(name, **(GEOMETRY | wrong))


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("seed", [-(1 << 63), (1 << 64) - 2])
def test_the_outermost_seeds(name, seed):
    assert build(name, **(GEOMETRY | {"seed": seed})).geometry.seed == seed


NAN = float("nan")
INTEGER, NUMBER, TRUTH = "must be an integer", "must be a number", "must be true or false"
FINITE = "must be a finite number"


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("cope", "divide", "false", TRUTH),
        ("cope", "divide", 1, TRUTH),
        ("cope", "positions", 10.5, INTEGER),
        ("cope", "positions", True, INTEGER),
        ("fire", "width", 2.5, INTEGER),
        ("fire", "initial_c", NAN, FINITE),
        ("fire", "initial_c", "0.1", NUMBER),
        ("fire", "initial_length", NAN, FINITE),
        ("fire", "initial_length", 10**400, FINITE),
        ("dape", "width", "wide", INTEGER),
        ("dape", "base", ["alibi"], "is neither"),
        ("fox", "gates", ["data"], "is none of data, learned, fixed"),
        ("fox", "shortest", None, NUMBER),
        ("fox", "longest", float("inf"), FINITE),
        ("cable", "form", 3, "is none of released, weighted, unweighted"),
        ("ggd_bam", "learn_loc", "no", TRUTH),
        ("ggd_bam_ssmax", "scale_prior", "no", TRUTH),
        ("ggd_bam_ssmax", "learn_loc", 0, TRUTH),
        ("stick_breaking", "current", "off", TRUTH),
        ("rotary", "rotary_emb_base", NAN, FINITE),
        ("rotary", "rotary_pct", NAN, FINITE),
        ("randomised_rotary", "rotary_emb_base", "10000", NUMBER),
        ("randomised_rotary", "span", True, INTEGER),
        ("randomised_learned", "span", "16", INTEGER),
        ("randomised_learned", "span", 0, "must be an integer of at least 1"),
        ("randomised_alibi", "draw", -1, "must be an integer of at least 0"),
        ("xpos", "scale_base", NAN, FINITE),
        ("learned", "init_method_std", NAN, FINITE),
        ("randomised_learned", "init_method_std", "0.02", NUMBER),
        ("rpe", "rpe_num_buckets", 32.0, INTEGER),
        ("rpe", "rpe_max_distance", "128", INTEGER),
        ("sandwich", "dimension", 128.0, INTEGER),
        ("sandwich", "first_index", False, INTEGER),
    ],
)
def test_values_of_another_type_are_refused_by_name(name, option, value, message):
    with pytest.raises(ValueError, match=message) as refused:
        build(name, **GEOMETRY, **{option: value})
    assert str(refused.value).startswith(f"{name}: {option}={value!r} ")


def test_the_package_has_no_other_names():
    assert issubclass(PositionMethod, torch.nn.Module)
    assert Geometry(heads=1, head_dim=1, hidden_size=1).owned == (0, 1)
    with pytest.raises(AttributeError, match="Positionmethod"):
        _ = positions.Positionmethod
