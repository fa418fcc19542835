"""Released checkpoints: unpacked whole and verified, or refused with nothing left behind."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
import zstandard
from safetensors.torch import load_file

from data_prep.indexed import write_indexed
from megatron_patches.analysis.published import read_published
from megatron_patches.config import config_sha, load_run_config
from megatron_patches.standalone import archive, load_model, released
from megatron_patches.standalone.cli import eval_main

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "goldens" / "fork" / "kerple_log"
MANIFEST = ROOT / "checkpoints" / "manifest.yml"
STEP = "global_step7"
KINDS = ("zip", "tar", "tar.gz", "tgz", "tar.zst", "folder")
LAYERS = [f"layer_{n:02d}-model_00-model_states.pt" for n in (0, 2, 3, 5, 6)]

_spec = importlib.util.spec_from_file_location(
    "fetch_checkpoints", ROOT / "scripts" / "fetch_checkpoints.py"
)
assert _spec is not None and _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
sys.modules["fetch_checkpoints"] = script
_spec.loader.exec_module(script)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A manifest of the golden model under two methods, with text to score it on."""
    text = tmp_path / "text"
    text.mkdir()
    tokens = torch.arange(600).remainder(120).numpy()
    for part in ("train", "valid", "test"):
        write_indexed(text / part, [tokens], vocab_size=128, sidecar={})
    model = {
        "num_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 12,
        "seq_length": 64,
        "max_position_embeddings": 64,
        "no_weight_tying": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "train_iters": 1,
        "dataset": "toy",
        "padded_vocab_size": 128,
        "train_data_paths": [str(text / "train")],
        "valid_data_paths": [str(text / "valid")],
        "test_data_paths": [str(text / "test")],
    }
    (tmp_path / "model.yml").write_text(yaml.safe_dump(model))
    content = yaml.safe_load(MANIFEST.read_text())
    layout = content["layouts"]["162m"]
    layout.update(layers=2, hidden_size=96, dtype="float32")
    layout["files"] = {"embedding": [0], "block": [2, 3], "norm": [5], "output": [6]}
    sides = {768: 96, 2304: 288, 3072: 384, 50304: 128}
    layout["tensors"] = {
        kind: {key: [sides[side] for side in shape] for key, shape in tensors.items()}
        for kind, tensors in layout["tensors"].items()
    }
    entry = content["checkpoints"]["kerple_log-github-released"]
    content["checkpoints"] = {
        method: {
            **entry,
            "method": method,
            "dataset": "toy",
            "configs": [str(tmp_path / "model.yml"), f"configs/method/{method}.yml"],
            "overrides": ["position_precision=as_published"],
            "perplexity": {64: [99.5, None], 128: [98.25, 0.5]},
        }
        for method in ("kerple_log", "kerple_power")
    }
    file = tmp_path / "manifest.yml"
    # The manifest is read without anchors, which safe_dump makes of values that stand twice.
    file.write_text(yaml.safe_dump(json.loads(json.dumps(content))))
    return file


def members(**changes: bytes | None) -> dict[str, bytes]:
    """A release as archives hold it: folders above, bookkeeping beside; None leaves a file out."""
    top = f"KERPLE/runs/{STEP}"
    found = {f"{top}/{file.name}": file.read_bytes() for file in sorted(GOLDEN.glob("layer_*"))}
    found |= {
        "KERPLE/runs/latest": STEP.encode(),
        "KERPLE/README.md": b"hello",
        f"{top}/mp_rank_00_model_states.pt": b"settings",
        f"{top}/zero_pp_rank_0_mp_rank_00_optim_states.pt": b"moments",
        f"{top}/configs/train.yml": b'{"pos-emb": "kerple_log", "seed": 1237}',
    }
    return {name: data for name, data in {**found, **changes}.items() if data is not None}


def tar_bytes(files: dict[str, bytes], *extra: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in extra:
            tar.addfile(info)
    return buffer.getvalue()


def pack(folder: Path, kind: str, files: dict[str, bytes]) -> Path:
    path = folder / f"release.{kind}"
    if kind == "folder":
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
    elif kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
            for name, data in files.items():
                out.writestr(name, data)
    else:
        data = tar_bytes(files)
        if kind in ("tar.gz", "tgz"):
            data = gzip.compress(data, 1)
        path.write_bytes(zstandard.compress(data) if kind == "tar.zst" else data)
    return path


@pytest.fixture
def fetch(manifest, tmp_path, capsys):
    """fetch(archive, *options) -> exit code, stdout, stderr, output folder."""

    def run(path, *options, name="kerple_log", output=tmp_path / "out" / "run"):
        fixed = [name, "--archive", path, "--manifest", manifest, "--output", output]
        code = script.main([str(word) for word in (*fixed, *options)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err, output

    return run


@pytest.fixture
def refused(fetch, tmp_path):
    """refused(archive, pattern, *options): one line of error, and no trace of an output."""

    def check(path, pattern, *options, code=1, **keywords):
        got, _, err, output = fetch(path, *options, **keywords)
        assert got == code, err
        assert pattern in err and err.startswith("error: ") and err.count("\n") == 1, err
        assert not output.parent.exists() or not list(output.parent.iterdir())

    return check


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
    import shlex

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
        "from megatron_patches.standalone import unpack\n"
        "unpack.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
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
    from data_prep.files import locked

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


# ---- archives that lie -----------------------------------------------------------------------

NAMES = {
    "absolute": "/tmp/x",
    "dots": f"a/../../{STEP}/x",
    "drive": "C:/x",
    "backslash": "a\\..\\x",
    "unprintable": "a\x1b[2Jb",
}


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.zst"])
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_names_that_lead_elsewhere(kind, name, refused, tmp_path):
    refused(pack(tmp_path, kind, {**members(), name: b"x"}), "refused, a member is named")


@pytest.mark.parametrize("kind", ["zip", "tar", "folder"])
def test_names_that_differ_in_case_only(kind, refused, tmp_path):
    name = f"KERPLE/runs/{STEP}/LAYER_00-model_00-model_states.pt"
    refused(pack(tmp_path, kind, {**members(), name: b"x"}), "clash")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_name_twice(kind, refused, tmp_path):
    name = f"KERPLE/runs/{STEP}/{LAYERS[0]}"
    if kind == "zip":
        path = pack(tmp_path, "zip", members())
        with zipfile.ZipFile(path, "a") as out, pytest.warns(UserWarning, match="Duplicate"):
            out.writestr(name, b"x")
    else:
        path = tmp_path / "release.tar"
        path.write_bytes(tar_bytes(members(), tarfile.TarInfo(name)))
    refused(path, "is there twice")


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
)
def test_tar_members_that_are_no_files(kind, refused, tmp_path):
    info = tarfile.TarInfo(f"KERPLE/runs/{STEP}/layer_07-model_00-model_states.pt")
    info.type, info.linkname = kind, "/etc/hostname"
    path = tmp_path / "release.tar"
    path.write_bytes(tar_bytes(members(), info))
    refused(path, "plain files and folders only")


def test_a_link_in_a_zip_and_in_a_folder(refused, tmp_path):
    path = pack(tmp_path, "zip", members())
    info = zipfile.ZipInfo("KERPLE/link")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "a") as out:
        out.writestr(info, "/etc")
    refused(path, "is a link")
    folder = pack(tmp_path, "folder", members())
    (folder / "KERPLE" / "link").symlink_to("/etc")
    refused(folder, "is a link")
    (folder / "KERPLE" / "link").unlink()
    os.mkfifo(folder / "KERPLE" / "pipe")
    refused(folder, "device, pipe or socket")


def test_limits(refused, tmp_path, monkeypatch):
    path = pack(tmp_path, "tar.gz", members())
    monkeypatch.setattr(archive, "MAX_MEMBERS", 9)
    refused(path, "more than 9 members")
    monkeypatch.undo()
    monkeypatch.setattr(archive, "MAX_BYTES", 1 << 18)
    for kind in KINDS:
        refused(pack(tmp_path, kind, members()), "expands to more than 0 GiB")


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "tar.zst"])
def test_bombs(kind, refused, tmp_path):
    """20 MB of zeros in a few kB; the golden's incompressible weights are left out."""
    path = pack(tmp_path, kind, {f"{STEP}/{LAYERS[0]}": bytes(20 << 20)})
    assert path.stat().st_size < 1 << 17
    refused(path, "expands to more than 50 times its size")


def test_a_header_that_claims_to_be_huge(refused, tmp_path):
    info = tarfile.TarInfo("long")
    info.type, info.size = tarfile.XHDTYPE, 1 << 30
    path = tmp_path / "release.tar"
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 12))
    refused(path, "a tar header of")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "folder"])
@pytest.mark.parametrize("part", [0.02, 0.5, 0.98])
def test_truncated(kind, part, refused, tmp_path):
    path = pack(tmp_path, kind, members())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    # A zip has its list of members at the end and is no zip without it.
    refused(path, "cut short")


def test_a_tar_cut_between_members(refused, tmp_path):
    """tarfile takes the end of the bytes for the end of the archive."""
    path = pack(tmp_path, "tar", members())
    data = path.read_bytes().rstrip(b"\0")
    whole = -(-len(data) // 512) * 512
    path.write_bytes(data.ljust(whole, b"\0"))
    refused(path, "no end mark")


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_flipped_byte(kind, refused, tmp_path):
    path = pack(tmp_path, kind, members())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF  # in a tar nothing but the weights' own check can tell
    path.write_bytes(data)
    refused(path, "damaged")


def test_other_kinds_of_files(refused, tmp_path):
    path = tmp_path / "release.rar"
    path.write_bytes(b"x")
    refused(path, "it takes .zip")
    refused(tmp_path / "nowhere.zip", "no such file", code=2)
    (tmp_path / "text.zip").write_text("not a zip")
    refused(tmp_path / "text.zip", "damaged or cut short")
    refused(pack(tmp_path, "tar", {"a/b": b"x"}), "no folder global_step<N>")


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
    from megatron_patches.standalone.build import shape_of
    from megatron_patches.standalone.model import GPT

    entries = released.read_manifest(MANIFEST)
    assert len(entries) == 6
    for entry in [e for e in entries.values() if e.dataset == "github"]:
        rows = entry.tensors()["sequential.0.word_embeddings.weight"][0]
        with torch.device("meta"):
            model = GPT(shape_of(entry.config(ROOT), rows))
        assert {key: tuple(t.shape) for key, t in model.state_dict().items()} == entry.tensors()
        assert f"{model.parameter_count() / 1e6:.0f}" == "162"  # as the paper says
