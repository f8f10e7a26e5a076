"""What is built and installed: wheel, Debian package, image, and the files of Kubernetes, conda and Apptainer.

Nothing is installed on the machine itself: the packages are in a copy of its file system that is thrown away. There the
steps of the Dockerfile run, too, because few machines that run tests have a container runtime.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING, Any

import jinja2
import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shardfs.model.version import __version__
from tests.alone import alone
from tests.datasets import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.datasets import Dataset

    Get = Callable[[str, str], Dataset]

PACKAGING = ROOT / "scripts/packaging"
LOCK = ROOT / "scripts/lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

IN_A_COPY = """
set -eu
given=$1 script=$2
mount -t tmpfs none "$given/copy"
mkdir "$given/copy/new" "$given/copy/work" "$given/copy/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$given/copy/new,workdir=$given/copy/work" "$given/copy/root"
cd "$given/copy/root"
for name in dev proc sys; do mount --rbind "/$name" "./$name"; done
mkdir -p given && mount --bind "$given" given
export PIP_NO_COMPILE=1
exec chroot . /usr/bin/env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -eux -c "$script"
"""


def run(*command: str | Path, timeout: float = 800) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture
def directory(tmp_path: Path, dataset: Get) -> Path:
    """A directory that is `/given` in the copy: it has a dataset `source`, and a place for the copy."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make a copy of the file system")
    shutil.copytree(dataset("zarr3", "default").path, tmp_path / "source")
    (tmp_path / "copy").mkdir()
    return tmp_path


def in_a_copy(directory: Path, script: str) -> str:
    """Run a script in a copy of this machine's file system."""
    return run(*alone(), "sh", "-c", IN_A_COPY, "sh", directory, script)


USED = """
mkdir /tmp/brain
shardfs mount /given/source /tmp/brain
test "$(find /tmp/brain/c -type f | wc -l)" -gt 1
find /tmp/brain -type f -exec cat {} + >/dev/null
shardfs umount /tmp/brain
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_and_the_sdist_pass_the_checks_of_the_index(tmp_path: Path) -> None:
    out = run("sh", PACKAGING / "build.sh", "wheel", tmp_path)
    assert out.count("PASSED") == 2, out
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"shardfs-{__version__}-py3-none-any.whl", f"shardfs-{__version__}.tar.gz"}


@pytest.mark.slow
@pytest.mark.fuse
@pytest.mark.timeout(900)
def test_the_debian_package_is_built_installed_used_and_removed(directory: Path) -> None:
    if not os.path.exists("/usr/bin/python3"):
        pytest.skip("this machine has no Python of Debian")
    run(
        "env", "extras=fast", "sh", PACKAGING / "build.sh", "deb", directory
    )  # without the large clients of object stores
    script = f"""
dpkg --install /given/shardfs_*.deb
test "$(shardfs --version | tr -cd 0-9.)" = {__version__}
{USED}
mkdir /tmp/again
mount -t shardfs /given/source /tmp/again -o ro
test -e /tmp/again/zarr.json
umount /tmp/again
grep -q 'ExecStart=/opt/shardfs/bin/shardfs mount' /lib/systemd/system/shardfs@.service
man=$(zcat /usr/share/man/man1/shardfs.1.gz | wc -l)
test "$man" -gt 100
! grep -rI debian/shardfs /opt/shardfs/bin /opt/shardfs/pyvenv.cfg /lib/systemd/system/shardfs@.service
dpkg --remove shardfs
test ! -e /opt/shardfs && test ! -e /usr/bin/shardfs && test ! -e /lib/systemd/system/shardfs@.service
"""
    in_a_copy(directory, script)
    assert not os.path.exists("/opt/shardfs")


def steps(dockerfile: str) -> list[tuple[str, str]]:
    """Instruction and argument of each line."""
    lines = (line for line in dockerfile.splitlines() if line and not line.startswith("#"))
    return [(name, arguments) for name, _, arguments in (line.partition(" ") for line in lines)]


@pytest.mark.slow
@pytest.mark.fuse
@pytest.mark.timeout(900)
def test_the_steps_of_the_image_make_a_shardfs_that_mounts(directory: Path) -> None:
    image_steps = steps((PACKAGING / "container/Dockerfile").read_text())
    assert image_steps[:2] == [("ARG", "BASE=debian:12-slim"), ("FROM", "${BASE}")]
    assert ("COPY", ". /src") in image_steps
    (directory / "src").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "shardfs", "docs", "scripts", "systemd"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, directory / "src" / name)
    commands = [
        "cp -r /given/src /src" if name == "COPY" else arguments
        for name, arguments in image_steps
        if name in ("RUN", "COPY")
    ]
    commands = [command.replace("--no-cache-dir ", "") for command in commands]  # the test environment has filled it
    assert image_steps[-1] == ("ENTRYPOINT", '["shardfs-run"]')
    use = "mkdir /tmp/brain; shardfs-run /given/source /tmp/brain sh -c 'ls \"$0\"/c' /tmp/brain"
    in_a_copy(directory, "\n".join(["rm -f /usr/bin/shardfs", *commands, use]))


def extras_of(requirements: list[str]) -> list[Requirement]:
    """The requirements of other packages, those of the project's own extras included."""
    requirements_of_extras = []
    for requirement in map(Requirement, requirements):
        if requirement.name == PROJECT["name"]:
            inner = (PROJECT["optional-dependencies"][extra] for extra in requirement.extras)
            requirements_of_extras += [other for each in inner for other in extras_of(each)]
        else:
            requirements_of_extras.append(requirement)
    return requirements_of_extras


def locked(name: str, python: str) -> dict[str, str]:
    """The version of each package of a lock file that this Python installs. All have hashes."""
    environment = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    text = (LOCK / f"{name}.txt").read_text()
    assert "://" not in text
    versions: dict[str, str] = {}
    pattern = r"(?:#.*\n)*(\w[^\\\n]*) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\\n|\n|$))+)"
    assert re.fullmatch(f"(?:{pattern})+", text)
    for requirement, _ in re.findall(pattern, text):
        package = Requirement(requirement)
        if package.marker is None or package.marker.evaluate(environment):
            assert canonicalize_name(package.name) not in versions
            versions[canonicalize_name(package.name)] = str(package.specifier).removeprefix("==")
    return versions


def requirements_of(name: str) -> list[Requirement]:
    if (LOCK / f"{name}.in").exists():
        lines = (LOCK / f"{name}.in").read_text().splitlines()
        return [Requirement(line) for line in lines if not line.startswith("#")]
    extras = {"image": "s3,gcs,azure,http,fast", "test": "dev"}[name]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    return extras_of([*build, *PROJECT["dependencies"], f"{PROJECT['name']}[{extras}]"])


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["image", "test", "cv", "zarr2", "bcolz"])
@pytest.mark.parametrize("python", ["3.11.2", "3.12.0", "3.13.0", "3.14.0"])
def test_a_lock_file_has_a_version_with_hashes_for_each_requirement(name: str, python: str) -> None:
    versions = locked(name, python)
    environment = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    for needed in requirements_of(name):
        if needed.marker is None or needed.marker.evaluate(environment):
            version = versions.get(canonicalize_name(needed.name), "none")
            assert needed.specifier.contains(version), f"{needed}: locked {version}. Run `sh scripts/lock.sh`."


def test_each_npm_package_of_the_test_environment_has_a_hash() -> None:
    wanted = json.loads((LOCK / "azurite/package.json").read_text())["dependencies"]
    packages = json.loads((LOCK / "azurite/package-lock.json").read_text())["packages"]
    assert packages.pop("")["dependencies"] == wanted, "Run `sh scripts/lock.sh`."
    assert "node_modules/azurite" in packages
    for name, package in packages.items():
        assert package["integrity"].startswith("sha512-"), name
        assert "resolved" not in package, name


def test_apptainer_and_docker_take_the_same_steps() -> None:
    text = (PACKAGING / "container/shardfs.def").read_text()
    (post,) = re.findall(r"^%post\n((?: .*\n)+)", text, re.MULTILINE)
    runs = [arguments for name, arguments in steps((PACKAGING / "container/Dockerfile").read_text()) if name == "RUN"]
    assert [line.strip() for line in post.splitlines()] == runs


def test_the_compose_file_builds_the_image_and_shares_the_mount(tmp_path: Path) -> None:
    path = PACKAGING / "container/compose.yaml"
    services = yaml.safe_load(path.read_text())["services"]
    build = services["shardfs"]["build"]
    context = (path.parent / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).is_file()
    shared = [v for s in services.values() for v in s["volumes"] if isinstance(v, dict)]
    assert {v["source"] for v in shared} == {"/srv/shardfs"}
    assert [v["bind"]["propagation"] for v in shared] == ["shared", "rslave"]
    command = [sys.executable, "-m", *services["shardfs"]["entrypoint"], "/missing", tmp_path]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert "/missing" in completed.stderr, completed


def manifests() -> list[Any]:
    return [m for path in (PACKAGING / "kubernetes").glob("*.yaml") for m in yaml.safe_load_all(path.read_text())]


def test_kubernetes_accepts_the_manifests(tmp_path: Path) -> None:
    by_kind = {m["kind"]: m for m in manifests()}
    assert by_kind.keys() == {"ConfigMap", "DaemonSet", "Pod"}
    for manifest in by_kind.values():
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    pod = by_kind["DaemonSet"]["spec"]["template"]["spec"]
    (daemon,), (reader,) = pod["containers"], by_kind["Pod"]["spec"]["containers"]
    propagation = {v["name"]: v.get("mountPropagation") for v in [*daemon["volumeMounts"], *reader["volumeMounts"]]}
    assert propagation["mounts"] == "Bidirectional"
    assert propagation["shardfs"] == "HostToContainer"
    assert daemon["securityContext"] == {"privileged": True}
    config = tmp_path / "profiles.toml"
    config.write_text(by_kind["ConfigMap"]["data"]["profiles.toml"])
    config.chmod(0o600)
    run(sys.executable, "-m", "shardfs", "config", "check", "--config", config)


def conda_recipe() -> Any:
    text = (PACKAGING / "conda/meta.yaml").read_text()
    return yaml.safe_load(jinja2.Template(text).render(PYTHON="python", python_min="3.11"))


def test_the_conda_recipe_says_what_the_project_says() -> None:
    recipe = conda_recipe()
    assert recipe["package"] == {"name": "shardfs", "version": __version__}
    assert recipe["requirements"]["run"][0] == f"python {PROJECT['requires-python']}"
    requirements = {
        name.replace("python-blosc", "blosc").replace(" ", "") for name in recipe["requirements"]["run"][1:]
    }
    assert requirements == set(PROJECT["dependencies"])
    programs = {f"{name} = {where}" for name, where in PROJECT["scripts"].items()}
    assert set(recipe["build"]["entry_points"]) == programs
    assert recipe["about"]["license"] == PROJECT["license"]


def test_the_citation_has_what_the_format_requires() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["license"])


def test_issue_forms_have_what_the_site_requires() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name == "config.yml":
            assert all(link.keys() == {"name", "url", "about"} for link in form.get("contact_links", []))
            continue
        assert {"name", "description", "body"} <= form.keys()
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids))
        assert all(field["attributes"]["label"] for field in form["body"])
