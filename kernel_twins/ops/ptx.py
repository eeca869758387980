"""PTX instructions that a spec promises for its Triton kernels (``Step.promises``), as regular expressions."""

from __future__ import annotations

LOAD_16_BYTES = r"ld\.global\.v4\.b32"
LOAD_16_BYTES_HINTED = r"ld\.global\S*\.v4\.b32"  # with any cache hint
LOAD_16_BYTES_ONCE = r"ld\.global\.L1::evict_first\S*\.v4\.b32"
LOAD_FROM_L2 = r"ld\.global\.cg\.b32"
SHARED_LOAD = r"ld\.shared"
SHARED_LOAD_16_BYTES = r"ld\.shared\.v4"
ATOMIC_ADD = r"atom\.global\.gpu\.relaxed\.add\.f32"
ATOMIC_ADD_4 = r"atom\.global\.gpu\.relaxed\.add\.v4\.f32"
TICKET = r"atom\.global\.gpu\.acq_rel\.add\.u32"

COPY_16_BYTES = r"cp\.async\.cg"
COPY = r"cp\.async\.c[ag]"
TMA_LOAD = r"cp\.async\.bulk\.tensor\S*\.mbarrier"
TMA_STORE = r"cp\.async\.bulk\.tensor\S*\.bulk_group"
TMA_ADD = r"cp\.reduce\.async\.bulk\.tensor\S*\.add\.bulk_group"
PROXY_FENCE = r"fence\.proxy\.async"
BARRIER_WAIT = r"mbarrier\.try_wait"

TENSOR_CORES = "mma"
MMA = r"mma\.sync"
MMA_TF32 = r"mma\.sync\S*\.tf32"
WGMMA = r"wgmma\.mma_async"
WGMMA_TF32 = r"wgmma\.mma_async\S*\.tf32"
WGMMA_FROM_REGISTERS = r"wgmma\.mma_async\S*\s*\{[^}]*\}\s*,\s*\{"  # behind the sums, the left operand
WGMMA_256_COLUMNS = r"wgmma\.mma_async\S*\.m64n256k16"
MATRIX_STORE = r"stmatrix"
MORE_REGISTERS = r"setmaxnreg\.inc"

# Programmatic dependent launch: start the next kernel, wait for the one before, and only then access memory.
_UNTOUCHED = r"(?:(?!cp\.async\.bulk|(?:ld|st|atom|red)\.global).)*"
EARLY = rf"(?s)\A{_UNTOUCHED}launch_dependents{_UNTOUCHED}griddepcontrol\.wait"
