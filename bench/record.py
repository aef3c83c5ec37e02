"""The record: measured figures of one device, one JSON file, ``bench/results/<device>.json``.

A run replaces the rows it measured and leaves the rest, so that parts can be run on different days. Two rows are the
same measurement if they agree in the fields of ``IDENTITY``. Every row carries the hash of the sources it was taken
with and its time.

    python bench/record.py          # prints the path of this machine's record, which now exists
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Case:
    """What one case of the record is about; None where a field does not apply."""

    what: str  # forward | backward | decode
    engine: str
    dtype: str
    head_dim: int
    value_dim: int
    mask: str  # full | causal | window
    queries: int
    length: int  # of the keys
    batch: int
    heads: int
    key_heads: int
    window: tuple | None = None
    kv_format: str | None = None
    precision: str | None = None
    page_size: int | None = None
    splits: int | None = None
    reproducible: bool | None = None
    graph: bool | None = None
    shortest: int | None = None  # of decode: sequences differ in length, log-uniform from so many keys to `length`

    @classmethod
    def of(cls, row):
        """The case of a row, read from JSON."""
        fields = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        return cls(**fields | {"window": row["window"] and tuple(row["window"])})

    @property
    def keywords(self):
        """Keywords of the call."""
        chosen = {"causal": True} if self.mask == "causal" else {}
        chosen |= {"window": self.window} if self.window else {}
        return chosen | ({"precision": self.precision} if self.precision else {})

    @property
    def pairs(self):
        """Visible (row, key) pairs of all heads; L²/2 a head for square causal, which is how attention is counted."""
        queries, keys = self.queries, self.length
        if self.mask == "causal" and queries == keys and self.window is None:
            return self.batch * self.heads * queries * keys / 2
        offset = keys - queries
        left, right = self.window or (None, None)
        if self.mask == "causal":
            right = 0
        seen = 0
        for i in range(queries):
            first = 0 if left is None else min(max(i + offset - left, 0), keys)
            end = keys if right is None else min(max(i + offset + right + 1, 0), keys)
            seen += max(end - first, 0)
        return self.batch * self.heads * seen

    @property
    def flops(self):
        """Floating-point operations of the two (forward, decode) or five (backward) products."""
        head_dim, value_dim = self.head_dim, self.value_dim
        a_pair = 3 * head_dim + 2 * value_dim if self.what == "backward" else head_dim + value_dim
        return 2 * a_pair * self.pairs


# The rest of a case's row.
MEASURED = ("variant", "ms", "spread", "tflops", "gbps", "extra_bytes", "error_over_bound", "contenders", "rival")
IDENTITY = {
    "cases": tuple(Case.__dataclass_fields__),
    "fuzz": ("what", "engine", "dtype"),
    "sanitizer": ("tool", "kernel"),
    "host": ("what", "engine"),
    "claims": ("claim", "library"),
    "science": ("use", "dtype", "points", "library"),
}


def case_row(case, **measured):
    """A row of ``cases`` with every field of the form, and any further ones."""
    return asdict(case) | dict.fromkeys(MEASURED) | measured


def stamped(row):
    """The row with the hash of the sources and the time."""
    return row | {"sources": sources(), "time": datetime.now(timezone.utc).isoformat(timespec="seconds")}


# Sources --------------------------------------------------------------------------------------------------------


def source_files(root=ROOT):
    """Paths below root of the sources: those git tracks or, outside a repository, those that are there."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--", "cuflash", "kernels"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\0")
    except (OSError, subprocess.SubprocessError):
        listed = []
    if not any(listed):
        found = (path for folder in ("cuflash", "kernels") for path in (Path(root) / folder).rglob("*"))
        listed = [path.relative_to(root).as_posix() for path in found if "__pycache__" not in path.parts]
    return sorted(name for name in listed if name.endswith((".py", ".cu", ".cuh")) and (Path(root) / name).is_file())


@cache
def sources(root=ROOT):
    """Sha256 over the source files in order of their paths, each as path, a zero byte, contents."""
    digest = hashlib.sha256()
    for name in source_files(root):
        digest.update(name.encode() + b"\0" + (Path(root) / name).read_bytes())
    return digest.hexdigest()


# Device and versions --------------------------------------------------------------------------------------------


@cache
def device():
    """Name of the GPU; of the processor where there is none."""
    try:
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(0)["name"]
        return name.decode() if isinstance(name, bytes) else name
    except Exception:  # no CuPy, no driver or no device: each has its own exception
        return _processor()


def _processor():
    try:
        found = re.search(r"^model name\s*: *(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def slug(name):
    """File name of a device: ``h200`` for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")


OTHERS = "cupy-", "nvidia-cudnn", "flash-attn", "flashinfer"  # how names of packages begin


@cache
def versions():
    """Versions of what took part, as far as it is installed."""
    found = {"python": platform.python_version(), "processor": _processor(), "cores": os.cpu_count()}
    for dist in metadata.distributions():
        name = (dist.metadata["Name"] or "").lower().replace("_", "-")
        if name in ("numpy", "ml-dtypes", "torch", "triton", "jax") or name.startswith(OTHERS):
            found[name] = dist.version
    try:
        import cupy

        runtime = cupy.cuda.runtime
        found["driver"] = _dotted(runtime.driverGetVersion())
        found["cuda"] = _dotted(runtime.runtimeGetVersion())
        found["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    except Exception:  # as in device()
        pass
    return found


def _dotted(version):
    return f"{version // 1000}.{version % 1000 // 10}"


# The file -------------------------------------------------------------------------------------------------------


def identity(part, row):
    """What makes two rows of a part the same measurement, as JSON text (a tuple and a list are alike there)."""
    return json.dumps([row.get(field) for field in IDENTITY[part]])


def merge(part, rows, measured):
    """Rows of a part with those measured put in the place of the same ones."""
    table = {identity(part, row): row for row in rows}
    table.update({identity(part, row): row for row in measured})
    return list(table.values())


def read(path):
    """The record at path; where there is none, this device's record in the tree; else an empty one."""
    empty = {"device": None, "versions": {}, "tests": None, **{part: [] for part in IDENTITY}}
    for place in (Path(path), RESULTS / Path(path).name):
        if place.is_file():
            return empty | json.loads(place.read_text())
    return empty


def write(path, record):
    """Write a record, one row a line, whole or not at all."""
    lines = []
    for key, value in record.items():
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
        else:
            text = json.dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(draft, path)


def add(path, part, measured):
    """Merge stamped rows into a part of the record at path (``tests``: one row, which replaces the old)."""
    record = read(path)
    record["device"] = device()
    record["versions"] = record["versions"] | versions()
    record[part] = measured if part == "tests" else merge(part, record[part], measured)
    write(path, record)


def path_here():
    """Path of this machine's record: in ``$OUT`` where that is set, else in the tree."""
    return Path(os.environ.get("OUT") or RESULTS) / f"{slug(device())}.json"


if __name__ == "__main__":
    here = path_here()
    write(here, read(here))
    print(here)
    sys.exit(0)
