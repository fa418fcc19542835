"""The bare training step against the standalone engine: the same batches, losses, norms and weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import quarter_tools as tools
import torch

from data_prep.indexed import IndexedDataset
from megatron_patches.quarter.batches import Batches
from megatron_patches.quarter.plan import read_plan
from megatron_patches.quarter.train import train as train_bare
from megatron_patches.quarter.training import Trainer
from megatron_patches.standalone.data import build_samples
from megatron_patches.standalone.scoring import score
from megatron_patches.standalone.train import train
from megatron_patches.standalone.windows import Plan
from megatron_patches.studies import load_study, make_plan

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
]
CPU = torch.device("cpu")


def pair(study, tmp_path, method):
    """(log and weights of DeepSpeed's engine, log and model of the bare loop) of one run of a study."""
    data = tools.prepared(study, tmp_path / "data")
    plan = read_plan(data)
    run = next(r for r in plan.runs if r.training.pos_emb == method)
    config = next(r.config for r in make_plan(load_study(study)).runs if r.name == run.name)
    config = config.model_copy(update={"save": str(tmp_path / "engine"), "log_interval": 1})
    folder = train(config)
    theirs = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    stored = torch.load(
        folder / f"global_step{config.train_iters}" / "mp_rank_00_model_states.pt",
        weights_only=False,
    )["module"]
    ours: list = []
    training = run.training.__class__(**{**vars(run.training), "log_interval": 1})
    run = run.__class__(**{**vars(run), "training": training})
    steps = config.train_iters
    trained = train_bare(
        run,
        Batches(IndexedDataset(data / "train"), run.training, steps, CPU),
        steps,
        micro=training.batch,
        attention="chunked",
        device=CPU,
        now=lambda: 0.0,
        end=1.0,
        log=ours.append,
    )
    return theirs, stored, ours, trained.model


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1024")


@pytest.mark.parametrize("method", tools.METHODS)
def test_training_equals_the_engine(method, study, tmp_path):
    theirs, stored, ours, model = pair(study, tmp_path, method)
    assert len(theirs) == len(ours) == 30
    for a, b in zip(theirs, ours, strict=True):
        assert a.keys() == b.keys()
        assert a["consumed_sha"] == b["consumed_sha"] and a["tokens"] == b["tokens"]
        assert a["learning_rate"] == b["learning_rate"]
        assert a["lm_loss"] == pytest.approx(b["lm_loss"], rel=1e-5)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-3)
    assert ours[-1]["lm_loss"] < 0.7 * ours[0]["lm_loss"]
    found = model.state_dict()
    assert set(found) == {key for key, value in stored.items() if value is not None}
    for key, value in found.items():
        assert torch.allclose(value, stored[key], rtol=1e-3, atol=2e-4), key


def test_bfloat16_stays_near_the_engine(tmp_path):
    """Both keep float32 copies of bfloat16 weights; the sums of gradients round differently."""
    study = tools.write_study(tmp_path, methods=("kerple_log",), precision="bfloat16")
    theirs, _, ours, model = pair(study, tmp_path, "kerple_log")
    losses = np.array([[a["lm_loss"], b["lm_loss"]] for a, b in zip(theirs, ours, strict=True)])
    assert np.abs(losses[:, 0] - losses[:, 1]).max() < 0.02 * losses.max()
    assert losses[-1, 1] < 0.7 * losses[0, 1]
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert {dtypes[n] for n in dtypes if "bias_p" in n or "bias_a" in n} == {torch.float32}
    assert dtypes["sequential.0.word_embeddings.weight"] == torch.bfloat16


def test_float32_copies_keep_what_bfloat16_would_lose(plan, data):
    """Updates far below bfloat16's resolution must add up."""
    run = plan.runs[1]
    run = run.__class__(**{**vars(run), "training": run.training.__class__(
        **{**vars(run.training), "precision": "bfloat16"})})  # fmt: skip
    trainer = Trainer(run, CPU, "chunked")
    masters = [master.detach() for master in trainer.masters]
    before = [master.clone() for master in masters]
    rows = Batches(IndexedDataset(data / "train"), run.training, 4, CPU).rows(0)
    for _ in range(4):
        trainer.step(rows, 1e-6, run.training.batch)
    moved = max(float((a - b).abs().max()) for a, b in zip(before, masters, strict=True))
    assert 2e-6 < moved < 1e-5
    for weight, master in zip(trainer._weights, trainer._copies, strict=True):
        assert torch.equal(weight, master.to(torch.bfloat16))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_small_micro_batches_give_the_same_update(precision, plan, data):
    run = plan.runs[0]
    run = run.__class__(**{**vars(run), "training": run.training.__class__(
        **{**vars(run.training), "precision": precision})})  # fmt: skip
    rows = Batches(IndexedDataset(data / "train"), run.training, 4, CPU).rows(1)
    results = []
    for micro in (8, 3):
        trainer = Trainer(run, CPU, "chunked")
        loss, norm = trainer.step(rows, 1e-2, micro)
        results.append((float(loss), float(norm), [m.grad for m in trainer.masters]))
    (loss_a, norm_a, grads_a), (loss_b, norm_b, grads_b) = results
    tolerance = 1e-5 if precision == "float32" else 2e-2
    assert loss_a == pytest.approx(loss_b, rel=tolerance)
    assert norm_a == pytest.approx(norm_b, rel=tolerance)
    scale = max(float(g.abs().max()) for g in grads_a)
    for a, b in zip(grads_a, grads_b, strict=True):
        assert float((a - b).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("steps", [1, 7, 90])
def test_batches_are_the_engines_samples(steps, study, data, plan):
    """The text on the device, cut by one gather, against the engine's own samples: several passes too."""
    run = plan.runs[0]
    config = make_plan(load_study(study)).runs[0].config
    samples = build_samples(config, "train", 32, steps * 8)
    batches = Batches(IndexedDataset(data / "train"), run.training, steps, CPU)
    for step in range(steps):
        wanted = np.stack([samples[i] for i in range(step * 8, step * 8 + 8)])
        assert np.array_equal(batches.rows(step).numpy(), wanted)
    if steps == 90:
        assert batches.passes > 3


def test_rows_equal_those_of_eval_py(study, data, tmp_path):
    """Weights of the engine, scored by both: the same loss, text fingerprint and options."""
    from megatron_patches.quarter.evaluation import HeldOut
    from megatron_patches.quarter.results import Results
    from megatron_patches.standalone.evaluate import Evaluation
    from megatron_patches.standalone.fingerprints import data_fingerprint
    from megatron_patches.standalone.texts import Request

    plan = read_plan(data)
    config = make_plan(load_study(study)).runs[0].config
    config = config.model_copy(update={"save": str(tmp_path / "engine"), "train_iters": 5})
    folder = train(config)
    asked = Request(lengths=(32, 64, 128), protocol="position", max_tokens=1025)
    evaluation = Evaluation(folder, asked)
    valid = IndexedDataset(data / "valid")
    text = HeldOut.of(valid.tokens, plan.evaluation)
    common = {"data": data_fingerprint([valid], text.cut(plan)), "git_sha": "x"}
    results = Results(tmp_path / "out", plan, common)
    for length in (32, 128):
        theirs = evaluation.row(length)
        windows = Plan("position", 1025, (32, 64, 128)).windows(length)
        ours = score(evaluation.model, text.tokens, windows, by_position=True)
        assert text.windows.windows(length) == windows
        row = results._row(plan.runs[0], "position", length, {
            "loss": ours.loss, "perplexity": float(np.exp(ours.loss)), "bits_per_byte": None,
            "tokens": ours.tokens, "windows": len(windows), "window_losses": ours.windows,
            "position_losses": ours.positions, "seconds": 0.0,
        })  # fmt: skip
        assert theirs.loss == pytest.approx(row.loss, rel=1e-6)
        for key in ("data", "tokenizer", "options", "stride", "windows", "tokens", "parameters"):
            assert getattr(theirs, key) == getattr(row, key), key
        for key in ("method", "dataset", "seed", "train_length", "split", "documents_isolated"):
            assert getattr(theirs, key) == getattr(row, key), key
