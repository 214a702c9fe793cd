"""CompileCase: a kernel as one launch would compile it, for a GPU that isn't there.

Lists of cases are the ``CASES`` of modules ``compile_cases_*.py`` in this folder; ``compile_kernels.py`` compiles them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from triton.runtime import JITFunction


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of a kernel.

    Attributes:
        name: unique; the key of its allowance of spills.
        kernel: the ``@triton.jit`` or ``@gluon.jit`` function.
        signature: argument → type as Triton writes it ("*bf16", "i32", "fp32"), in any order, without the constexprs.
        constexprs: argument → value; an integer argument that is 1 at the launch belongs here too, as Triton has it.
        divisible: integer arguments that are multiples of 16 at the launch. Pointers always are.
        num_warps, num_stages, enable_fp_fusion: of the launch.
    """

    name: str
    kernel: JITFunction[Any]
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    enable_fp_fusion: bool = True
