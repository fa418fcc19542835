"""local_packages: which files it takes, from site-packages made for the test."""

import sysconfig

import pytest
from prepare_tools import run

from data_prep import corpora
from data_prep.corpora import local_packages
from data_prep.corpora._base import Fetched
from data_prep.errors import DataError
from data_prep.reading import Document


@pytest.fixture
def site(tmp_path, monkeypatch):
    """site-packages with 320 modules of 1000 bytes in four packages, and what is to be left out."""
    root = tmp_path / "site"
    names = [f"package{i % 4}/part/m{i}.py" for i in range(320)]
    names += [f"package0/tests/t{i}.py" for i in range(5)] + ["package1/_vendor/v.py"]
    names += ["package2/made_pb2.py", "alone.py"]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n".ljust(999, "x") + "\n")
    (root / "package3" / "latin.py").write_bytes(b"# \xe4\n")
    (root / "package3" / "linked.py").symlink_to(root / "alone.py")
    paths = {**sysconfig.get_paths(), "purelib": str(root)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_: paths)
    library = Fetched([Document("library", "lib.py")], {"python": "3.x"})
    monkeypatch.setattr(local_packages.local_code, "standard_library", lambda scratch: library)
    return root


def test_code_without_tests_copies_generated_files_and_links(site, tmp_path):
    fetched = local_packages.python(tmp_path)
    origins = [document.origin for document in fetched.documents]
    assert len(origins) == len(set(origins)) == 1 + 320 + 1
    assert {"lib.py", "alone.py", "package3/part/m3.py"} <= set(origins)
    left_out = ("tests", "_vendor", "_pb2", "linked", "latin")
    assert not [o for o in origins if any(word in o for word in left_out)]
    assert fetched.provenance["not_utf8"] == 1 and fetched.provenance["python"] == "3.x"
    assert len(fetched.provenance["packages"]["installed"]) == 16


def test_no_package_and_not_all_together_exceed_their_share(site, tmp_path, monkeypatch):
    monkeypatch.setattr(local_packages, "OF_ONE_PACKAGE", 40_000)
    files = local_packages._share(sorted(site.rglob("*.py")), site)
    packages = [path.relative_to(site).parts[0] for path in files]
    assert {packages.count(f"package{i}") for i in range(4)} == {40}
    monkeypatch.setattr(local_packages, "OF_ALL_PACKAGES", 100_000)
    fewer = local_packages._share(sorted(site.rglob("*.py")), site)
    assert len(fewer) == 100 and set(fewer) <= set(files)
    # An even sample of the packages, not the first of them; the same for any order of the listing.
    assert min(p for p in (packages[:100].count(f"package{i}") for i in range(4))) > 10
    assert fewer == local_packages._share(sorted(site.rglob("*.py"), reverse=True), site)


def test_manuals_come_beside_and_their_absence_names_the_alternative(site, tmp_path, monkeypatch):
    def manual(name):
        def source(scratch):
            assert scratch.is_dir()
            counts = {"packages": {name: "sha"}, "not_utf8": 2}
            return Fetched([Document(name, name)], counts)

        return source

    monkeypatch.setattr(local_packages, "science", manual("science.deb"))
    monkeypatch.setattr(local_packages, "recommended", manual("recommended.deb"))
    fetched = local_packages.python_latex(tmp_path)
    assert [d.origin for d in fetched.documents][-2:] == ["science.deb", "recommended.deb"]
    assert set(fetched.provenance["packages"]) == {"installed", "science.deb", "recommended.deb"}
    assert fetched.provenance["not_utf8"] == 1 + 2 + 2

    def absent(scratch):
        raise DataError("apt-get not found")

    monkeypatch.setattr(local_packages, "science", absent)
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="--source python"):
        local_packages.python_latex(tmp_path / "other")


def test_prepared_whole_it_keeps_the_three_splits_apart(site, tmp_path, capsys):
    code, shown, log = run(
        capsys, "local_packages", "--output", tmp_path / "o", "--source", "python",
        "--tokenizer", "byte", "--min-split-tokens", 1000,
    )  # fmt: skip
    assert code == 0, log
    assert "1 not UTF-8" in log and "train" in shown
    assert corpora.get("local_packages").options["min_split_tokens"] == 8 * 131072 + 1
