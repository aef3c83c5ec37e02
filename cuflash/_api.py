"""The public functions. Their docstrings are the manual; their work is in ``_launch``."""

from . import _launch


def forward(
    q, k, v, *, lengths=None, page_table=None, scale=None, causal=False, window=None, precision=None, return_lse=False,
    out=None, engine=None,
):  # fmt: skip
    """Exact attention, ``softmax(scale * q @ k.mT) @ v``, without storing the scores.

    Parameters
    ----------
    q : array, shape (..., heads, queries, head_dim)
        CuPy or NumPy array of float16, bfloat16 (``ml_dtypes``), float32 or float64, with any strides. Leading axes
        broadcast as in ``matmul``; a missing head axis is one head, so ``(queries, head_dim)`` will do. An array
        ``x`` of shape (batch, length, heads, head_dim) is passed as ``x.swapaxes(-3, -2)`` at no cost.
    k : array, shape (..., key_heads, keys, head_dim)
        Of q's dtype. ``key_heads`` divides ``heads``; query head h reads key head ``h // (heads // key_heads)``.
    v : array, shape (..., key_heads, keys, value_dim)
        Of q's dtype.
    lengths : array of int, shape (sequences,), optional
        For rows whose keys lie in a cache, the last of which are their own: q has shape (sequences, heads, queries,
        head_dim), k and v are ``k_cache`` and ``v_cache`` of `decode`, of shape (sequences, key_heads, capacity, dim),
        and the keys of each sequence are so many; what the cache holds beyond is not read. Arrays on a GPU are not
        read by the host, and lengths outside 0 to the capacity are taken for the nearer of these. On a GPU for float16
        and bfloat16.
    page_table : array of int, shape (sequences, most pages), optional
        With ``lengths``, for k and v of shape (pages, key_heads, page_size, dim). Page n of a sequence holds its keys
        from ``n * page_size``. Entries past a length are not looked at. On a GPU a page that does not exist is not
        read: rows that see one of its keys are NaN, and others of their sequence may be.
    scale : float, optional
        Factor on the products; any finite number, one beyond half the largest float32 (for float64 arrays, float64)
        counts as that. Default ``1 / sqrt(head_dim)``.
    causal : bool or {"bottom-right", "top-left"}, default False
        With ``offset = keys - queries`` (True, "bottom-right") or 0 ("top-left"), row i sees keys ``j <= i + offset``;
        keys are those of the row's own sequence. For 2 queries and 4 keys::

            True, "bottom-right"      "top-left"
            1 1 1 0                   1 0 0 0
            1 1 1 1                   1 1 0 0
    window : (left, right), optional
        Row i sees keys ``i + offset - left <= j <= i + offset + right`` only, both ends included; None is unlimited.
        ``causal`` then cuts ``right`` down to 0. The offset is bottom-right's unless ``causal="top-left"``.
    precision : {None, "tf32"}, optional
        For float32 alone: "tf32" where products need be no truer than one of TF32, within 2^-10. On Hopper they are
        made of two bfloat16 for each number then, within 2^-15, which is twice as fast; elsewhere as by default, of
        three, within 2^-24. NumPy's are float32's always.
    return_lse : bool, default False
        Return also the natural logarithm of the sum of exponentials.
    out : array, optional
        Array for the result, exactly of its shape and dtype, with any strides, sharing no element with an input.
    engine : {None, "numpy", "portable", "sm90"}, optional
        The engine to run on. None chooses; `explain` tells what and why.

    Returns
    -------
    out : array, shape (..., heads, queries, value_dim)
        Of q's library, dtype and order of axes. A row that sees no key is 0.
    lse : array, shape (..., heads, queries), float32 (float64 for float64)
        Only with ``return_lse``: ``log(sum(exp(scale * q @ k.mT)))`` over the keys a row sees; -inf where it sees none.

    Raises
    ------
    TypeError
        For dtypes that are not supported or not alike, mixed libraries, and what is not an array.
    ValueError
        For shapes that do not fit, keywords outside their range, and an ``out`` that cannot be written; for NumPy
        arrays also for lengths beyond the cache and pages that do not exist.
    NotImplementedError
        For CuPy arrays of float32 and float64 with ``lengths``.
    CompileError
        Where a kernel does not compile.

    Notes
    -----
    Runs on the current stream of the arrays' device and does not wait for it. The same inputs on the same GPU give the
    same bits, whatever else is in the batch, wherever pages lie and however much a cache has room for. Keys that a row
    does not see may hold anything, NaN too. What `decode` says of caches that are copied and of graphs holds here too.
    The error is inside the bound of `cuflash.bounds`. The method is FlashAttention-2 [1]_ on the online softmax [2]_.
    On Hopper float32 whose larger head dim is 33 to 128 takes 6 bytes a number of q, k and v besides (4 for "tf32"),
    columns padded to 64 or 128, for each batch member also of an input that broadcasting stretches.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.
    .. [2] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.eye(3, dtype=np.float32)
    >>> cuflash.forward(q, k, v, scale=0, causal=True).round(3)
    array([[1.   , 0.   , 0.   ],
           [0.5  , 0.5  , 0.   ],
           [0.333, 0.333, 0.333]], dtype=float32)

    The last two rows of a sequence of three, whose keys lie in two pages of two.

    >>> pages, table = np.arange(16, dtype=np.float32).reshape(4, 1, 2, 2), np.array([[3, 1]])
    >>> rows = np.zeros((1, 1, 2, 2), np.float32)
    >>> cuflash.forward(rows, pages, pages, lengths=np.array([3]), page_table=table, causal=True)
    array([[[[13., 14.],
             [10., 11.]]]], dtype=float32)

    Kernel regression: with ``-t**2 / 2`` as one more column of the keys, weights are those of the Gaussian
    ``exp(-(x - t)**2 / 2 / width**2)``.

    >>> x, t, y, width = np.array([[1.5]]), np.array([[1.0], [2.0], [9.0]]), np.array([[10.0], [20.0], [90.0]]), 0.5
    >>> cuflash.forward(np.hstack([x, [[1]]]), np.hstack([t, -(t**2) / 2]), y, scale=width**-2)
    array([[15.]])
    """
    return _launch.forward(q, k, v, lengths, page_table, scale, causal, window, precision, return_lse, out, engine)


def backward(
    dout, q, k, v, out, lse, *, scale=None, causal=False, window=None, dlse=None, grads=None, engine=None
):  # fmt: skip
    """Gradients of `forward`.

    With ``P = exp(scale * q @ k.mT - lse)`` and ``dS = P * (dout @ v.mT - sum(dout * out, -1) + dlse)``::

        dv = P.mT @ dout      dq = scale * dS @ k      dk = scale * dS.mT @ q

    P is made again from q, k and lse, tile by tile, and never stored [1]_.

    Parameters
    ----------
    dout : array, shape (..., heads, queries, value_dim)
        Gradient of out, of its dtype, with any strides.
    q, k, v : arrays
        The inputs of `forward`.
    out, lse : arrays
        What `forward` returned for them with ``return_lse=True``, under the same keywords.
    scale, causal, window, engine
        As in `forward`.
    dlse : array, shape (..., heads, queries), optional
        Gradient of lse, of its dtype. For losses on lse, such as a z-loss.
    grads : (dq, dk, dv), optional
        Arrays for the results, exactly of the shapes and dtypes of q, k and v, with any strides, sharing no element
        with an input or with one another. Slots of a packed array will do.

    Returns
    -------
    dq, dk, dv : arrays
        Of the shape, dtype and order of axes of q, k and v. Axes that broadcasting stretched, and the query heads of a
        group, are summed. Rows that see no key, and keys no row sees, have gradient 0.

    Raises
    ------
    TypeError, ValueError
        As in `forward`.
    CompileError
        Where a kernel does not compile.

    Notes
    -----
    Sums have a fixed order, that of dq too, to which many blocks of a GPU add: each waits for its turn, which has
    nearly always come [2]_. So the same inputs on the same GPU give the same bits, whatever else is in the batch.
    On a GPU the call takes, beyond its results, arrays of lse's dtype of the size of dq and of two numbers a row; for
    each gradient of an input that broadcasting stretched, one of the stretched size; and copies of operands that
    kernels cannot address, such as a dout of stride 0 from a sum. The error is inside the bound of `cuflash.bounds`.

    See Also
    --------
    vjp : forward, with this for what comes back.

    References
    ----------
    .. [1] T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022.
    .. [2] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.eye(2, dtype=np.float32)
    >>> out, lse = cuflash.forward(q, k, v, scale=0, return_lse=True)
    >>> cuflash.backward(np.ones_like(out), q, k, v, out, lse, scale=0)[2]
    array([[1., 1.],
           [1., 1.]], dtype=float32)
    """
    return _launch.backward(dout, q, k, v, out, lse, scale, causal, window, dlse, grads, engine)


def vjp(q, k, v, *, scale=None, causal=False, window=None, return_lse=False, engine=None):
    """Attention, and a function that takes gradients of its results back to its inputs.

    Parameters
    ----------
    q, k, v, scale, causal, window, return_lse, engine
        As in `forward`.

    Returns
    -------
    out : array, or (out, lse)
        What `forward` returns.
    pullback : function
        ``pullback(dout, dlse=None) -> (dq, dk, dv)``, by `backward`. It holds q, k, v, out and lse, which must not
        change before it has been called; it may be called more than once.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.eye(2, dtype=np.float32)
    >>> out, pullback = cuflash.vjp(x, x, x, scale=0)
    >>> dq, dk, dv = pullback(np.ones_like(out))
    >>> dv
    array([[1., 1.],
           [1., 1.]], dtype=float32)
    """
    keywords = {"scale": scale, "causal": causal, "window": window, "engine": engine}
    out, lse = forward(q, k, v, return_lse=True, **keywords)

    def pullback(dout, dlse=None):
        return backward(dout, q, k, v, out, lse, dlse=dlse, **keywords)

    return ((out, lse) if return_lse else out), pullback


def decode(
    q, k_cache, v_cache, *, lengths=None, page_table=None, k_scale=None, v_scale=None, kv_format=None, k_new=None,
    v_new=None, rotary=None, rotary_interleaved=False, overflow=None, scale=None, causal=True, window=None, splits=None,
    batch_invariant=False, return_lse=False, out=None, engine=None,
):  # fmt: skip
    """Attention of each sequence's newest rows against its cache, to which it may append their keys and values first.

    On a GPU head dims to 256; in 16 bits, head_dim to 576 and value_dim to 512 where ``v_cache`` is
    ``k_cache[..., :value_dim]``, as in multi-head latent attention [2]_.

    Parameters
    ----------
    q : array, shape (sequences, heads, queries, head_dim)
        The last ``queries`` positions of each sequence.
    k_cache : array, shape (sequences, key_heads, capacity, head_dim)
        Keys, those of the rows of q included unless ``k_new`` has them. With ``page_table``, shape (pages, key_heads,
        page_size, head_dim). Any strides: an array ``x`` of shape (pages, page_size, key_heads, head_dim) is passed as
        ``x.swapaxes(1, 2)``.
    v_cache : array, shape (sequences, key_heads, capacity, value_dim)
        Values, likewise. May be columns of ``k_cache``, unless the call appends.
    lengths : array of int, shape (sequences,), optional
        Keys of each sequence, before an append; what the cache holds beyond is not read. Default: all of them. Arrays
        on a GPU are not read by the host, and lengths outside 0 to the capacity are taken for the nearer of these.
    page_table : array of int, shape (sequences, most pages), optional
        Page n of a sequence holds its keys from ``n * page_size``. Entries past a length are not looked at. On a GPU a
        page that does not exist is not read: rows that see one of its keys are NaN, and others of their sequence may
        be.
    k_scale : array of float32, shape (key_heads,) or that of k_cache without its last axis, optional
        Of 8-bit caches: what keys are multiplied with, one factor a key head or one a slot; any strides. Default: 1.
    v_scale : array of float32, likewise, optional
        The same of values.
    kv_format : {None, "int8", "e4m3"}, optional
        How caches of 8-bit elements are read: int8 arrays as the numbers they hold (None will do), uint8 arrays as
        FP8 E4M3 with bias 7, which has no infinities, NaN where all other bits than the sign are 1. q is float16 or
        bfloat16 then. `quantize` makes such arrays and their scales.
    k_new : array, shape (sequences, key_heads, queries, head_dim), optional
        Keys of the rows of q, of its dtype. They are written to ``k_cache`` at the positions ``lengths[b]`` to
        ``lengths[b] + queries - 1`` of each sequence, which has so many keys more in this call; nothing else changes,
        nor does ``lengths``, which is required then. The caches may share no element with another array of the call.
        Not with caches of 8 bits.
    v_new : array, shape (sequences, key_heads, queries, value_dim), optional
        Their values, likewise; with ``k_new`` or not at all.
    rotary : (cos, sin), optional
        Two arrays of shape (positions, pairs), of float32 or q's dtype. In q, and in ``k_new`` before it is written,
        columns x and y of pair d become ``x * cos[p, d] - y * sin[p, d]`` and ``y * cos[p, d] + x * sin[p, d]`` in a
        row at position p; in float32 (float64 for float64), rounded once. Columns beyond the pairs stay. Row i is at
        the position of key ``keys - queries + i`` of its sequence, after an append; at 0 where that is negative.
    rotary_interleaved : bool, default False
        Whether pair d is columns 2d and 2d + 1 instead of d and ``d + pairs``.
    overflow : array of int32, shape (sequences,), optional
        With ``k_new``: becomes 1 for each sequence whose new keys do not fit, else 0. They do not where they would pass
        the capacity, a page for them does not exist, a length is negative, or ``rotary`` has too few positions. The
        cache of such a sequence is left as it is, and its out and lse are NaN.
    causal : default True
        As in `forward`, bottom-right against each sequence's own length, after an append.
    splits : int, optional
        Into how many parts, at most, the keys of a sequence are split among blocks of a GPU. Default: what fills the
        GPU, which depends on batch, heads, capacity and the lengths of all sequences, and with it the order of sums.
        NumPy arrays: no effect.
    batch_invariant : bool, default False
        Split at fixed multiples of keys instead, so that the bits of a sequence's result depend neither on what else
        is in the batch nor on the capacity. So it is where ``splits`` is given. NumPy arrays: no effect.
    scale, window, return_lse, out, engine
        As in `forward`.

    Returns
    -------
    out : array, shape (sequences, heads, queries, value_dim)
    lse : array, shape (sequences, heads, queries)
        Only with ``return_lse``. A sequence of length 0 has out 0 and lse -inf.

    Raises
    ------
    TypeError, ValueError
        As in `forward`, also for caches that cannot be appended to; for NumPy arrays also for lengths beyond the cache
        and pages that do not exist, of keys that are there before the call.

    Notes
    -----
    On a GPU the method is Flash-Decoding [1]_. The same inputs on the same GPU give the same bits, wherever pages lie.
    A call can be captured into a CUDA graph: lengths, page table and caches may change between replays, and where it
    appends, whoever replays it adds ``queries`` to lengths in between. Caches whose rows do not begin at multiples of
    16 bytes are copied, all of them, on each call; lengths and page tables of other integers than int32 are converted.
    An append or a rotation is one launch more, and a rotated q one more array of its size. The error is inside the
    bound of `cuflash.bounds`.

    Where values are the first columns of the keys and head dims are above 256, a GPU reads these columns once. In the
    latent attention of DeepSeek's models, with the projections of keys and values multiplied into q and out, such a
    cache has one key head, head_dim 512 + 64 and value_dim 512; ``scale`` is that of the heads before.

    References
    ----------
    .. [1] T. Dao, D. Haziza, F. Massa and G. Sizov, "Flash-Decoding for long-context inference", 2023.
    .. [2] DeepSeek-AI, "DeepSeek-V2: a strong, economical, and efficient mixture-of-experts language model", 2024.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> cache = np.ones((2, 1, 8, 4), np.float32)
    >>> cuflash.decode(cache[:, :, :1], cache, cache, lengths=np.array([3, 0])).squeeze()
    array([[1., 1., 1., 1.],
           [0., 0., 0., 0.]], dtype=float32)

    Two steps that append; for the second, one sequence has no room.

    >>> k, v, new = cache.copy(), cache.copy(), np.full((2, 1, 1, 4), 5, np.float32)
    >>> lengths, overflow = np.array([3, 7]), np.zeros(2, np.int32)
    >>> for _ in range(2):
    ...     out = cuflash.decode(new, k, v, lengths=lengths, k_new=new, v_new=new, overflow=overflow)
    ...     lengths += 1
    >>> k[:, 0, :, 0]
    array([[1., 1., 1., 5., 5., 1., 1., 1.],
           [1., 1., 1., 1., 1., 1., 1., 5.]], dtype=float32)
    >>> overflow, np.isnan(out).any(axis=(1, 2, 3))
    (array([0, 1], dtype=int32), array([False,  True]))

    Values that are columns of the keys.

    >>> latent, q = np.ones((2, 1, 8, 576), np.float16), np.ones((2, 16, 1, 576), np.float16)
    >>> cuflash.decode(q, latent, latent[..., :512], lengths=np.array([3, 8]), scale=192**-0.5).shape
    (2, 16, 1, 512)
    """
    return _launch.decode(
        q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, kv_format, k_new, v_new, rotary, rotary_interleaved,
        overflow, scale, causal, window, splits, batch_invariant, return_lse, out, engine,
    )  # fmt: skip


def merge(outs, lses):
    """Join attention over disjoint sets of keys into attention over all of them.

    ``lse = log(sum(exp(lses)))`` and ``out = sum(exp(lses - lse) * outs)``. A part whose lse is -inf is ignored,
    whatever its out holds.

    Parameters
    ----------
    outs : sequence of arrays, each of shape (..., queries, value_dim)
        Partial results, as `forward` and `decode` return them; or one array with the parts along its first axis.
    lses : sequence of arrays, each of shape (..., queries)
        Their lse.

    Returns
    -------
    out, lse : arrays
        Of the shape and dtype of a part.

    Raises
    ------
    TypeError, ValueError
        Where the parts do not fit together.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> out, lse = cuflash.merge([np.zeros((1, 2)), np.ones((1, 2))], [np.zeros(1), np.zeros(1)])
    >>> out
    array([[0.5, 0.5]])
    """
    return _launch.merge(outs, lses)


def quantize(x, kv_format, *, axis=-1):
    """Round keys or values to 8 bits, for the caches of `decode`.

    Parameters
    ----------
    x : array of float16, bfloat16, float32 or float64
        Keys or values, of any shape.
    kv_format : {"int8", "e4m3"}
        As in `decode`.
    axis : int or tuple of int, default -1
        The axes along which elements share a scale. For an ``x`` of shape (sequences, key_heads, keys, head_dim), -1
        gives a scale a slot and (0, 2, 3) one a head.

    Returns
    -------
    elements : array of int8, for "e4m3" uint8
        Of x's shape, the nearest to ``x / scale``.
    scales : array of float32
        Of x's shape without ``axis``: the largest size of what shares it over the format's largest number, 127 or 448;
        1 where that is 0.

    Raises
    ------
    TypeError, ValueError
        For dtypes that are not supported, what is not an array, and other formats.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> elements, scales = cuflash.quantize(np.array([[0.5, -1.0, 0.25]]), "int8")
    >>> elements, scales
    (array([[  64, -127,   32]], dtype=int8), array([0.00787402], dtype=float32))
    """
    return _launch.quantize(x, kv_format, axis)


def explain(function, *arrays, **keywords):
    """The plan of a call: what would run, and why, without running it.

    Parameters
    ----------
    function : {"forward", "backward", "decode"}
        Name of the function, or the function.
    *arrays, **keywords
        What it would be called with.

    Returns
    -------
    Plan
        Prints itself in a line; ``engine`` and ``reason`` are fields.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.zeros((128, 64), np.float32)
    >>> print(cuflash.explain("forward", x, x, x))
    numpy (the arrays are NumPy's): no launch
    """
    functions = {each.__name__: each for each in (forward, backward, decode)}
    return _launch.explain(getattr(function, "__name__", function), arrays, keywords, functions)
