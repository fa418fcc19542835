"""What counts as finished: rows of the same text and the same cut of it, and files of kernels."""

from __future__ import annotations

import json

import numpy as np
import pytest
import studies_tools as tools
from test_studies_follow import finish

from data_prep.indexed import write_indexed
from megatron_patches import positions
from megatron_patches.analysis.retrieval_rows import append_retrieval
from megatron_patches.analysis.rows import append_rows
from megatron_patches.config import ConfigError
from megatron_patches.studies import cost, load_study, make_plan
from megatron_patches.studies.kernels import with_kernels
from megatron_patches.studies.slurm import script


def other_text(folder, part="valid"):
    """The same data set prepared again from other documents."""
    tokens = np.arange(400) % tools.ENTRIES
    sidecar = {"tokenizer": {"fingerprint": "tok-a", "vocab_size": tools.ENTRIES}}
    write_indexed(folder / part, [tokens], vocab_size=60, sidecar=sidecar, overwrite=True)


@pytest.mark.parametrize("protocol", ["nonoverlap", "sliding", "paper", "position"])
def test_rows_of_another_text_are_refused(tmp_path, protocol):
    asked = {"lengths": tools.LENGTHS, "protocols": [protocol], "max_tokens": 129}
    asked |= {"stride": 8} if protocol == "sliding" else {}
    asked |= {"splits": ["valid", "test"]}
    study = tools.write_study(tmp_path, eval=asked)
    plan = make_plan(load_study(study))
    rows = tmp_path / "results" / "rows.jsonl"
    windows = 320 if protocol == "paper" else 1
    stride = {"stride": 8} if protocol == "sliding" else {}
    row = tools.row(plan.runs[0], protocol=protocol, windows=windows, **stride)
    append_rows(rows, [row])
    assert make_plan(load_study(study)).open_cells["alibi-text-1", f"eval {protocol} valid"] == 1

    other_text(tmp_path, "test")  # no row is of the test split
    assert make_plan(load_study(study))
    other_text(tmp_path)
    with pytest.raises(ConfigError) as error:
        make_plan(load_study(study), ["rotary-*"])
    here = tools.text_of(plan.runs[0], protocol)["data"]
    assert here != row.data
    for word in (f"{rows}: text, valid", row.data, f"{tmp_path}/valid is {here}", "--output DIR"):
        assert word in str(error.value)
    # Elsewhere it is a study from scratch, and where there is no text nothing can be compared.
    again = make_plan(load_study(study).with_output(tmp_path / "mine"))
    assert sum(again.open_cells.values()) == 4 * 2 * 2
    assert again.runs[0].evaluations[0].arguments.count(f"{tmp_path}/mine/rows.jsonl") == 1
    (tmp_path / "valid.idx").unlink()
    assert make_plan(load_study(study)).open_cells["alibi-text-1", f"eval {protocol} valid"] == 1


def test_rows_of_another_tokenizer_or_of_other_retrieval_text_are_refused(tmp_path):
    found = {"tasks": ["passkey"], "lengths": [16], "depths": [0.5], "samples": 3}
    study = tools.write_study(tmp_path, eval={"protocols": [], "retrieval": found})
    run = make_plan(load_study(study)).runs[0]
    rows = tmp_path / "results" / "retrieval.jsonl"
    append_retrieval(rows, [tools.retrieved(run, "passkey", "digits")])
    assert make_plan(load_study(study)).open_cells[run.name, "retrieval valid"] == 0
    append_retrieval(rows, [tools.retrieved(run, "passkey", "digits", tokenizer="tok-b")])
    with pytest.raises(ConfigError, match="of tokenizer tok-b, .* of tokenizer tok-a"):
        make_plan(load_study(study))
    rows.unlink()
    append_retrieval(rows, [tools.retrieved(run, "passkey", "digits")])
    other_text(tmp_path)
    with pytest.raises(ConfigError, match="retrieval.jsonl: text, valid was scored there"):
        make_plan(load_study(study))


def test_a_part_of_one_file_is_told_apart_as_an_evaluation_does(tmp_path):
    """With NeoX's `split`; the expected value comes from the engine that writes the rows."""
    from megatron_patches.config import from_mapping
    from megatron_patches.standalone.provenance import data_fingerprint
    from megatron_patches.standalone.texts import Request, open_text
    from megatron_patches.studies.questions import Eval
    from megatron_patches.studies.texts import held_out

    texts = [np.arange(size) % tools.ENTRIES for size in (90, 70, 40, 35, 25, 60, 30, 20, 45, 50)]
    write_indexed(tmp_path / "all", texts, vocab_size=tools.ENTRIES, sidecar={})
    config = from_mapping(
        {**tools.BASE, "data_path": str(tmp_path / "all"), "split": "6,3,1", "seq_length": 16,
         "max_position_embeddings": 16, "train_iters": 4, "pos_emb": "none"}
    )  # fmt: skip
    for protocol, options in {"nonoverlap": {}, "sliding": {"stride": 8}, "paper": {}}.items():
        for split in ("valid", "test"):
            lengths = (16, 32, 4096)  # the last does not fit, so it aligns nothing
            text = open_text(config, Request(lengths, protocol, split, **options), 4, 60)
            ours = held_out(config, split)
            asked = Eval(lengths=list(lengths), protocols=[protocol])
            assert ours.data(asked, protocol) == data_fingerprint(text.datasets, text.cut)
            assert (ours.tokenizer, ours.part) == ("unknown", f"6,3,1|{split}")
            if protocol != "paper":
                assert ours.tokens == len(text.tokens)


# ---- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "value"), [("data", "0" * 16), ("tokenizer", "tok-b")])
def test_models_of_another_training_text_are_refused(tmp_path, key, value):
    study = tools.write_study(tmp_path)
    run = make_plan(load_study(study)).runs[0]
    finish(run)
    assert run.name in make_plan(load_study(study)).trained
    record = run.folder / "run.json"
    told = json.loads(record.read_text())
    record.write_text(json.dumps({**told, key: "unknown"}))
    assert run.name in make_plan(load_study(study)).trained
    record.write_text(json.dumps({**told, key: value}))
    with pytest.raises(ConfigError) as error:
        make_plan(load_study(study))
    words = f"{record}: {run.name} was trained on {key} {value}", f"{tmp_path}/train is {told[key]}"
    for word in (*words, f"remove {run.folder}"):
        assert word in str(error.value)
    # Where the text is not prepared, the model counts as it is.
    (tmp_path / "train.idx").unlink()
    assert run.name in make_plan(load_study(study)).trained


def finished(folder, study, **changes):
    """Rows for all cells of all runs."""
    runs = make_plan(load_study(study)).runs
    for run in runs:
        cell = {"protocol": "nonoverlap", "asked": {"longest": 16}, **changes}
        append_rows(folder / "results" / "rows.jsonl", [tools.row(run, **cell)])
    return runs


def test_kernels_are_a_step_with_the_file_as_proof(tmp_path):
    asked = {"lengths": [16], "max_tokens": 129}
    runs = finished(tmp_path, tools.write_study(tmp_path, eval=asked))
    assert make_plan(load_study(tmp_path / "toy.yml")).unfinished == []
    # Asked for later, or removed: the methods that have a kernel are unfinished again.
    study = tools.write_study(tmp_path, eval={**asked, "kernels": True})
    plan = make_plan(load_study(study))
    assert [run.name for run in plan.unfinished] == ["alibi-text-1", "alibi-text-2"]
    run = plan.runs[0]
    assert [step.title for step in plan.steps(run)] == ["train", "kernels"]
    step = run.evaluations[0]
    file = tmp_path / "results" / "kernels" / "alibi-text-1.jsonl"
    assert step.arguments == (
        *("eval.py", "--checkpoint", f"{tmp_path}/runs/alibi-text-1"),
        *("--only-kernels", str(file)),
    )
    assert "--kernels" not in plan.runs[0].evaluations[1].arguments
    # A training makes the kernels of the one before it worthless.
    assert run.train.fresh == str(file)
    assert f"  rm -f {file}\n  step alibi-text-1 train" in script(plan, cost.Cost(0, 0, (), None))
    file.parent.mkdir()
    file.write_text(json.dumps({"config_sha": run.sha}) + "\n")
    assert [r.name for r in make_plan(load_study(study)).unfinished] == ["alibi-text-2"]
    file.write_text(json.dumps({"config_sha": "another"}) + "\n")
    assert len(make_plan(load_study(study)).unfinished) == 2
    assert len(runs) == 4


def test_a_model_that_is_trained_anew_gets_its_kernels_anew(tmp_path):
    asked = {"lengths": [16, 32], "max_tokens": 129, "kernels": True, "window_widths": [8, "none"]}
    study = tools.write_study(tmp_path, eval=asked)
    plan = make_plan(load_study(study))
    for run in plan.runs:
        file = tmp_path / "results" / "kernels" / f"{run.name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    steps = {run.name: [s.title for s in plan.steps(run)] for run in plan.runs}
    scored = ["eval nonoverlap valid window 8", "eval nonoverlap valid"]
    assert steps["alibi-text-1"] == ["train", "kernels", *scored]
    assert steps["rotary-text-1"] == ["train", *scored]  # it has none


def test_which_methods_have_kernels_is_what_models_say():
    import torch

    at, shape = torch.arange(4), {"heads": 2, "head_dim": 8, "hidden_size": 16, "max_length": 16}
    built = {name: positions.build(name, **shape) for name in positions.names()}
    expected = {
        name
        for name, method in built.items()
        if method.tier == "table" and (method.bias(at) is not None or method.weight(at) is not None)
    }
    assert with_kernels(built) == expected and {"alibi", "kerple_weight"} <= expected < set(built)


def test_rows_of_another_cut_of_the_text_are_refused(tmp_path):
    study = tools.write_study(tmp_path)
    append_rows(
        tmp_path / "results" / "rows.jsonl", [tools.row(make_plan(load_study(study)).runs[0])]
    )
    (tmp_path / "results" / "cut.json").write_text('{"longest": 32, "max_tokens": 500}')
    with pytest.raises(ConfigError, match="with `eval.max_tokens` 500, the study has 129"):
        make_plan(load_study(study))


def test_rows_of_another_stride_or_of_fewer_keys_are_no_answer(tmp_path):
    asked = {"lengths": [16, 32, 200], "protocols": ["last"], "last_k": 4, "max_tokens": 129}
    study = tools.write_study(tmp_path, eval=asked)
    run = make_plan(load_study(study)).runs[0]

    def left(length, stride, **changes):
        # Of 128 targets; 32 is the longest length that they fill.
        windows = (128 - 32) // stride + 1
        cell = {"protocol": "last", "last_k": 4, "eval_length": length, "windows": windows}
        cell |= {"stride": stride, "tokens": 4 * windows, **changes}
        append_rows(tmp_path / "results" / "rows.jsonl", [tools.row(run, **cell)])
        return make_plan(load_study(study)).open_cells[run.name, "eval last valid"]

    assert left(16, 16) == left(16, 24) == left(32, 64) == 3
    assert left(16, 32, options={"attention_eps": 0.01}) == 3
    assert left(16, 32) == 2
    assert left(32, 32) == 1
    assert left(200, 64, status="refused") == 0
