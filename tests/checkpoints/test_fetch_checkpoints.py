"""Released checkpoints: unpacked whole and verified against the manifest, or refused."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from fetch_cases import GOLDEN, KINDS, LAYERS, MANIFEST, ROOT, STEP, members, pack, script
from safetensors.torch import load_file

from data_prep.files import locked
from megatron_patches.analysis.published import read_published
from megatron_patches.config import config_sha, load_run_config
from megatron_patches.standalone import load_model, released
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.cli import eval_main
from megatron_patches.standalone.model import GPT

# ---- the good path ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_archive_gives_the_same_model(kind, fetch, tmp_path):
    code, out, err, output = fetch(pack(tmp_path, kind, members()))
    assert code == 0, err
    assert sorted(os.listdir(output)) == ["config.yml", STEP, "latest", "source.json"]
    assert sorted(os.listdir(output / STEP)) == ["configs", *LAYERS]
    assert [p.name for p in output.parent.iterdir()] == ["run"]
    golden = load_file(GOLDEN / "logits.safetensors")
    model = load_model(output)
    for length in (64, 256):
        logits = model(golden[f"input_ids_{length}"])
        torch.testing.assert_close(logits, golden[f"logits_{length}"], atol=2e-5, rtol=0)
    assert "left out: KERPLE/README.md" in out and "optim_states.pt" in out
    source = json.loads((output / "source.json").read_text())
    assert len(source["files"]) == 6 and source["step"] == 7
    assert f"sha256 {source['sha256']}" in out or kind == "folder"
    assert load_run_config(output).seed == 1237  # the run's own word


def test_the_command_it_prints_scores_the_model(fetch, tmp_path, monkeypatch, capsys):
    _, out, _, output = fetch(pack(tmp_path, "zip", members()))
    line = next(line for line in out.splitlines() if "eval.py" in line)
    words = shlex.split(line)
    assert words[:2] == ["python", "eval.py"] and words[words.index("--lengths") + 1] == "64"
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    assert eval_main([*words[2:], "--device", "cpu"]) == 0, capsys.readouterr().err
    rows = [
        json.loads(x)
        for x in (tmp_path / "results" / "kerple_log.jsonl").read_text().split("\n")
        if x
    ]
    assert [row["eval_length"] for row in rows] == [64, 128]
    assert rows[0]["method"] == "kerple_log" and rows[0]["status"] == "ok"
    assert rows[0]["config_sha"] == config_sha(load_run_config(output))
    # the expected figures, with a deviation only where one is published
    assert "      64  99.5\n" in out and "     128  98.25 ± 0.5\n" in out


def test_a_flat_archive_and_dotted_names(fetch, tmp_path):
    flat = {f"./{STEP}/{file.name}": file.read_bytes() for file in GOLDEN.glob("layer_*")}
    code, out, err, output = fetch(pack(tmp_path, "tar", flat))
    assert code == 0, err
    assert "seed is not known" in out


def test_one_of_several_steps(fetch, refused, tmp_path):
    files = members()
    files |= {name.replace(STEP, "global_step9"): data for name, data in files.items()}
    path = pack(tmp_path, "zip", files)
    refused(path, "KERPLE/runs/global_step7, KERPLE/runs/global_step9", code=2)
    refused(path, "has no step 8", "--step", "8", code=2)
    code, _, err, output = fetch(path, "--step", "9")
    assert code == 0 and (output / "latest").read_text() == "global_step9", err


def test_two_runs_in_one_archive(refused, tmp_path):
    other = {name.replace("runs", "power"): data for name, data in members().items()}
    path = pack(tmp_path, "tar", {**members(), **other})
    refused(path, "unpack it and give one of the folders", "--step", "7", code=2)


def test_what_a_killed_run_left_is_replaced(manifest, fetch, tmp_path):
    """Killed between unpacking and renaming: only the hidden folder is there, and the next run clears it."""
    path = pack(tmp_path, "tar.gz", members())
    output = tmp_path / "out" / "run"
    code = (
        "import os, runpy, signal, sys\n"
        "from megatron_patches.standalone import whole_folder\n"
        "whole_folder.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"sys.argv = ['x', 'kerple_log', '--archive', {str(path)!r}, '--manifest', {str(manifest)!r},"
        f" '--output', {str(output)!r}]\n"
        "runpy.run_path('scripts/fetch_checkpoints.py', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [p.name for p in output.parent.iterdir()] == [".run.partial"]
    (output.parent / ".run.partial" / STEP / "layer_99-model_00-model_states.pt").write_bytes(b"")
    code, _, err, _ = fetch(path)
    assert code == 0, err
    assert [p.name for p in output.parent.iterdir()] == ["run"]
    assert sorted(os.listdir(output / STEP)) == ["configs", *LAYERS]


def test_a_run_that_is_busy_is_left_alone(fetch, tmp_path):
    busy = tmp_path / "out" / ".run.partial"
    busy.mkdir(parents=True)
    (busy / "half").write_bytes(b"")
    with locked(busy):
        code, _, err, output = fetch(pack(tmp_path, "zip", members()))
    assert code == 1 and "running" in err and not output.exists() and (busy / "half").exists()


def test_an_output_is_never_overwritten(fetch, tmp_path):
    path = pack(tmp_path, "zip", members())
    output = tmp_path / "out" / "run"
    output.mkdir(parents=True)
    code, _, err, _ = fetch(path)
    assert code == 2 and "exists" in err and not list(output.iterdir())
    assert [p.name for p in output.parent.iterdir()] == ["run"]


# ---- the wrong contents ----------------------------------------------------------------------


def test_the_hash(refused, fetch, tmp_path, capsys):
    path = pack(tmp_path, "zip", members())
    refused(path, "another file, or damaged", "--sha256", "0" * 64)
    with pytest.raises(SystemExit, match="2"):
        fetch(path, "--sha256", "abc")
    assert "64 hexadecimal digits" in capsys.readouterr().err
    refused(pack(tmp_path, "folder", members()), "has no sha256", "--sha256", "0" * 64, code=2)
    right = script.sha256_file(path)
    assert fetch(path, "--sha256", right.upper())[0] == 0


def test_missing_and_surplus_layers(refused, tmp_path):
    layer = f"KERPLE/runs/{STEP}/layer_%02d-model_00-model_states.pt"
    refused(pack(tmp_path, "zip", members(**{layer % 3: None})), f"{LAYERS[2]}: missing")
    data = (GOLDEN / LAYERS[2]).read_bytes()
    refused(pack(tmp_path, "zip", members(**{layer % 4: data})), "layer_04-model_00")
    refused(pack(tmp_path, "zip", members(**{layer % 3: data[:-900]})), "damaged")


def changed(layer: int, **tensors: torch.Tensor | None) -> dict[str, bytes]:
    """The member of one block, or of both blocks for 0, with other tensors (None: without)."""
    found = {}
    for number in (2, 3) if layer == 0 else (layer,):
        name = f"layer_{number:02d}-model_00-model_states.pt"
        state = torch.load(GOLDEN / name, weights_only=True)
        state |= {key.replace("__", "."): value for key, value in tensors.items()}
        buffer = io.BytesIO()
        torch.save({key: value for key, value in state.items() if value is not None}, buffer)
        found[f"KERPLE/runs/{STEP}/{name}"] = buffer.getvalue()
    return found


@pytest.mark.parametrize(
    ("layer", "tensors", "message"),
    [
        (0, {"attention__rpe__bias_a": None}, "sequential.2.attention.rpe.bias_a: missing"),
        (3, {"attention__rpe__wei_p": torch.ones(12, 1, 1)}, "wei_p: one too many"),
        (0, {"attention__rpe__bias_p": torch.ones(8, 1, 1)}, "(8, 1, 1)"),
        (0, {"attention__rpe__bias_p": torch.ones(12, 1, 1).bfloat16()}, "bfloat16"),
        (2, {"attention__dense__bias": torch.full((96,), float("nan"))}, "NaN"),
        (2, {"attention__rpe__bias_p": torch.ones(12, 1, 1)}, "differs from"),
    ],
)
def test_tensors_of_another_model(layer, tensors, message, fetch, tmp_path):
    code, _, err, output = fetch(pack(tmp_path, "tar", members(**changed(layer, **tensors))))
    assert code == 1 and message in err, err
    assert not list(output.parent.iterdir())


def test_another_method(refused, fetch, tmp_path):
    """By the configuration that came along; without one, only by an exponent above its limit."""
    refused(pack(tmp_path, "zip", members()), "pos_emb 'kerple_log'", name="kerple_power")
    config = f"KERPLE/runs/{STEP}/configs/train.yml"
    scale = torch.full((12, 1, 1), 0.5)
    scale[:3] = 2.5
    files = members(**{config: None}, **changed(0, attention__rpe__bias_p=scale))
    path = pack(tmp_path, "zip", files)
    refused(path, "3 of them above kerple_power's limit of 2", name="kerple_power")
    # the authors' power files may hold such values as well
    alias = {config: b'"pos-emb": "kerple_power_ap_"\n'}
    code, out, err, output = fetch(
        pack(tmp_path, "tar", {**files, **alias}), "--accept-outside", name="kerple_power"
    )
    assert code == 0 and "3 outside [0.01, 2]" in out, err
    shutil.rmtree(output)
    assert fetch(path)[0] == 0  # and for the logarithm it is a legal scale


def test_values_below_the_limit_are_told(fetch, tmp_path):
    low = torch.full((12, 1, 1), 0.5)
    low[0] = 0.004
    files = members(**changed(0, attention__rpe__bias_a=low))
    code, out, err, _ = fetch(pack(tmp_path, "zip", files))
    assert code == 0 and "bias_a: 0.004 to 0.5 over 12; 1 outside [0.01, inf]" in out, err


def test_code_in_a_file_does_not_run(refused, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    buffer = io.BytesIO()
    torch.save({"word_embeddings.weight": Bomb()}, buffer)
    files = members(**{f"KERPLE/runs/{STEP}/{LAYERS[0]}": buffer.getvalue()})
    refused(pack(tmp_path, "tar.zst", files), "more than weights")
    assert not (tmp_path / "ran").exists()


def test_a_configuration_that_cannot_be_read_is_only_told(fetch, tmp_path):
    files = members(**{f"KERPLE/runs/{STEP}/configs/train.yml": b"{"})
    code, out, err, _ = fetch(pack(tmp_path, "zip", files))
    assert code == 0 and "not compared: global_step7/configs/train.yml" in out, err


# ---- command line and manifest ---------------------------------------------------------------


def test_usage(manifest, tmp_path, capsys):
    for words in (
        [],
        ["kerple_log"],
        ["--archive", "x.zip"],
        ["x", "--archive", "y", "--step", "-1"],
    ):
        with pytest.raises(SystemExit, match="2"):
            script.main(words)
    assert script.main(["nothing", "--archive", str(tmp_path)]) == 2
    assert "it has kerple_log-openwebtext2-released" in capsys.readouterr().err
    assert script.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert out.count("-released ") == 6 and "16384:5.07" in out
    manifest.write_text("where: x\nlayouts: {}\ncheckpoints: {a: {method: kerple_log}}\n")
    assert script.main(["--list", "--manifest", str(manifest)]) == 2
    assert "not a manifest" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(released.read_manifest(MANIFEST)))
def test_entries_of_the_manifest(name):
    entry = released.read_manifest(MANIFEST)[name]
    config = entry.config(ROOT)  # composes, and says the same as the manifest
    assert config.position_precision == "as_published" and config.torch_dtype_name == "bfloat16"
    assert name == f"{entry.method}-{entry.dataset}-released"
    said = entry.entry["published"]
    rows = [
        row
        for row in read_published(ROOT / "results" / "published.csv")
        if (row.paper, row.table, row.model) == (said["paper"], said["table"], said["model"])
        and (row.dataset, row.method) == (entry.dataset, entry.method)
    ]
    assert {row.train_length for row in rows} == {config.seq_length}
    figures = [(f.length, f.perplexity, f.std) for f in entry.figures]
    assert figures == [(row.eval_length, row.value, row.std) for row in rows]
    assert [f.length for f in entry.figures] == [512, 1024, 2048, 4096, 8192, 16384]


def test_the_manifest_lists_the_tensors_of_the_model():
    """Names and shapes against the engine's own model, built without memory."""
    entries = released.read_manifest(MANIFEST)
    assert len(entries) == 6
    for entry in [e for e in entries.values() if e.dataset == "github"]:
        rows = entry.tensors()["sequential.0.word_embeddings.weight"][0]
        with torch.device("meta"):
            model = GPT(shape_of(entry.config(ROOT), rows))
        assert {key: tuple(t.shape) for key, t in model.state_dict().items()} == entry.tensors()
        assert f"{model.parameter_count() / 1e6:.0f}" == "162"  # as the paper says
