// dropout_add v05_more_warps: two packs a thread, in half the registers.
//
// Change:   a thread takes two packs, where v04's takes four, and about half the registers: more than twice
//           as many warps are on an SM. A kernel is compiled for every choice of operands, so no branch
//           stands between drawing a mask and its use. Philox block numbers are one 32-bit sum, whose upper
//           half all threads of a block share, as they share the keys and the products of the first rounds. A
//           pack is unpacked after its words are drawn, so that memory answers meanwhile. The kernel is
//           take_packs in dropout/dropout_packs.cuh.
// Why:      v04 has fewer instructions than v03, but half the time none of the four warps of a scheduler can
//           issue. Presumably its loads come in bursts, between which memory waits. Four packs of three
//           operands take 48 registers.
// Counter:  occupancy and dram_share rise; time falls, more without bias and residual, and with GELU.
// Requires: as v04: rows that are contiguous, at any distance; any length.
// Routes:   rows end to end, or whole packs at whole packs' distances, addresses that are multiples of 16
//           bytes, and a bias of a pack at least: this kernel
//           other rows of a pack at least, which do not overlap, of an out at a multiple of 16 bytes: packs
//           of x and of the residual are shifted together from two aligned words each, as single elements
//           take several times the instructions (function_shifted.cu)
//           other matrices: accesses of single elements
// Gap:      a Triton program of 128 threads has two packs a thread as well, and a kernel for every choice of
//           operands.
#include "args.h"
#include "dropout/dropout_shifted.cuh"
#include "forward.cuh"
#include "shifted.h"

namespace {

constexpr int PACKS = 2;
constexpr int THREADS = 256;
constexpr int BLOCKS_PER_SM = 5;

template <typename T, Activation ACTIVATION, Operand RESIDUAL, Operand BIAS>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    dropout_add_v05_more_warps_kernel(const PackArgs args, const PackLayout layout) {
  const Forward<T, ACTIVATION, RESIDUAL, BIAS> forward{args.dropout.scale};
  take_packs<T, RESIDUAL, BIAS, PACKS, THREADS>(args, layout, forward);
}

// For rows that are shorter than a pack or overlap, and for an out that is not aligned to 16 bytes.
template <typename T, Activation ACTIVATION>
__global__ void __launch_bounds__(THREADS) dropout_add_v05_more_warps_elements_kernel(const PackArgs args) {
  take_single_elements<T, THREADS>(
      args, Forward<T, ACTIVATION, Operand::GIVEN, Operand::GIVEN>{args.dropout.scale});
}

template <typename T, Activation ACTIVATION>
void launch(const DropoutAddArgs& args) {
  constexpr int64_t STEP = THREADS * Pack<T>::SIZE;
  const PackArgs packs = packs_of(args);
  const PackLayout layout = layout_of<T, THREADS>(packs);
  const int64_t elements = args.M * args.N;
  if (!layout.wide && are_shifted_packs<T>(packs)) return dropout_add_shifted(args);
  if (!layout.wide) {
    dropout_add_v05_more_warps_elements_kernel<T, ACTIVATION>
        <<<cdiv(elements, STEP), THREADS, 0, args.stream>>>(packs);
    return;
  }
  with_operands(args, [&]<Operand RESIDUAL, Operand BIAS>() {
    const auto kernel = dropout_add_v05_more_warps_kernel<T, ACTIVATION, RESIDUAL, BIAS>;
    kernel<<<cdiv(elements, PACKS * STEP), THREADS, 0, args.stream>>>(packs, layout);
  });
}

}  // namespace

void dropout_add_v05_more_warps(const DropoutAddArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, args.activation,
           [&]<typename T, Activation ACTIVATION>() { launch<T, ACTIVATION>(args); });
  CUDA_CHECK(cudaGetLastError());
}
