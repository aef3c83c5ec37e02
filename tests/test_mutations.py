"""Seeded mistakes in the kernels are caught on the emulator, and by nothing but the mistake."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

mutations = pytest.importorskip("emulator.mutations")


@pytest.fixture(scope="module")
def overlays(request, emulator, tmp_path_factory):
    """A folder for every mutation asked for, the kernels that it takes compiled beforehand, two at a time."""
    wanted = [item.callspec.params["mutation"] for item in request.session.items if item.module is request.module]
    folders = {m.name: m.overlay(tmp_path_factory.mktemp(m.name)) for m in wanted}

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda mutation: mutation.compile(folders[mutation.name]), wanted))
    return folders


@pytest.fixture(scope="module")
def passes(emulator):
    """Whether the kernels as they are pass what a mutation is tried on, which many mutations share."""
    caught = cache(lambda clean: clean.caught(emulator.HERE))
    return lambda mutation: caught(mutation.clean) is None


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_caught(overlays, passes, mutation, record_property):
    said = mutation.caught(overlays[mutation.name])
    record_property("caught by", said)
    assert said, "nothing noticed"
    assert passes(mutation)
