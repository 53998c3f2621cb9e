"""What a wheel and an sdist hold, and what of it should not be so."""

import dataclasses
import email
import email.message
import pathlib
import re
import tarfile
import tomllib
import zipfile

MAX_SDIST_BYTES = 1_000_000
PACKAGES = ("kvcache_jax", "pallas_kernels")
# Beside the packages.
SDIST_FILES = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
WHEEL_FILES = {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE"}


@dataclasses.dataclass(frozen=True)
class Archive:
    """The names of an archive's files, below its own folder, and its metadata."""

    name: str
    files: frozenset[str]
    metadata: email.message.Message
    num_bytes: int


def read_sdist(path: pathlib.Path) -> Archive:
    with tarfile.open(path) as archive:
        names = {each.name: each for each in archive.getmembers() if each.isfile()}
        [top] = {name.split("/")[0] for name in names}
        content = archive.extractfile(names[f"{top}/PKG-INFO"])
        assert content is not None
        metadata = email.message_from_bytes(content.read())
    files = frozenset(name.removeprefix(f"{top}/") for name in names)
    return Archive(path.name, files, metadata, path.stat().st_size)


def read_wheel(path: pathlib.Path) -> Archive:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        [information] = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = email.message_from_bytes(archive.read(f"{information}/METADATA"))
    files = frozenset(name.removeprefix(f"{information}/") for name in names)
    return Archive(path.name, files, metadata, path.stat().st_size)


def source_files(root: pathlib.Path) -> set[str]:
    """Lists the files of a clone that belong into both archives."""
    found = [path for package in PACKAGES for path in (root / package).rglob("*")]
    return {
        path.relative_to(root).as_posix() for path in found if path.suffix == ".py" or path.name == "py.typed"
    }


def faults(wheel: Archive, sdist: Archive, root: pathlib.Path) -> list[str]:
    """Returns a sentence for each fault of the archives that were built from a clone."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    expected = source_files(root)
    found = []
    if sdist.num_bytes >= MAX_SDIST_BYTES:
        found.append(f"{sdist.name} has {sdist.num_bytes:,} bytes, expected less than {MAX_SDIST_BYTES:,}")
    for archive, beside in ((wheel, WHEEL_FILES), (sdist, SDIST_FILES)):
        wanted = expected | beside
        found += [f"{archive.name} lacks {file}" for file in sorted(wanted - archive.files)]
        found += [
            f"{archive.name} has {file}, expected no such file" for file in sorted(archive.files - wanted)
        ]
        metadata = archive.metadata
        needed = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
        said = {
            "dependencies": (sorted(needed), sorted(project["dependencies"])),
            "extras": (
                sorted(metadata.get_all("Provides-Extra", [])),
                sorted(project["optional-dependencies"]),
            ),
            "license": (metadata["License-Expression"], project["license"]),
            "Python": (metadata["Requires-Python"], project["requires-python"]),
            "classifiers": (sorted(metadata.get_all("Classifier", [])), sorted(project["classifiers"])),
            "description": (metadata.get_payload().strip()[:20], (root / "README.md").read_text()[:20]),
        }
        found += [
            f"{archive.name} says of its {what} {got!r}, expected {right!r}"
            for what, (got, right) in said.items()
            if got != right
        ]
    versions = {archive.metadata["Version"] for archive in (wheel, sdist)}
    if len(versions) != 1 or not re.match(r"\d+\.\d+\.\d+", min(versions)):
        found.append(f"the archives have the versions {sorted(versions)}, expected one like 0.1.0")
    return found
