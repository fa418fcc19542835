"""The runs of a study stand together in wandb, unless the study files them otherwise."""

from __future__ import annotations

import studies_tools as tools

from megatron_patches.studies import load_study, make_plan


def groups(folder, **overrides):
    study = tools.write_study(folder, overrides={"train_iters": 4, **overrides})
    plan = make_plan(load_study(study))
    for run in plan.runs:
        named = [word for word in run.train.arguments if word.startswith("wandb_group=")]
        assert named == [f"wandb_group={run.config.wandb_group}"] * bool(run.config.wandb_group)
    return {run.config.wandb_group for run in plan.runs}, {run.sha for run in plan.runs}


def test_the_group_is_the_study(tmp_path):
    found, hashes = groups(tmp_path, use_wandb=True)
    assert found == {"toy"}
    assert groups(tmp_path) == ({None}, hashes)  # no other model: the rows stay valid
    assert groups(tmp_path, use_wandb=True, wandb_group="mine") == ({"mine"}, hashes)
