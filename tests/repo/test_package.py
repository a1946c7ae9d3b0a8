"""The installed package: version, types, the cost of importing it."""

import ast
import email
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import shmring

PACKAGE = Path(shmring.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
EXTENSIONS = sorted(  # "_core.kernels"
    path.relative_to(PACKAGE).as_posix().partition(".")[0].replace("/", ".") for path in PACKAGE.rglob("*.so")
)
# Heavy or unneeded before the first rank is started.
LATE = {
    "argparse",
    "asyncio",
    "cloudpickle",
    "concurrent",
    "email",
    "hmac",
    "logging",
    "multiprocessing",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "torch",
    "tqdm",
}


def test_version_is_the_distributions():
    try:
        installed = importlib.metadata.version("shmring")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed: imported from the checkout")
    assert shmring.__version__ == installed


def test_version_is_written_once():
    files = [ROOT / "pyproject.toml", ROOT / "setup.py", *PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyx")]
    places = [path.name for path in files if path.exists() and f'"{shmring.__version__}"' in path.read_text()]
    assert places == ["__init__.py"]


def test_is_marked_as_typed():
    assert (PACKAGE / "py.typed").exists()


def test_every_public_name_is_there():
    for name in shmring.__all__:
        assert getattr(shmring, name) is not None
    assert set(shmring.__all__) <= set(dir(shmring))
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (for_type_checkers,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.asname for node in for_type_checkers.body for alias in node.names}
    assert typed - {"model"} == set(shmring.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = shmring.no_such_name


def defined_names(body):
    """Names that a stub's body defines or imports under a public name."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def own_names(module):
    """Return the public functions and classes that the extension itself defines, without imported ones."""
    for name, value in vars(module).items():
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__:
            yield name


def public(names):
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_stub_names_what_the_extension_exports(name):
    module = importlib.import_module(f"shmring.{name}")
    path = PACKAGE / f"{name.replace('.', '/')}.pyi"
    if not path.exists():
        assert not set(own_names(module)), "has a face for Python and no stub"
        return
    stub = ast.parse(path.read_text())
    stubbed = public(defined_names(stub.body))
    assert stubbed <= set(vars(module)), "in the stub only"
    assert set(own_names(module)) <= stubbed, "missing in the stub"
    for node in stub.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            members = vars(getattr(module, node.name))
            assert public(defined_names(node.body)) == public(members), node.name


@pytest.mark.parametrize("name", EXTENSIONS)
def test_every_public_callable_has_a_docstring(name):
    module = importlib.import_module(f"shmring.{name}")
    for attribute in own_names(module):
        assert getattr(module, attribute).__doc__, attribute


def modules_after(statements):
    code = f"import sys; {statements}; print(' '.join(sys.modules))"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


def test_import_brings_in_nothing_that_is_not_needed_yet():
    brought = modules_after("import numpy, shmring") - modules_after("import numpy")
    assert not {name for name in brought if name.partition(".")[0] in LATE}


def unbuilt(tmp_path):
    """A copy of the sources as a checkout has them."""
    shutil.copytree(PACKAGE, tmp_path / "shmring", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "setup.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", "import shmring; shmring.spawn"),
        ("-c", "from shmring.methods import sharded"),
        ("-m", "shmring", "info"),
        ("-m", "shmring.run", "-n", "2", "script.py"),
        ("-m", "shmring.selftest"),
    ],
)
def test_a_source_tree_that_is_not_built_says_so(tmp_path, arguments):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=unbuilt(tmp_path), capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1
    text = done.stderr.splitlines()[-1]
    assert text.startswith(f"ImportError: shmring was imported from its source tree, {tmp_path}, in which")
    assert "pip install -e ." in text


def test_a_package_of_another_python_says_so(tmp_path):
    (unbuilt(tmp_path) / "setup.py").unlink()
    command = [sys.executable, "-c", "import shmring"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert "ImportError: the compiled modules of shmring are missing in" in done.stderr


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the checkout")
@pytest.mark.parametrize("part", ["build_clib", "build_ext"])  # the first of a wheel's, and of pip install -e
def test_without_a_compiler_one_line_says_what_to_install(tmp_path, part):
    command = [sys.executable, "setup.py", "-q", part, "--build-temp", tmp_path]
    environment = {**os.environ, "CC": "no-such-compiler -pipe"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert done.stderr.startswith("shmring is compiled here, and there is no C compiler 'no-such-compiler'")
    assert "apt install gcc" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the checkout")
def test_the_long_description_has_no_link_into_the_checkout(tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, timeout=50)
    metadata = email.message_from_bytes((tmp_path / "shmring.egg-info/PKG-INFO").read_bytes())
    assert metadata["Author"] == "The authors of shmring"
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert "all_reduce" in text
    assert re.findall(r"\]\((?!https?://|mailto:|#)", text) == []


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the checkout")
def test_an_editable_installation_reads_the_variable_for_mpi4py(tmp_path):
    """As an ordinary one does, it has the .pth file that Python reads when it starts."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "shmring_mpi4py.pth"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "shmring").mkdir()
    shutil.copy(PACKAGE / "__init__.py", tmp_path / "shmring")
    for source in ("kernels/kernels.c", "channel.c", "conn.c"):  # nothing to compile
        (tmp_path / "src" / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / source).touch()
    code = "import setuptools.build_meta as backend; backend.build_editable('wheels')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    found = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("shmring_mpi4py.pth")]
    assert len(found) == 1
    assert found[0].endswith("site-packages/shmring_mpi4py.pth")


def test_readme_has_the_two_commands_that_the_gate_runs():
    text = (ROOT / "README.md").read_text()
    commands = dict(re.findall(r"<!-- command (\d) -->\n```sh\n(.+)\n```", text))
    assert commands == {
        "1": "pip install '.[examples]' && shmrun -n 2 examples/train_digits.py",
        "2": "pip install -e '.[test]' && pytest",
    }
