"""The products of a Hopper warpgroup, as text: one struct a size, since an instruction names all its registers.

Inline assembly cannot loop over its operands, so what ``kernels/ptx_sm90.cuh`` documents as ``Wgmma<N>`` is written
here. An emulator has a template in its place.
"""

_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def wgmma(element, sizes):
    """Text of ``Wgmma<N>`` for each N of ``sizes``, elements of one kind."""
    structs = "".join(_struct(_TYPES[element], n) for n in sorted(set(sizes)))
    return (
        f"#ifdef __CUDACC_RTC__\nnamespace cuflash {{\ntemplate <int N>\nstruct Wgmma;\n{structs}}}\n#endif\n"
    )


def _struct(kind, n):
    d = n // 2  # registers of d, which come first
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(d))
    places = ", ".join(f"%{i}" for i in range(d))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{places}}}, "

    def function(template, a, operands, inputs, last):
        setp = f"setp.ne.b32 add, %{last}, 0;"
        return (
            f"    template <{template}>\n    static __device__ __forceinline__ void {a} b, bool accumulate) {{\n"
            f'        asm volatile("{{\\n.reg .pred add;\\n{setp}\\n{instruction}{operands};\\n}}"\n'
            f'                     : {outs}\n                     : {inputs}, "r"(static_cast<int>(accumulate))'
        )

    registers = ", ".join(f"%{d + i}" for i in range(4))
    parts = ", ".join(f'"r"(a[{i}])' for i in range(4))
    rs = function(
        "int TRANSPOSE_B",
        f"rs(float (&d)[{d}], const unsigned int (&a)[4], unsigned long long",
        f"{{{registers}}}, %{d + 4}, add, 1, 1, %{d + 6}",
        f'{parts}, "l"(b)',
        d + 5,
    )
    ss = function(
        "int TRANSPOSE_A, int TRANSPOSE_B",
        f"ss(float (&d)[{d}], unsigned long long a, unsigned long long",
        f"%{d}, %{d + 1}, add, 1, 1, %{d + 3}, %{d + 4}",
        '"l"(a), "l"(b)',
        d + 2,
    )
    return (
        f"template <>\nstruct Wgmma<{n}> {{\n{rs},\n                       \"n\"(TRANSPOSE_B));\n    }}\n"
        f"{ss},\n                       \"n\"(TRANSPOSE_A), \"n\"(TRANSPOSE_B));\n    }}\n}};\n"
    )
