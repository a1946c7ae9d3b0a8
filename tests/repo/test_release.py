"""The parts of a release: the contents of the sdist, the Pythons that have wheels, the permissions of CI."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / ".github").is_dir():
    pytest.skip("needs the checkout", allow_module_level=True)

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
JOBS = WORKFLOW["jobs"]


def in_sdist():
    """The files that MANIFEST.in takes, as setuptools reads it."""
    from setuptools.command.egg_info import FileList

    found = FileList()
    found.allfiles = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file()]
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        found.process_template_line(line)
    return set(found.files)


def test_sdist_holds_all_that_git_does():
    """Except for what setuptools adds, the unpacked sdist suffices to build, test, lint and document."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout:
        pytest.skip("not a git checkout")
    tracked = {path for path in done.stdout.splitlines() if (ROOT / path).exists()}
    assert tracked - in_sdist() - {"MANIFEST.in", "pyproject.toml", "setup.py"} == set()


def test_sdist_holds_nothing_that_was_built():
    assert {Path(path).suffix for path in in_sdist()} & {".so", ".o", ".a", ".pyc"} == set()
    assert not [path for path in in_sdist() if path.startswith(("build/", "dist/"))]


def pythons():
    """Which ones the classifiers name, "3.11" and so on."""
    pattern = re.compile(r"Programming Language :: Python :: (3\.\d+)")
    return [found[1] for text in PYPROJECT["project"]["classifiers"] if (found := pattern.fullmatch(text))]


def test_there_are_wheels_for_every_python_that_is_promised():
    found = PYPROJECT["tool"]["cibuildwheel"]
    plain = [f"cp{version.replace('.', '')}-*" for version in pythons()]
    assert found["build"] == [*plain, plain[-1].replace("-", "t-")]  # the newest also free-threaded
    assert PYPROJECT["project"]["requires-python"] == f">={pythons()[0]}"
    assert found["test-command"] == "python -m shmring.selftest"
    images = {name: image for name, image in found.items() if name.endswith("-image")}
    assert images == {
        f"{libc}-{machine}-image": tag
        for libc, tag in (("manylinux", "manylinux_2_28"), ("musllinux", "musllinux_1_2"))
        for machine in ("x86_64", "aarch64")
    }


def test_every_python_that_is_promised_is_tested():
    assert JOBS["test"]["strategy"]["matrix"]["python"] == pythons()


def test_ruff_checks_for_the_oldest_python_and_mypy_for_each():
    assert "python_version" not in PYPROJECT["tool"]["mypy"]  # it is checked on each
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{pythons()[0].replace('.', '')}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_job_may_do_more_than_it_has_to(path):
    workflow = yaml.safe_load(path.read_text())
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {}
    asked = {name: job["permissions"] for name, job in jobs.items()}
    assert asked.pop("publish", {"id-token": "write"}) == {"id-token": "write"}
    assert all(permissions == {"contents": "read"} for permissions in asked.values())
    assert all(job["timeout-minutes"] for job in jobs.values())
    for step in [step for job in jobs.values() for step in job["steps"]]:
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
    assert "secrets." not in path.read_text()


def test_actions_are_pinned_by_hash_each_to_one_version():
    uses = [line for path in WORKFLOWS for line in re.findall(r"uses: (.+)", path.read_text())]
    pins = [re.fullmatch(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40}) # v\d+\.\d+\.\d+", line) for line in uses]
    assert all(pins), uses
    assert len({pin[1] for pin in pins}) == len({(pin[1], pin[2]) for pin in pins})


def test_the_tests_that_workflows_name_exist():
    named = {name for path in WORKFLOWS for name in re.findall(r"tests/[\w/.]+", path.read_text())}
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_nightly_run_has_soak_tests():
    """pytest fails if it has nothing to run."""
    nightly = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    parts = nightly["jobs"]["soak"]["strategy"]["matrix"]["tests"]
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.soak" in path.read_text()]
    run = {
        path for part in parts for name in part.split() for path in files if path.is_relative_to(ROOT / name)
    }
    assert run == set(files) - {Path(__file__).resolve()}
    for part in parts:
        assert any(path.is_relative_to(ROOT / name) for name in part.split() for path in files), part


def test_only_a_tag_is_published_and_only_after_everything_else():
    publish = JOBS["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["environment"]["name"] == "pypi"
    assert set(publish["needs"]) == set(JOBS) - {"publish"}
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    commands = [step["run"] for step in publish["steps"] if "run" in step]
    assert commands == ['test -f "dist/shmring-${GITHUB_REF_NAME#v}.tar.gz"']


def test_jobs_pass_on_the_files_that_other_jobs_use():
    uploads, downloads = set(), set()
    for job in JOBS.values():
        for step in job["steps"]:
            action = step.get("uses", "").partition("@")[0]
            if action == "actions/upload-artifact":
                uploads.add(step["with"]["name"])
            elif action == "actions/download-artifact":
                downloads |= {step["with"].get("name"), step["with"].get("pattern")}
    assert uploads == {"dist-sdist", "dist-wheels-${{ matrix.os }}"}
    assert downloads - {None} == {"dist-sdist", "dist-*"}


@pytest.mark.parametrize(
    "name",
    [
        *(".pre-commit-config.yaml", ".clang-format", ".readthedocs.yaml", "CITATION.cff"),
        *(
            ".github/dependabot.yml",
            *(f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "slow", "feature")),
        ),
    ],
)
def test_settings_of_tools_can_be_read(name):
    assert yaml.safe_load((ROOT / name).read_text())


def test_a_lint_tool_has_one_version():
    """The hook and `pip install '.[dev,test]'` use the same version."""
    packaging = pytest.importorskip("packaging.requirements")
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = {found.name: found for found in map(packaging.Requirement, extras["dev"] + extras["test"])}
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    for hook in hooks:
        tool, *others = hook["additional_dependencies"]
        name, _, version = tool.partition("==")
        assert version, f"{tool} is not one version"
        assert name not in wanted or str(wanted[name].specifier) == f"=={version}", tool
        for pin in others:  # the packages for type checks
            name, _, version = pin.partition("==")
            assert version, f"{pin} is not one version"
            assert name == "numpy" or wanted[name].specifier.contains(version), pin


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] in (ROOT / "shmring" / "__init__.py").read_text().split('__version__ = "')[1]
    assert citation["license"] == PYPROJECT["project"]["license"]


def test_files_whose_layout_is_left_alone_are_there():
    for line in (ROOT / ".clang-format-ignore").read_text().splitlines():
        assert line.startswith("#") or list(ROOT.glob(line)), line
