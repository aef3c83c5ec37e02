"""Seeded mistakes in the kernels are caught on the emulator, and by nothing but the mistake.

They are tried in processes of their own, as many as there are processors. Where CI is set, every third is, from a
place on that the text of the kernels decides: all have their turn as the kernels change.
"""

import os
import zlib

import pytest

from cuflash import _variant

mutations = pytest.importorskip("emulator.mutations")
fuzz = pytest.importorskip("emulator.fuzz")


@pytest.fixture(scope="module")
def results(request, emulator):
    """Futures: what is said of every mutation that was asked for, and of the kernels as they are where it is tried."""
    wanted = [item.callspec.params["mutation"] for item in request.session.items if item.module is request.module]
    with fuzz.pool(os.cpu_count()) as processes:
        found, clean = {}, {}
        for mutation in wanted:
            if mutation.clean not in clean:  # which many share
                clean[mutation.clean] = processes.submit(mutations.said_without, mutation.name)
            found[mutation.name] = processes.submit(mutations.said, mutation.name), clean[mutation.clean]
        yield found


def chosen():
    """The mutations to be tried."""
    if not os.environ.get("CI"):
        return mutations.MUTATIONS
    texts = b"".join(path.read_bytes() for path in sorted(_variant.folder().iterdir()))
    return mutations.MUTATIONS[zlib.crc32(texts) % 3 :: 3]


@pytest.mark.parametrize("mutation", chosen(), ids=lambda mutation: mutation.name)
def test_mutation_is_caught(results, mutation, record_property):
    mutated, clean = (future.result() for future in results[mutation.name])
    record_property("caught by", mutated)
    assert mutated, "nothing noticed"
    assert clean is None, "the kernels as they are do not pass"
