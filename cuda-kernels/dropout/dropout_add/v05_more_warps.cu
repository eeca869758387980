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
// Requires: as v04: rows that are contiguous, at any distance; any length. Accesses have 16 bytes where rows
//           lie end to end, or have whole packs at whole packs' distances, addresses are multiples of 16
//           bytes, and a bias has a pack at least.
// Gap:      a Triton program of 128 threads has two packs a thread as well, and a kernel for every choice of
//           operands.
#include "args.h"
#include "dropout/dropout_packs.cuh"
#include "lib/activation_by_dtype.cuh"
#include "lib/values.cuh"

namespace {

constexpr int PACKS = 2;
constexpr int THREADS = 256;
constexpr int BLOCKS_PER_SM = 5;

template <typename T, Activation ACTIVATION, Operand RESIDUAL, Operand BIAS>
struct Forward {
  float scale;

  __device__ Pack<T> operator()(const bool (&kept)[Pack<T>::SIZE], Pack<T> x, Pack<T> residual,
                                Pack<T> bias) const {
    const Values<T> xs(x), residuals(residual), shifts(bias);
    Pack<T> results;
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) {
      float value = xs.of[j];
      if (BIAS == Operand::GIVEN) value += shifts.of[j];
      // Computed for all elements, then selected: computed only where kept, each would take a branch.
      value = activate_for<T, ACTIVATION>(value) * scale;
      value = kept[j] ? value : 0.0f;
      if (RESIDUAL == Operand::GIVEN) value += residuals.of[j];
      set(results, j, from_float<T>(value));
    }
    return results;
  }
};

template <typename T, Activation ACTIVATION, Operand RESIDUAL, Operand BIAS>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    dropout_add_v05_more_warps_kernel(const PackArgs args, const PackLayout layout) {
  const Forward<T, ACTIVATION, RESIDUAL, BIAS> forward{args.dropout.scale};
  take_packs<T, RESIDUAL, BIAS, PACKS, THREADS>(args, layout, forward);
}

// For matrices that allow no accesses of 16 bytes.
template <typename T, Activation ACTIVATION>
__global__ void __launch_bounds__(THREADS) dropout_add_v05_more_warps_elements_kernel(const PackArgs args) {
  take_single_elements<T, THREADS>(
      args, Forward<T, ACTIVATION, Operand::GIVEN, Operand::GIVEN>{args.dropout.scale});
}

// Calls launch.operator()<SECOND, BIAS>().
template <typename Launch>
void with_operands(const PackArgs& args, Launch launch) {
  const auto with_second = [&]<Operand SECOND>() {
    args.bias ? launch.template operator()<SECOND, Operand::GIVEN>()
              : launch.template operator()<SECOND, Operand::MISSING>();
  };
  args.second ? with_second.template operator()<Operand::GIVEN>()
              : with_second.template operator()<Operand::MISSING>();
}

template <typename T, Activation ACTIVATION>
void launch(const DropoutAddArgs& args) {
  constexpr int64_t STEP = THREADS * Pack<T>::SIZE;
  const PackArgs packs = {{.first = args.x,
                           .second = args.residual,
                           .bias = args.bias,
                           .out = args.out,
                           .M = args.M,
                           .N = args.N,
                           .stride_first = args.stride_xm,
                           .stride_second = args.stride_rm},
                          args.dropout};
  const PackLayout layout = layout_of<T, THREADS>(packs);
  const int64_t elements = args.M * args.N;
  if (!layout.wide) {
    dropout_add_v05_more_warps_elements_kernel<T, ACTIVATION>
        <<<cdiv(elements, STEP), THREADS, 0, args.stream>>>(packs);
    return;
  }
  with_operands(packs, [&]<Operand RESIDUAL, Operand BIAS>() {
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
