// dx without dbias: packs that are counted through the matrix, as in the forward pass. Where rows are no
// whole packs, lie end to end no more, or are misaligned, packs of dout and x are shifted together from
// aligned words.
#include "dropout/dropout_shifted.cuh"
#include "dx.h"
#include "gradient_pack.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int PACKS = 2, BLOCKS_PER_SM = 5;  // packs of a thread, blocks of an SM
constexpr int SHIFTED_THREADS = 128;
template <int PACKS, bool SLOPES>
constexpr int SHIFTED_BLOCKS = !SLOPES      ? 8
                               : PACKS == 1 ? 7
                                            : 6;  // of an SM

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

template <typename T, Activation ACTIVATION, Operand BIAS, Ends ENDS, int PACKS>
__global__ void __launch_bounds__(SHIFTED_THREADS, SHIFTED_BLOCKS<PACKS, ACTIVATION != Activation::none>)
    dropout_add_backward_dx_shifted_kernel(const PackArgs args, const PackLayout layout) {
  constexpr Operand X = ACTIVATION == Activation::none ? Operand::MISSING : Operand::GIVEN;
  take_shifted_packs<T, X, BIAS, ENDS, PACKS, SHIFTED_THREADS>(
      args, layout, Backward<T, ACTIVATION, BIAS>{args.dropout.scale});
}

// For rows that are shorter than a pack, or overlap.
template <typename T, Activation ACTIVATION>
__global__ void __launch_bounds__(THREADS) dropout_add_backward_dx_elements_kernel(const PackArgs args) {
  take_single_elements<T, THREADS>(args, Backward<T, ACTIVATION, Operand::GIVEN>{args.dropout.scale});
}

template <typename T, Activation ACTIVATION>
void launch_shifted(const PackArgs& args, cudaStream_t stream) {
  const PackLayout layout = layout_of<T, SHIFTED_THREADS>(args);
  const auto launch = [&]<Operand BIAS, Ends ENDS>() {
    // A bias and the end of a row within a pack take the registers of a second pack.
    constexpr int COUNT = BIAS == Operand::MISSING && ENDS == Ends::BETWEEN ? 2 : 1;
    const int64_t blocks = cdiv(args.M * args.N, COUNT * SHIFTED_THREADS * Pack<T>::SIZE);
    dropout_add_backward_dx_shifted_kernel<T, ACTIVATION, BIAS, ENDS, COUNT>
        <<<static_cast<unsigned>(blocks), SHIFTED_THREADS, 0, stream>>>(args, layout);
  };
  const auto with_ends = [&]<Operand BIAS>() {
    args.N % Pack<T>::SIZE == 0 ? launch.template operator()<BIAS, Ends::BETWEEN>()
                                : launch.template operator()<BIAS, Ends::WITHIN>();
  };
  if constexpr (ACTIVATION != Activation::none) {
    if (args.bias) return with_ends.template operator()<Operand::GIVEN>();
  }
  with_ends.template operator()<Operand::MISSING>();
}

template <typename T, Activation ACTIVATION>
void launch(const DropoutAddBackwardArgs& args) {
  constexpr Operand X = ACTIVATION == Activation::none ? Operand::MISSING : Operand::GIVEN;
  constexpr int64_t STEP = THREADS * Pack<T>::SIZE;
  const PackArgs packs = {{.first = args.dout,
                           .second = args.x,
                           .bias = X == Operand::GIVEN ? args.bias : nullptr,
                           .out = args.dx,
                           .M = args.M,
                           .N = args.N,
                           .stride_first = args.stride_dm,
                           .stride_second = args.stride_xm},
                          args.dropout};
  const PackLayout layout = layout_of<T, THREADS>(packs);
  const int64_t elements = args.M * args.N;
  if (!layout.wide && are_shifted_packs<T>(packs)) return launch_shifted<T, ACTIVATION>(packs, args.stream);
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
