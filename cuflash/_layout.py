"""Layout: operands as kernels address them, in place where they can be, copied where not; leading axes merged to two.

Nothing here imports CuPy or touches an array.
"""

from dataclasses import dataclass

from ._dtypes import KINDS
from ._problem import LARGEST_AXIS, Operand


@dataclass(frozen=True)
class Copy:
    """An operand laid out anew: an array of this shape and dtype whose rows begin every ``pitch`` bytes.

    In the place of an input it holds ``factor`` times that. In the place of a result it is where kernels write; after
    them it is summed along the axes ``summed`` and copied to the result.
    """

    name: str
    shape: tuple
    pitch: int
    dtype: str
    factor: float = 1.0
    summed: tuple = ()


@dataclass(frozen=True)
class Integers:
    """An array of integers as int32 in C order, what lies outside ``lowest`` to ``highest`` brought to these."""

    name: str
    shape: tuple
    lowest: int
    highest: int


@dataclass(frozen=True)
class TensorMap:
    """A field of a step's arguments: how tensor copies see an operand. Axes innermost first, strides in bytes."""

    operand: str
    dims: tuple
    strides: tuple  # of all axes but the first
    box: tuple
    itemsize: int | None = None  # of an element, where it is not one of the problem's dtype


@dataclass(frozen=True)
class Use:
    """What a kernel does with an operand."""

    operand: Operand
    dtype: str
    chunk: int  # bytes that are moved at once: rows begin at multiples of it
    written: bool = False  # and rows that are written are whole chunks
    tensor: bool = False  # seen through a tensor map
    factor: float = 1.0  # what it has to be multiplied with
    summed: tuple = ()  # axes along which a result has to be summed

    @property
    def itemsize(self):
        """Bytes of an element."""
        return KINDS[self.dtype].itemsize

    @property
    def in_place(self):
        """Whether the kernel can work on the operand where it lies."""
        operand = self.operand
        if self.written and operand.shape[-1] * self.itemsize % self.chunk:
            return False
        plain = self.factor == 1.0 and not self.summed and addressable(operand, self.itemsize, self.chunk)
        return plain and (self.written or not self.tensor or is_tensor(operand))

    def copy_shape(self):
        """Shape of a copy: no longer than the operand is along axes of stride 0, if that can be addressed."""
        *lengths, dim = self.operand.shape
        if self.written or 0 in self.operand.shape:
            return self.operand.shape
        keep = len(lengths) - 1 if self.tensor else len(lengths)  # axes that may stay of stride 0
        axes = enumerate(zip(lengths, self.operand.strides, strict=False))
        return (*(1 if stride == 0 and axis < keep else length for axis, (length, stride) in axes), dim)


def lay_out(batch, uses):
    """Operands by name as the kernel sees them, copies by name, lengths of the two merged leading axes, strides.

    Strides in bytes, by name: along the two merged axes, heads and rows.
    """
    operands, copies = {}, {}

    def copy(name, shape):
        use = uses[name]
        operands[name], pitch = _dense(use.operand, shape, use.itemsize)
        copies[name] = Copy(name, shape, pitch, use.dtype, use.factor, use.summed)

    for name, use in uses.items():
        if use.in_place:
            operands[name] = use.operand
        else:
            copy(name, use.copy_shape())
    lengths, strides = _merged(batch, tuple(operands.values()))
    if len(lengths) > 2:  # more leading axes than a kernel sees: lay all operands out alike
        for name, use in uses.items():
            copy(name, use.operand.shape)
        lengths, strides = _merged(batch, tuple(operands.values()))
    missing = 2 - len(lengths)
    lengths, strides = [1] * missing + lengths, [[0] * len(operands)] * missing + strides
    where = {
        name: (*(axis[n] for axis in strides), *operand.strides[-3:-1])
        for n, (name, operand) in enumerate(operands.items())
    }
    return operands, copies, lengths, where


def tensor_map(name, operand, lengths, strides, box):
    """How copies see an operand: columns, heads, rows, and the two merged axes. Boxes are of (heads, rows) by 64."""
    *_, heads, rows, dim = operand.shape
    batch0, batch1, head, row = strides
    dims = (dim, heads, rows, *lengths)
    live = zip(dims[1:], (head, row, batch0, batch1), strict=True)
    return TensorMap(name, dims, tuple(stride if length > 1 else 16 for length, stride in live), (64, *box, 1, 1))


def contiguous(shape, order, itemsize, pitch=None):
    """Strides in bytes of an array contiguous in ``order``, its rows ``pitch`` bytes apart."""
    strides = [itemsize] * len(shape)
    step = pitch or shape[-1] * itemsize
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def is_contiguous(operand, itemsize):
    """Whether an operand is in C order."""
    steps = contiguous(operand.shape, range(len(operand.shape) - 1), itemsize)
    axes = zip(operand.shape, operand.strides, steps, strict=True)
    return 0 in operand.shape or all(length == 1 or stride == step for length, stride, step in axes)


def _dense(operand, shape, itemsize):
    """The operand as a C-ordered copy of ``shape`` whose rows are whole 16-byte chunks."""
    pitch = -(-operand.shape[-1] * itemsize // 16) * 16
    strides = contiguous(shape, range(len(shape) - 1), itemsize, pitch)
    still = (length != full for length, full in zip(shape, operand.shape, strict=True))
    strides = tuple(0 if s else stride for s, stride in zip(still, strides, strict=True))
    return Operand(operand.shape, strides, True), pitch


def addressable(operand, itemsize, chunk):
    """Whether a kernel can read the operand where it lies: contiguous rows that begin at multiples of ``chunk``."""
    if 0 in operand.shape:  # nothing will be read
        return True
    *lengths, dim = operand.shape
    *strides, last = operand.strides
    chunk = max(chunk, itemsize)
    rows = all(length <= 1 or stride % chunk == 0 for length, stride in zip(lengths, strides, strict=True))
    return rows and (dim <= 1 or last == itemsize) and (operand.aligned or chunk <= itemsize)


def in_chunks(operand, itemsize):
    """Whether rows can be written 16 bytes at a time."""
    return operand.shape[-1] * itemsize % 16 == 0 and addressable(operand, itemsize, 16)


def is_tensor(operand):
    """Whether a tensor map can hold an operand: strides that are not negative, and rows of their own."""
    *axes, row, _ = zip(operand.shape, operand.strides, strict=True)
    largest = 2**40
    return all(n <= 1 or 0 <= s < largest for n, s in axes) and (row[0] <= 1 or 0 < row[1] < largest)


def _merged(batch, operands):
    """Leading axes merged where every operand allows it: lengths, and strides by operand, outermost first."""
    lengths, strides = [], []
    for axis in reversed(range(len(batch))):
        if batch[axis] == 1:
            continue
        here = [operand.strides[axis] for operand in operands]
        fits = lengths and lengths[0] * batch[axis] <= LARGEST_AXIS
        if fits and all(s == inner * lengths[0] for s, inner in zip(here, strides[0], strict=True)):
            lengths[0] *= batch[axis]
        else:
            lengths.insert(0, batch[axis])
            strides.insert(0, here)
    return lengths, strides
