"""Patching the process, and everything as it was afterwards."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from neox_tools import STUB, changed, make_args, neox_modules, state

from megatron_patches.config import ConfigError
from megatron_patches.config.keys_own import Own
from megatron_patches.neox import install, training, uninstall
from megatron_patches.neox.fixes import FIXES
from megatron_patches.neox.install import FIXES_OFF

MODULES = sorted(
    ".".join(file.relative_to(STUB).with_suffix("").parts).removesuffix(".__init__")
    for file in (STUB / "megatron").rglob("*.py")
)


@pytest.fixture
def loaded(clean, monkeypatch):
    """All modules of the stub and of DeepSpeed are imported; nothing was ever patched."""
    import deepspeed.comm.torch
    import deepspeed.launcher.runner
    import deepspeed.ops.adam
    import deepspeed.runtime.pipe.engine  # noqa: F401
    import packaging.version

    with monkeypatch.context() as lent:  # what one of the fixes does
        lent.setitem(sys.modules, "pkg_resources", ModuleType("pkg_resources"))
        sys.modules["pkg_resources"].packaging = packaging
        lent.setattr(sys, "path", [str(STUB), *sys.path])
        for name in MODULES:
            importlib.import_module(name)
    assert set(MODULES) <= set(neox_modules())


@pytest.mark.parametrize("launcher", [True, False])
def test_uninstall_restores_everything(loaded, launcher):
    before = state()
    install(home=STUB, launcher=launcher)
    touched = changed(before, state())
    assert "megatron.neox_arguments.arguments.NeoXArgs.calculate_derived" in touched
    assert "torch.cuda.device_count" in touched
    uninstall()
    assert changed(before, state()) == []
    uninstall()  # nothing to do
    assert changed(before, state()) == []


def test_the_launcher_gets_the_arguments_only(loaded):
    before = state()
    install(home=STUB, launcher=True)
    touched = [name for name in changed(before, state()) if name.startswith("megatron")]
    assert touched and all(name.startswith("megatron.neox_arguments") for name in touched)


def test_a_launcher_imports_no_model(clean):
    install(home=STUB, launcher=True)
    assert "megatron.model.transformer" not in sys.modules
    assert make_args(pos_emb="kerple_log").pos_emb == "kerple_log"


def test_every_module_that_imported_a_name_follows(loaded):
    from megatron import text_generation_utils, utils
    from megatron import training as loop
    from megatron.data import data_utils

    original = utils.get_attn_mask
    install(home=STUB)
    assert utils.get_attn_mask is not original
    assert text_generation_utils.get_attn_mask is utils.get_attn_mask
    assert loop.shift_and_wrap_data_loaders is data_utils.shift_and_wrap_data_loaders
    assert loop.train_step.__doc__ == loop.train_step.__wrapped__.__doc__


def test_a_second_call_returns_the_first_result(clean, monkeypatch):
    first = install(home=STUB)
    count = len(first.patches._undo)
    assert install(home=STUB) is first
    monkeypatch.setenv("NEOX_HOME", str(STUB))
    assert install() is first
    assert len(first.patches._undo) == count


def test_neox_alone_knows_none_of_it(loaded):
    from megatron.neox_arguments import NeoXArgs

    assert make_args(pos_emb="ALiBi").pos_emb == "ALiBi"  # nor does any of its branches
    with pytest.raises(ValueError, match="of another type"):
        make_args(pos_emb="kerple_log")
    with pytest.raises(TypeError, match="position_init"):
        make_args(position_init="alibi")
    with pytest.raises(AssertionError, match="attend"):
        make_args(attention_config=[[["attend"], "all"]])
    theirs = set(NeoXArgs.__dataclass_fields__)
    install(home=STUB)
    assert set(NeoXArgs.__dataclass_fields__) - theirs == set(Own.model_fields)


def test_a_worker_reads_what_the_launcher_wrote(clean):
    changes = {
        "position_init": "alibi",
        "seq_length_val": 24,
        "attention_config": [[["attend"], 2]],
    }
    install(home=STUB, launcher=True)
    made = make_args(pos_emb="kerple_power_ap_", **changes)
    uninstall()
    install(home=STUB)
    again = make_args(**made.to_dict())
    assert again == made and again.position_init == "alibi" and again.pos_emb == "kerple_power"


@pytest.mark.parametrize("other", ["home", "launcher", "fixes"])
def test_a_different_second_call_is_refused(clean, copy, other):
    install(home=STUB)
    changes = {
        "home": {"home": copy},
        "launcher": {"home": STUB, "launcher": True},
        "fixes": {"home": STUB, "fixes_off": ["rpe_cache"]},
    }
    with pytest.raises(ConfigError, match="installed already"):
        install(**changes[other])
    uninstall()
    if other != "home":  # the stub's modules are still imported
        install(**changes[other])


def test_another_package_of_that_name_is_refused(clean, copy):
    install(home=STUB)
    uninstall()
    with pytest.raises(ConfigError, match="another package named megatron"):
        install(home=copy)
    assert str(copy) not in sys.path


def test_an_exception_in_the_middle_undoes_everything(loaded, monkeypatch):
    before = state()

    def fail(patches):
        assert changed(before, state())
        raise ZeroDivisionError("in the middle")

    monkeypatch.setattr(training, "apply", fail)
    with pytest.raises(ZeroDivisionError):
        install(home=STUB)
    assert changed(before, state()) == []
    monkeypatch.undo()
    assert install(home=STUB, launcher=True).launcher


def test_a_key_that_neox_takes_for_itself_stops_the_installation(clean, copy):
    file = copy / "megatron/neox_arguments/neox_args.py"
    file.write_text(
        file.read_text() + "\n\nNeoXArgsTraining.__annotations__['position_init'] = str\n"
        "NeoXArgsTraining.position_init = 'x'\n"
        "NeoXArgsTraining = dataclass(NeoXArgsTraining)\n"
    )
    with pytest.raises(RuntimeError, match="keys of its own named position_init"):
        install(home=copy)


def test_an_unknown_fix(clean):
    with pytest.raises(ConfigError, match="no such fix: speling; there are .*rpe_cache"):
        install(home=STUB, fixes_off=["speling"])
    assert str(STUB) not in sys.path


# What of the stub, or of the process, each fix changes.
TARGETS = {
    "pipeline_evaluation": "megatron.training.forward_step",
    "hidden_update": "deepspeed.initialize",
    "pipeline_clipping": "PipelineEngine.clip_fp32_gradients",
    "evaluation_lengths": "megatron.checkpointing.check_checkpoint_args",
    "fixed_validation": "megatron.data.data_utils.shift_and_wrap_data_loaders",
    "stale_index_maps": "megatron.data.gpt2_dataset._build_index_mappings",
    "alibi_cache": "megatron.model.positional_embeddings.AliBi.forward",
    "cache_between_prompts": "megatron.text_generation_utils.stream_tokens",
    "whole_weights": "megatron.checkpointing.save_ds_checkpoint",
    "sliding_window": "megatron.training.get_batch_sequential",
    "rpe_cache": "megatron.mpu.layers.ParallelRelativePositionBias.forward",
}
# The first is needed to import the stub at all; the others share what they change.
ELSEWHERE = {"pkg_resources", "evaluation_only", "rpe_pipeline", "wandb_ids"}


def test_every_fix_is_looked_at():
    assert TARGETS.keys() | ELSEWHERE == FIXES.keys()


@pytest.mark.parametrize("name", TARGETS)
def test_fixes_off_leaves_exactly_that_one_out(loaded, monkeypatch, name):
    before = state()
    monkeypatch.setenv(FIXES_OFF, name)  # what the launcher hands to its workers
    installed = install(home=STUB)
    assert installed.fixes == FIXES.keys() - {name}
    touched = set(changed(before, state()))
    assert TARGETS[name] not in touched
    assert {TARGETS[other] for other in TARGETS if other != name} <= touched


@pytest.mark.skipif(
    importlib.util.find_spec("pkg_resources") is not None, reason="setuptools still has it"
)
def test_pkg_resources_is_lent_and_taken_back(clean):
    with pytest.raises(ImportError, match="pkg_resources"):
        install(home=STUB, fixes_off=["pkg_resources"])
    for name in neox_modules():
        del sys.modules[name]
    install(home=STUB)
    assert sys.modules["pkg_resources"].packaging.version.Version("1.2").major == 1
    uninstall()
    assert "pkg_resources" not in sys.modules


def test_the_cpu_stands_for_gpus(clean, monkeypatch):
    monkeypatch.setenv("LOCAL_SIZE", "3")
    install(home=STUB)
    from megatron.initialize import initialize_megatron

    assert torch.cuda.device_count() == 3
    assert torch.ones(2).cuda().device.type == "cpu"
    assert torch.cuda.LongTensor([1]).dtype == torch.int64
    initialize_megatron(None)
    state_now = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state_now)
    assert torch.equal(torch.rand(3), first)
    from deepspeed.ops.adam import FusedAdam

    assert isinstance(FusedAdam([torch.nn.Parameter(torch.ones(1))], lr=0.1), torch.optim.AdamW)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_the_cpu_switch_torch_stays_as_it_is(clean, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR")
    count = torch.cuda.device_count
    install(home=STUB)
    assert torch.cuda.device_count is count
    from megatron.initialize import initialize_megatron

    with pytest.raises(AssertionError, match="no GPU"):
        initialize_megatron(None)
