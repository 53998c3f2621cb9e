"""What `make dist` refuses of a wheel and an sdist; it runs itself in CI."""

import io
import tarfile
import zipfile

import pytest

from tests.support.sources import ROOT
from tests.wheel.__main__ import PROJECT, TEST_TOOLS, contract_tests, oldest_jax, tools_of_tests
from tests.wheel.archives import SDIST_FILES, WHEEL_FILES, faults, read_sdist, read_wheel, source_files

METADATA = "\n".join(
    [
        "Name: kvcache_jax",
        "Version: 0.1.0",
        f"License-Expression: {PROJECT['license']}",
        f"Requires-Python: {PROJECT['requires-python']}",
        *(f"Classifier: {each}" for each in PROJECT["classifiers"]),
        *(f"Requires-Dist: {each}" for each in PROJECT["dependencies"]),
        *(f"Provides-Extra: {each}" for each in PROJECT["optional-dependencies"]),
        "Requires-Dist: flax; extra == 'models'",
        "",
        (ROOT / "README.md").read_text(),
    ]
)


def built(folder, wheel_files, sdist_files, metadata=METADATA, padding=0):
    """Writes a wheel and an sdist with these files and reads them again."""
    wheel, sdist = folder / "k-0.1.0-py3-none-any.whl", folder / "k-0.1.0.tar.gz"
    information = {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE"}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in wheel_files:
            is_information = name in information
            content = metadata if name == "METADATA" else ""
            archive.writestr(f"k-0.1.0.dist-info/{name}" if is_information else name, content)
    with tarfile.open(sdist, "w:") as archive:
        for name in sdist_files:
            content = (
                metadata.encode() if name == "PKG-INFO" else b"" if name != "README.md" else b"x" * padding
            )
            entry = tarfile.TarInfo(f"k-0.1.0/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return read_wheel(wheel), read_sdist(sdist)


@pytest.fixture
def files():
    sources = source_files(ROOT)
    assert {"kvcache_jax/py.typed", "pallas_kernels/py.typed", "kvcache_jax/__init__.py"} <= sources
    return sources | WHEEL_FILES, sources | SDIST_FILES


def test_archives_of_the_packages_alone_have_no_fault(tmp_path, files):
    assert faults(*built(tmp_path, *files), ROOT) == []


@pytest.mark.parametrize("file", ["kvcache_jax/py.typed", "kvcache_jax/core/init.py", "licenses/LICENSE"])
def test_a_file_that_is_left_out_is_found(tmp_path, files, file):
    wheel, sdist = built(tmp_path, files[0] - {file}, files[1])
    assert faults(wheel, sdist, ROOT) == [f"{wheel.name} lacks {file}"]


@pytest.mark.parametrize("file", ["experiments/results/serve.json", "docs/serve.png", "kvcache_jax/notes.md"])
def test_a_file_that_does_not_belong_there_is_found(tmp_path, files, file):
    wheel, sdist = built(tmp_path, files[0], files[1] | {file})
    assert faults(wheel, sdist, ROOT) == [f"{sdist.name} has {file}, expected no such file"]


def test_a_large_sdist_is_found(tmp_path, files):
    [fault] = faults(*built(tmp_path, *files, padding=1_000_000), ROOT)
    assert "expected less than 1,000,000" in fault


@pytest.mark.parametrize(
    ("right", "wrong", "what"),
    [
        ("Requires-Dist: numpy", "Requires-Dist: numpy\nRequires-Dist: chex", "dependencies"),
        ("Provides-Extra: metrics\n", "", "extras"),
        ("Apache-2.0", "MIT", "license"),
        ("# kvcache_jax", "", "description"),
        ("Classifier: Typing :: Typed\n", "", "classifiers"),
    ],
)
def test_wrong_metadata_is_found(tmp_path, files, right, wrong, what):
    assert right in METADATA
    found = faults(*built(tmp_path, *files, metadata=METADATA.replace(right, wrong, 1)), ROOT)
    assert len(found) == 2 and all(f"says of its {what}" in fault for fault in found)


@pytest.mark.parametrize("version", ["0.1", "unknown"])
def test_a_version_of_no_release_is_found(tmp_path, files, version):
    [fault] = faults(*built(tmp_path, *files, metadata=METADATA.replace("0.1.0", version, 1)), ROOT)
    assert version in fault


def test_archives_of_two_versions_are_found(tmp_path, files):
    wheel, sdist = built(tmp_path, *files)
    sdist.metadata.replace_header("Version", "0.2.0")
    assert faults(wheel, sdist, ROOT) == [
        "the archives have the versions ['0.1.0', '0.2.0'], expected one like 0.1.0"
    ]


def test_the_contract_and_its_tools_are_found():
    assert "tests/operations/test_transforms.py" in contract_tests() and len(contract_tests()) >= 10
    assert not [file for file in contract_tests() if "experiments" in file]
    assert oldest_jax() == "jax==0.11.2"
    assert len(tools_of_tests()) == len(TEST_TOOLS)
