"""Seeded mistakes in the kernels are caught on the emulator, and by nothing but the mistake.

They are tried in processes of their own, beside the tests of other files. Where CI is set, every third is, from a
place on that the text of the kernels decides: all have their turn as the kernels change.
"""

import os

import pytest
from drawn import rotating

mutations = pytest.importorskip("emulator.mutations")


def begin(request, processes, params):
    """Futures: what is said of every mutation that was asked for, and of the kernels as they are where it is tried."""
    request.getfixturevalue("emulator")
    found, clean = {}, {}
    for mutation in (each["mutation"] for each in params):
        if mutation.clean not in clean:  # which many share
            clean[mutation.clean] = processes.submit(mutations.said_without, mutation.name)
        found[mutation.name] = processes.submit(mutations.said, mutation.name), clean[mutation.clean]
    return found


def test_each_has_a_name_and_a_place_of_its_own(tmp_path):
    names = [mutation.name for mutation in mutations.MUTATIONS]
    assert len(set(names)) == len(names)
    for mutation in mutations.MUTATIONS:
        mutation.overlay(tmp_path)  # raises where the text to be changed is not there once


CHOSEN = rotating(mutations.MUTATIONS) if os.environ.get("CI") else mutations.MUTATIONS


@pytest.mark.parametrize("mutation", CHOSEN, ids=lambda mutation: mutation.name)
def test_mutation_is_caught(emulator, ahead, request, mutation, record_property):
    mutated, clean = (future.result() for future in ahead[request.module][mutation.name])
    record_property("caught by", mutated)
    assert mutated, "nothing noticed"
    assert clean is None, "the kernels as they are do not pass"
