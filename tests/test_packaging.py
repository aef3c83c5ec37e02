"""What is shipped, and what importing it costs."""

import doctest
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

import cuflash

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("cuflash", "kernels", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")

PLACES = "import cuflash, cuflash._variant; print(cuflash.__file__, cuflash._variant.folder())\n"

EIGHT_KEYS = """
import numpy as np
x = np.random.default_rng(0).standard_normal((8, 4))
out = cuflash.forward(x, x, x)
weights = np.exp(x @ x.T / 2)
assert np.allclose(out, weights / weights.sum(1, keepdims=True) @ x)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what is shipped, so that building leaves no trace in the tree."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    if not find_spec("pip") or not (_setuptools() >= (70, 1) or find_spec("wheel")):
        pytest.skip("building a wheel needs pip and setuptools>=70.1: pip install -e '.[test]'")
    source = shutil.copytree(checkout, tmp_path_factory.mktemp("source") / "tree")
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", target]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("*.whl")
    return path


def _setuptools():
    """Version of setuptools, asked without importing it. Before 70.1 it needs ``wheel`` to build one."""
    try:
        return tuple(map(int, version("setuptools").split(".")[:2]))
    except PackageNotFoundError:
        return (0, 0)


def run(code, folder, *flags, **environment):
    """Run ``code`` in a new interpreter that finds ``cuflash`` in ``folder`` first; what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(folder), **{name: str(x) for name, x in environment.items()}}
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_wheel_carries_every_kernel_file(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    kernels = {path.name for path in (ROOT / "kernels").iterdir() if path.suffix in (".cu", ".cuh")}
    assert "forward.cu" in kernels
    assert {f"cuflash/kernels/{name}" for name in kernels} <= set(names)
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cuflash").rglob("*.py")}
    assert modules <= set(names)


def test_wheel_has_no_other_top_level_name(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"cuflash"}


def test_wheel_is_pure_and_small(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 1_000_000


def test_wheel_holds_the_licence(wheel):
    assert any(Path(name).name == "LICENSE" for name in zipfile.ZipFile(wheel).namelist())


def test_no_module_stands_among_the_kernels():
    """A module there would make ``kernels`` a package of its own, which clashes with one on PyPI."""
    assert not list((ROOT / "kernels").rglob("*.py"))


def test_works_from_an_unpacked_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    package = tmp_path / "cuflash"
    assert run(PLACES + EIGHT_KEYS, tmp_path) == f"{package / '__init__.py'} {package / 'kernels'}\n"


def test_works_from_an_uninstalled_checkout(checkout):
    package = checkout / "cuflash"
    assert run(PLACES + EIGHT_KEYS, checkout) == f"{package / '__init__.py'} {checkout / 'kernels'}\n"


def readme(start):
    """README's blocks of Python that begin so."""
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"^```python\n({start}.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_what_the_readme_shows_is_true():
    sessions = readme(">>> ")
    assert sessions
    for number, session in enumerate(sessions):
        test = doctest.DocTestParser().get_doctest(session, {}, f"README {number}", None, 0)
        assert doctest.DocTestRunner().run(test).failed == 0


def test_the_fuzz_that_the_readme_shows_passes_ours_and_catches_a_wrong_scale():
    pytest.importorskip("hypothesis")
    (text,) = readme("from hypothesis ")
    few = text.replace("(deadline=None)", "(max_examples=20, deadline=None, database=None, derandomize=True)")
    assert few != text

    def fuzz(kernel):
        names = {"my_kernel": kernel}
        exec(few, names)
        names["test_my_kernel"]()

    def wrong(q, k, v, *, scale, **keywords):
        return cuflash.forward(q, k, v, scale=1.01 / q.shape[-1] ** 0.5 if scale is None else 1.01 * scale, **keywords)

    fuzz(cuflash.forward)
    with pytest.raises(AssertionError):
        fuzz(wrong)


def test_works_without_cupy(checkout):
    run("import sys; sys.modules['cupy'] = None\nimport cuflash" + EIGHT_KEYS, checkout)


def test_import_loads_nothing_it_does_not_need(checkout):
    code = "import sys, cuflash; print({'cupy', 'hypothesis', 'matplotlib', 'scipy'} & {*sys.modules})"
    assert run(code, checkout).strip() == "set()"


def test_import_prints_nothing_and_writes_nothing(checkout, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    before = sorted(checkout.rglob("*"))
    assert run("import cuflash", checkout, "-B", HOME=home, TMPDIR=home, XDG_CACHE_HOME=home) == ""
    assert sorted(checkout.rglob("*")) == before
    assert not list(home.iterdir())


def test_import_takes_less_than_that_of_numpy(checkout):
    """Its own modules, from byte code; what ml_dtypes takes, 0.05 s or, 0.7.0, 0.4 s, is ml_dtypes'."""
    clock = "; marks.append(time.process_time())"
    code = f"import time; marks = []{clock}; import numpy{clock}; import ml_dtypes{clock}; import cuflash{clock}"
    code += "; print(*marks)"
    run(code, checkout, PYTHONDONTWRITEBYTECODE="")  # writes the byte code
    marks = [[*map(float, run(code, checkout).split())] for _ in range(5)]
    assert min((end - between) / (middle - begin) for begin, middle, between, end in marks) < 1
