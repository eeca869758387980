// dx without dbias: packs that are counted through the matrix, two a thread, as in the forward pass.
#include "dropout/dropout_packs.cuh"
#include "dx.h"
#include "gradient_pack.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int PACKS = 2, BLOCKS_PER_SM = 5;  // packs of a thread, blocks of an SM

template <typename T, Activation ACTIVATION, Operand BIAS>
struct Backward {
  float scale;

  __device__ Pack<T> operator()(const bool (&kept)[Pack<T>::SIZE], Pack<T> dout, Pack<T> x,
                                Pack<T> bias) const {
    return Gradients<T, ACTIVATION, BIAS>(kept, dout, x, bias, scale).rounded();
  }
};

template <typename T, Activation ACTIVATION, Operand BIAS>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    dropout_add_backward_dx_packs_kernel(const PackArgs args, const PackLayout layout) {
  const Backward<T, ACTIVATION, BIAS> backward{args.dropout.scale};
  constexpr Operand X = ACTIVATION != Activation::none ? Operand::GIVEN : Operand::MISSING;
  take_packs<T, X, BIAS, PACKS, THREADS>(args, layout, backward);
}

// For matrices that allow no accesses of 16 bytes.
template <typename T, Activation ACTIVATION>
__global__ void __launch_bounds__(THREADS) dropout_add_backward_dx_elements_kernel(const PackArgs args) {
  take_single_elements<T, THREADS>(args, Backward<T, ACTIVATION, Operand::GIVEN>{args.dropout.scale});
}

template <typename T, Activation ACTIVATION>
void launch(const DropoutAddBackwardArgs& args) {
  constexpr Operand X = ACTIVATION == Activation::none ? Operand::MISSING : Operand::GIVEN;
  constexpr int64_t STEP = THREADS * Pack<T>::SIZE;
  const PackArgs packs = {.first = args.dout,
                          .second = args.x,
                          .bias = X == Operand::GIVEN ? args.bias : nullptr,
                          .out = args.dx,
                          .M = args.M,
                          .N = args.N,
                          .stride_first = args.stride_dm,
                          .stride_second = args.stride_xm,
                          .dropout = args.dropout};
  const PackLayout layout = layout_of<T, THREADS>(packs);
  const int64_t elements = args.M * args.N;
  if (!layout.wide) {
    dropout_add_backward_dx_elements_kernel<T, ACTIVATION>
        <<<cdiv(elements, STEP), THREADS, 0, args.stream>>>(packs);
    return;
  }
  const auto kernel = packs.bias ? dropout_add_backward_dx_packs_kernel<T, ACTIVATION, X>
                                 : dropout_add_backward_dx_packs_kernel<T, ACTIVATION, Operand::MISSING>;
  kernel<<<cdiv(elements, PACKS * STEP), THREADS, 0, args.stream>>>(packs, layout);
}

}  // namespace

void dropout_add_backward_dx(const DropoutAddBackwardArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, args.activation,
           [&]<typename T, Activation ACTIVATION>() { launch<T, ACTIVATION>(args); });
  CUDA_CHECK(cudaGetLastError());
}
