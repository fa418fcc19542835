"""Archives that lie, are cut or damaged: refused with nothing left behind."""

from __future__ import annotations

import os
import tarfile
import zipfile

import pytest
from fetch_cases import KINDS, LAYERS, STEP, members, pack, tar_bytes

from megatron_patches.standalone import archive

NAMES = {
    "absolute": "/etc/x",
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
